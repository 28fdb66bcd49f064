"""Draws stochastic attention from its masks: stochastic_attention.png and .svg.

    python -m experiments.illustrate --output_dir=docs/figures

Three panels show which keys each query sees: in a sliding window, in one layer of stochastic
attention with a window as wide, and in both. The fourth counts the tokens that can reach the last
one through a stack of such layers, each with a permutation of its own.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap

from sa_jax import AttentionContext, get_attention
from sa_jax.report import figures as looks

_OUTPUT_DIR = flags.DEFINE_string('output_dir', 'docs/figures', 'Receives the two files.')
_TOKENS = flags.DEFINE_integer('tokens', 48, 'Tokens in the sequence.')
_WINDOW = flags.DEFINE_integer('window', 9, 'Keys a window spans, the query itself included.')
_LAYERS = flags.DEFINE_integer('layers', 4, 'Layers of the stack.')
_DRAWS = flags.DEFINE_integer('draws', 100, 'Draws of all layers, over which reach is averaged.')

_SWA, _SA, _BOTH = (looks.COLORS[name] for name in ('swa', 'sa', 'sa_swa'))
_UNSEEN = '#E8E8E8'


def visibility(name: str, tokens: int, window: int, key: jax.Array | None = None) -> np.ndarray:
    """The boolean `[tokens, tokens]` of which keys (columns) each query (row) sees, causally."""
    query = jnp.zeros((1, tokens, 1, 1))
    mask = get_attention(name).mask(query, query, AttentionContext(key=key), window=window)
    return np.asarray(mask[0, 0])


def tokens_reaching_the_last(layers: list[np.ndarray]) -> list[int]:
    """Counts the tokens that the last one sees through the first layer, the first two, and so on.

    Args:
      layers: visibility `[tokens, tokens]` of each layer, the lowest first.

    Returns:
      A count for each depth, the last token itself included.
    """
    reach = np.eye(len(layers[0]), dtype=bool)
    counts = []
    for mask in layers:
        reach = mask @ reach  # Of booleans: whether any path leads there.
        counts.append(int(reach[-1].sum()))
    return counts


def mean_reach(
    tokens: int, window: int, layers: int, draws: int
) -> tuple[list[float], list[float], list[float]]:
    """Tokens that reach the last one by depth, for SWA, SA and SA + SWA, averaged over draws."""
    swa = visibility('sliding_window', tokens, window)
    counts = []
    for draw in jax.random.split(jax.random.key(1), draws):
        stack = [
            visibility('stochastic', tokens, window, k) for k in jax.random.split(draw, layers)
        ]
        both = [sa | swa for sa in stack]
        counts.append([tokens_reaching_the_last(x) for x in ([swa] * layers, stack, both)])
    return tuple(np.mean(counts, axis=0).tolist())


def draw_mask(axes: plt.Axes, kinds: np.ndarray, title: str, note: str) -> None:
    """Draws a matrix of 0 (unseen), 1 (seen by SWA) and 2 (seen by SA)."""
    tokens = len(kinds)
    future = np.triu(np.ones_like(kinds, bool), 1)
    edges = np.arange(tokens + 1)
    axes.pcolormesh(
        edges,
        edges,
        np.ma.masked_where(future, kinds),
        cmap=ListedColormap([_UNSEEN, _SWA, _SA]),
        vmin=0,
        vmax=2,
        edgecolor='white',
        linewidth=0.4,
        # Thousands of cells would make a large SVG.
        rasterized=True,
    )
    axes.set(aspect='equal', xticks=[], yticks=[], xlim=(0, tokens), ylim=(tokens, 0))
    axes.set_title(title, loc='left')
    axes.set_xlabel('keys', loc='left')
    axes.spines[:].set_visible(False)
    axes.text(tokens, 0.02 * tokens, note, ha='right', va='top', linespacing=1.35)


def draw_reach(axes: plt.Axes, reach: tuple[list[float], ...], tokens: int) -> None:
    """Draws the tokens that reach the last one over the number of layers."""
    depth = np.arange(1, len(reach[0]) + 1)
    axes.axhline(tokens, color='#888888', lw=1, ls=(0, (4, 3)))
    styles = (('SWA', _SWA, 'o'), ('SA', _SA, 's'), ('SA + SWA', _BOTH, 'D'))
    for counts, (label, color, marker) in zip(reach, styles, strict=True):
        axes.plot(depth, counts, color=color, marker=marker, ms=5.5, lw=2, label=label)
    axes.set(xticks=depth, xlabel='layers', box_aspect=1)
    axes.set(ylim=(0, 1.08 * tokens), yticks=np.linspace(0, tokens, 4), ylabel='tokens')
    axes.set_title('Reach of the last token', loc='left')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, loc='lower right', handlelength=1.4, borderaxespad=0)


def main(argv: list[str]) -> None:
    """Draws the figure."""
    del argv
    path = Path(_OUTPUT_DIR.value) / 'stochastic_attention.png'
    path.parent.mkdir(parents=True, exist_ok=True)
    with looks.style():
        looks.save(draw(_TOKENS.value, _WINDOW.value, _LAYERS.value, _DRAWS.value), path)
    print(path)


def draw(tokens: int, window: int, layers: int, draws: int) -> plt.Figure:
    """The three masks and the reach."""
    swa = visibility('sliding_window', tokens, window)
    sa = visibility('stochastic', tokens, window, jax.random.key(0))
    figure, panels = plt.subplots(1, 4, figsize=(10.8, 3.4), layout='constrained')
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03)
    draw_mask(panels[0], 1 * swa, 'Sliding window (SWA)', f'the last\n{window} tokens')
    draw_mask(
        panels[1],
        2 * sa,
        'Stochastic (SA)',
        'the same window\nover shuffled tokens,\nanew in each layer',
    )
    draw_mask(panels[2], np.where(swa, 1, 2 * sa), 'SA + SWA', 'near and far,\njoined by gates')
    panels[0].set_ylabel('queries')
    draw_reach(panels[3], mean_reach(tokens, window, layers, draws), tokens)
    return figure


if __name__ == '__main__':
    app.run(main)
