"""Figures of a finished run, drawn from its metrics records."""

import math
from pathlib import Path

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt


def plot_loss(records: list[dict], path: Path, baselines: dict[str, float]) -> None:
    """Draws training and held-out loss over the steps.

    Args:
      records: metrics records.
      path: the PNG to write.
      baselines: held-out loss, nats per token, of reference models by name.
    """
    figure, axes = plt.subplots(figsize=(7, 4.5), layout='constrained')
    axes.plot([r['step'] for r in records], [r['loss'] for r in records], lw=1, label='training')
    held_out = [r for r in records if 'evaluation' in r]
    axes.plot(
        [r['step'] for r in held_out],
        [r['evaluation']['loss'] for r in held_out],
        'o-',
        label='held out',
    )
    for style, (name, loss) in zip(('--', ':', '-.'), baselines.items(), strict=False):
        label = f'{name}, perplexity {math.exp(loss):.0f}'
        axes.axhline(loss, ls=style, color='gray', lw=1, label=label)
    axes.set(xlabel='step', ylabel='loss, nats per token')
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_gates(records: list[dict], path: Path) -> None:
    """Draws the mean gate of each layer over the steps, one panel for each attention path.

    Args:
      records: metrics records, those with gates having one list over the layers per path.
      path: the PNG to write.
    """
    records = [r for r in records if 'gates' in r]
    names = list(records[0]['gates'])
    layers = len(records[0]['gates'][names[0]])
    figure, panels = plt.subplots(
        1, len(names), figsize=(4 * len(names), 3.5), sharey=True, squeeze=False,
        layout='constrained',
    )  # fmt: skip
    colors = plt.get_cmap('viridis')
    for axes, name in zip(panels[0], names, strict=True):
        for layer in range(layers):
            axes.plot(
                [r['step'] for r in records],
                [r['gates'][name][layer] for r in records],
                color=colors(layer / max(layers - 1, 1)),
                label=f'layer {layer}' if layers <= 8 or layer in (0, layers - 1) else None,
            )
        axes.set(title=name, xlabel='step')
    panels[0][0].set(ylabel='mean gate')
    panels[0][-1].legend(fontsize='small')
    figure.savefig(path, dpi=150)
    plt.close(figure)
