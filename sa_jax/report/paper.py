"""Figures that the paper reports, to be set beside ours.

'Stochastic Attention: Connectome-Inspired Randomized Routing for Expressive Linear-Time Attention',
arXiv 2604.00754.
"""

from typing import NamedTuple

# Batch, heads and precision are not stated, nor what ran the full attention.
EFFICIENCY_DEVICE = 'one A100 80 GB'


class Efficiency(NamedTuple):
    """A row of Table 2; SA through PyTorch's FlexAttention with gathers around it."""

    sa_ms: float
    full_ms: float
    speed_up: float


# Table 2, by sequence length.
EFFICIENCY = {
    2048: Efficiency(5.4, 8.0, 1.5),
    8192: Efficiency(15.2, 99.7, 6.6),
    32768: Efficiency(52.8, 1477.0, 28.0),
}
