"""Figures that the paper reports, to be set beside ours.

'Stochastic Attention: Connectome-Inspired Randomized Routing for Expressive Linear-Time Attention',
arXiv 2604.00754.
"""

from typing import NamedTuple


class Pretraining(NamedTuple):
    """A row of Table 1, zero-shot; LAMBADA in OpenAI's and the standard version (inferred)."""

    wikitext: float
    lambada_perplexity: tuple[float, float]
    lambada_accuracy: tuple[float, float]
    mean_accuracy: float


# Table 1, by our names of the variants: 360M parameters, 15B tokens, w = 256.
PRETRAINING = {
    'full': Pretraining(51.34, (185.3, 469.2), (19.5, 15.4), 34.9),
    'swa': Pretraining(57.05, (156.1, 370.6), (21.3, 17.0), 35.1),
    'sa': Pretraining(75.83, (260.1, 785.9), (20.1, 14.1), 34.3),
    'sa_swa': Pretraining(51.98, (131.7, 371.6), (22.8, 17.6), 35.9),
}
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


class TrainingFree(NamedTuple):
    """Accuracies, %, of Tables 4 and 5: sparse prefill, full decoding; MoBA with k = 2."""

    full: float | None
    swa: float | None
    moba: float | None
    sa: float | None


# The tasks of the mean, by their names in lm-evaluation-harness. Which of a task's metrics is meant
# is not stated, nor what the effective window is.
TRAINING_FREE_TASKS = (
    'hellaswag',
    'mmlu',
    'arc_easy',
    'arc_challenge',
    'boolq',
    'lambada_openai',
    'humaneval',
)
# By model, task and effective window; None is what is not known here. 'mean' is over the tasks.
TRAINING_FREE = {
    ('Qwen3-8B', 'mean', 64): TrainingFree(71.5, 50.7, 62.9, 66.4),
    ('Qwen3-8B', 'mean', 128): TrainingFree(71.5, 62.2, 70.7, 70.9),
    ('Qwen3-8B', 'mean', 256): TrainingFree(71.5, 69.1, 71.6, 71.6),
    ('Qwen3-30B-A3B', 'mean', 64): TrainingFree(77.4, 47.0, 66.3, 73.2),
    ('Qwen3-30B-A3B', 'mean', 256): TrainingFree(77.4, 74.9, 76.9, 77.7),
    ('Qwen3-8B', 'mmlu', 32): TrainingFree(None, 29.0, None, 44.4),
    ('Qwen3-8B', 'mmlu', 64): TrainingFree(None, 46.0, 56.4, 63.0),
    ('Qwen3-30B-A3B', 'mmlu', 32): TrainingFree(None, 34.9, None, 52.0),
    ('Qwen3-8B', 'boolq', 64): TrainingFree(None, 63.8, 75.7, 77.1),
    ('Qwen3-8B', 'lambada_openai', 64): TrainingFree(None, 50.2, 44.7, 62.9),
}
