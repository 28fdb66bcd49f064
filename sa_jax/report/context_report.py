"""The context experiment as a table and a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt

from sa_jax.report import figures as looks
from sa_jax.report import markdown


def table(figures: Mapping[str, Any]) -> str:
    """Perplexity by run and context in Markdown.

    Args:
      figures: of the context experiment.
    """
    contexts = figures['contexts']
    preface = (
        f'Perplexity of the last {figures["scored"]} tokens of held-out rows, '
        f'{figures["tokens"]:,} in all, where nothing before the last {contexts[0]:,} to '
        f'{contexts[-1]:,} is seen. In parentheses how far it is above that of the whole row, %.'
    )
    rows = []
    for run in figures['runs']:
        excess = _excess(run)
        cells = [
            f'{perplexity:.2f} ({cost:+.1f})'
            for perplexity, cost in zip(run['perplexity'][:-1], excess[:-1], strict=True)
        ]
        rows.append([f'`{run["run"]}`', *cells, f'{run["perplexity"][-1]:.2f}'])
    return f'{preface}\n\n{markdown.table(["run", *(f"{x:,}" for x in contexts)], *rows)}\n'


def plot(figures: Mapping[str, Any], path: Path) -> None:
    """Draws what hiding earlier tokens costs against the context that is left.

    Args:
      figures: of the context experiment.
      path: of the PNG and the SVG, without suffix.
    """
    contexts = figures['contexts']
    with looks.style():
        figure, axes = plt.subplots(figsize=(6.4, 4.2), layout='constrained')
        labelled = set()
        for run in figures['runs']:
            name = run['run'].partition('/')[0]
            axes.plot(
                contexts,
                _excess(run),
                color=looks.COLORS.get(name, looks.MUTED),
                marker=looks.MARKERS.get(name, 'x'),
                ms=5,
                lw=1.6,
                label=None if name in labelled else name,
            )
            labelled.add(name)
        axes.set(
            xlabel='tokens seen at most',
            ylabel='perplexity above that of the whole row, %',
            xscale='log',
        )
        axes.set_xticks(contexts, [f'{x:,}' for x in contexts])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=9)
        looks.tidy(axes)
        looks.note(figure, f'the last {figures["scored"]} tokens of rows, a line for each run')
        looks.save(figure, path)


def _excess(run: Mapping[str, Any]) -> np.ndarray:
    """Of the perplexities over the last one, in %."""
    found = np.asarray(run['perplexity'])
    return 100 * (found / found[-1] - 1)
