"""Draws stochastic attention from its masks: docs/figures/stochastic_attention.png and .svg.

    python -m experiments.illustrate --output_dir=docs/figures

Three panels show which keys each query sees: in a sliding window, in one layer of stochastic
attention at the same effective window, and in either. The fourth counts the tokens whose
information reaches the last one through a stack of such layers, each with a permutation of its own.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from absl import app, flags

from sa_jax.attention import AttentionContext, effective_window, get_attention

matplotlib.use('Agg')
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap

_OUTPUT_DIR = flags.DEFINE_string('output_dir', 'docs/figures', 'Receives the two files.')
_TOKENS = flags.DEFINE_integer('tokens', 48, 'Tokens in the sequence.')
_WINDOW = flags.DEFINE_integer('window', 9, 'Keys in the window, the query itself included.')
_LAYERS = flags.DEFINE_integer('layers', 4, 'Layers of the stack.')
_DRAWS = flags.DEFINE_integer('draws', 200, 'Draws of the permutations that are averaged over.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the permutations.')

# Okabe and Ito's colours, told apart by colour-blind readers, and in grey.
_SWA, _SA, _BOTH, _UNSEEN, _INK = '#0072B2', '#E69F00', '#1B1B1B', '#F1F1F1', '#333333'


def visibility(name: str, tokens: int, window: int, key: jax.Array) -> np.ndarray:
    """Returns the boolean `[tokens, tokens]` of which keys (columns) a query (row) sees."""
    query = jnp.zeros((1, tokens, 1, 1))
    mask = get_attention(name).mask(query, query, AttentionContext(key=key), window=window)
    return np.asarray(mask[0, 0])


def tokens_reached(layers: list[np.ndarray]) -> list[int]:
    """Returns how many tokens reach the last one through the first 1, 2, … layers.

    Args:
      layers: visibility `[tokens, tokens]` of each layer, the lowest first.
    """
    reach = np.eye(len(layers[0]), dtype=bool)
    counts = []
    for mask in layers:
        reach = (mask.astype(int) @ reach) > 0
        counts.append(int(reach[-1].sum()))
    return counts


def draw_masks(panels: list[plt.Axes], swa: np.ndarray, sa: np.ndarray) -> None:
    """Draws a sliding window, stochastic attention, and both together."""
    colors = ListedColormap([_UNSEEN, _SWA, _SA, _BOTH])
    titles = ('Sliding window', 'Stochastic, one layer', 'Both, joined by gates')
    for axes, title, kinds in zip(panels, titles, (1 * swa, 2 * sa, swa + 2 * sa), strict=True):
        future = np.triu(np.ones_like(swa), 1)
        axes.imshow(np.ma.masked_where(future, kinds), cmap=colors, vmin=0, vmax=3)
        axes.set_title(title)
        axes.set_xlabel('key')
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        axes.set_xticks(np.arange(len(swa) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(swa) + 1) - 0.5, minor=True)
        axes.grid(which='minor', color='white', linewidth=0.5)
        axes.tick_params(which='minor', length=0)
    panels[0].set_ylabel('query')


def main(argv: list[str]) -> None:
    """Draws the figure."""
    del argv
