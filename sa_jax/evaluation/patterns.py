"""Attention patterns by their short names, matched on the effective window.

Patterns are compared where a query sees about as many keys: a sliding window of w keys, a causal
stochastic one of 2·w - 1 slots, of which half are visible, a partition into chunks of as many
tokens, the union of a sliding and a stochastic window that have half of the keys each, and MoBA
with two blocks of w / 2 keys. The union's windows overlap and MoBA's own block is half masked, so
that their means are lower than w; `mean_visible_keys` has the true ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from sa_jax.attention.window import effective_window as expected_window

_MOBA_BLOCKS = 2  # the query's own and another one, as in the paper


class MatchedPattern(NamedTuple):
    """An attention function whose options follow from the effective window.

    Attributes:
      attention: Its registered name.
      options: `effective_window` to the options.
      is_random: Whether it draws permutations.
    """

    attention: str
    options: Callable[[int], dict[str, int]]
    is_random: bool = False


def _moba(effective_window: int) -> dict[str, int]:
    if effective_window % _MOBA_BLOCKS:
        raise ValueError(
            f'effective_window = {effective_window} for moba, whose {_MOBA_BLOCKS} blocks share '
            'it; expected an even number.'
        )
    return {'block_size': effective_window // _MOBA_BLOCKS, 'top_k': _MOBA_BLOCKS}


def _local_stochastic(effective_window: int) -> dict[str, int]:
    local_window = (effective_window + 1) // 2
    return {'local_window': local_window, 'window': 2 * (effective_window - local_window) + 1}


PATTERNS: Mapping[str, MatchedPattern] = MappingProxyType(
    {
        'full': MatchedPattern('full', lambda _: {}),
        'swa': MatchedPattern('sliding_window', lambda w: {'window': w}),
        'sa': MatchedPattern('stochastic', lambda w: {'window': 2 * w - 1}, is_random=True),
        'partition': MatchedPattern(
            'stochastic_partition', lambda w: {'chunk_size': 2 * w - 1}, is_random=True
        ),
        'local_sa': MatchedPattern('local_stochastic', _local_stochastic, is_random=True),
        'moba': MatchedPattern('moba', _moba),
    }
)


def matched_pattern(
    name: str,
    effective_window: int | None = None,
    *,
    num_sinks: int = 0,
    full_layers: Sequence[str] = (),
    permutation_scope: str = 'layer',
) -> dict[str, Any]:
    """The changes that give a decoder a pattern.

    Args:
      name: One of `PATTERNS`.
      effective_window: Keys that a query sees, on average and away from the beginning; for 'full'
        it means nothing.
      num_sinks: First tokens that are visible from everywhere, beside the window.
      full_layers: Layers that keep full attention: indices or slices as text, such as '0' or
        '-3:'.
      permutation_scope: 'layer', 'example' or 'head', as in `DecoderConfig`.

    Returns:
      Keyword arguments for `Decoder.with_config`, which checks them against the model.

    Raises:
      ValueError: The pattern is unknown, or can't have this window.
    """
    attention, options, _ = _pattern(name, effective_window)
    changes = {'attention': (attention,), 'permutation_scope': permutation_scope}
    if name == 'full':
        return changes
    options = options(effective_window) | ({'num_sinks': num_sinks} if num_sinks else {})
    changes['attention_options'] = {attention: options}
    changes['layer_attention'] = {layers: {'attention': ('full',)} for layers in full_layers}
    return changes


def mean_visible_keys(
    name: str, effective_window: int | None, n: int, *, num_sinks: int = 0
) -> float:
    """Keys that a query of a sequence of n tokens sees, the mean over queries and permutations.

    Args:
      name: One of `PATTERNS`.
      effective_window: What the pattern is matched on.
      n: Tokens in the sequence.
      num_sinks: First tokens that are visible from everywhere; not counted for 'moba'.

    Raises:
      ValueError: The pattern is unknown, or can't have this window.
    """
    attention, options, _ = _pattern(name, effective_window)
    return expected_window(attention, n, num_sinks=num_sinks, **options(effective_window))


def _pattern(name, effective_window):
    if name not in PATTERNS:
        raise ValueError(f'unknown pattern {name!r}; expected one of {", ".join(PATTERNS)}.')
    if name != 'full' and (not isinstance(effective_window, int) or effective_window < 1):
        raise ValueError(
            f'effective_window = {effective_window!r} for {name}; expected a number of keys, at '
            'least 1.'
        )
    return PATTERNS[name]
