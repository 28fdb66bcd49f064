"""How all figures look: colours, type, axes, files."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

INK, MUTED = '#222222', '#8A8A8A'
# Okabe and Ito's colours: colour-blind readers tell them apart.
COLORS = {
    'full': INK,
    'swa': '#0072B2',
    'sa': '#E69F00',
    'sa_swa': '#009E73',
    'partition': '#D55E00',
    'local_sa': '#56B4E9',
    'moba': '#CC79A7',
}
MARKERS = {
    'swa': 's',
    'sa': 'o',
    'sa_swa': 'P',
    'partition': 'D',
    'local_sa': 'v',
    'moba': '^',
}
PLAIN_NUMBERS = FuncFormatter(lambda x, _: f'{x:,.10g}')
_STYLE = {
    'font.size': 11,
    'axes.titlesize': 12,
    'axes.titleweight': 'bold',
    'text.color': INK,
    'axes.labelcolor': INK,
    'axes.edgecolor': '#888888',
    'xtick.color': '#555555',
    'ytick.color': '#555555',
    # The same file in every run.
    'svg.hashsalt': 'sa_jax',
}


def style() -> AbstractContextManager:
    """While in context, figures have the common type and colours."""
    return plt.rc_context(_STYLE)


def tidy(axes: plt.Axes) -> None:
    """Leaves faint horizontal lines, and no frame but two axes."""
    axes.grid(axis='y', color='#EEEEEE', lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)


def note(figure: plt.Figure, text: str) -> None:
    """Writes what readers should know in small print below the panels."""
    figure.supxlabel(text, fontsize=9, color=MUTED)


def save(figure: plt.Figure, path: Path) -> None:
    """Writes a PNG and an SVG, and closes the figure.

    Args:
      figure: the figure.
      path: with or without a suffix, which is replaced.
    """
    for suffix, metadata in (('.png', {}), ('.svg', {'Date': None})):
        file = path.with_suffix(suffix)
        figure.savefig(file, dpi=160, facecolor='white', metadata=metadata, bbox_inches='tight')
    plt.close(figure)
