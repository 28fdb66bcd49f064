"""Training steps compiled for described clusters: memory and messages of each card."""

from __future__ import annotations

import runpy
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from sa_jax.report import markdown
from sa_jax.report.collectives import totals
from sa_jax.report.gpu_compile import Card, Compiled, Program
from sa_jax.training.program import build_program

_GIB = 2**30


def program(
    config: str, variant: str, topology: str, changes: Mapping[str, Any] | None = None
) -> Program:
    """The training step of a configuration on a cluster.

    Args:
      config: path of the configuration file.
      variant: of the file.
      topology: slices × hosts × cards of a host.
      changes: fields by their dotted names.
    """
    options = {'config': config, 'variant': variant, 'changes': dict(changes or {})}
    name = f'{variant} {topology}'
    return Program(name, f'{__name__}:build_step', options, donated=(0,), topology=topology)


def build_step(
    config: str, variant: str, changes: Mapping[str, Any], devices: Sequence[jax.Device]
) -> tuple:
    """The step and its abstract arguments, for `gpu_compile`."""
    chosen = runpy.run_path(config)['get_config'](variant)
    chosen.update_from_flattened_dict(dict(changes))
    built = build_program(chosen, list(devices))
    return built.step, (built.abstract_state, built.abstract_batch)


def describe(compiled: Compiled) -> dict[str, Any]:
    """What a step takes, JSON; sizes in bytes, of each card."""
    return {
        'program': compiled.name,
        'error': compiled.error,
        'state': compiled.aliased,
        'temporaries': compiled.temporaries,
        'peak': compiled.peak,
        'messages': {
            kind: {'count': count, 'bytes': size}
            for kind, (count, size) in totals(list(compiled.collectives)).items()
        },
    }


def table(rows: Sequence[Mapping[str, Any]], card: Card) -> str:
    """The steps in Markdown."""
    preface = (
        f'GiB of each card, of the {card.memory / _GIB:.1f} of an {card.kind}; messages of a step, '
        'as each card gives or takes them.'
    )
    lines = []
    for row in rows:
        if row['error']:
            lines.append([row['program'], f'not compiled: {row["error"]:.200}', '', '', ''])
            continue
        sizes = [f'{row[x] / _GIB:.2f}' for x in ('state', 'temporaries', 'peak')]
        sent = '; '.join(
            f'{kind}: {x["count"]:,}, {x["bytes"] / _GIB:.2f} GiB'
            for kind, x in row['messages'].items()
        )
        lines.append([row['program'], sent or 'none', *sizes])
    header = ['step', 'messages', 'state', 'temporaries', 'peak']
    return f'{preface}\n\n{markdown.table(header, *lines, texts=2)}\n'
