"""The effective window: how many keys a query sees on average.

Methods are compared at the same effective window. Causal stochastic attention sees half of its
slots: with 2·w - 1 of them it has exactly as many visible pairs as a sliding window of w keys, at
every length.
"""

import numpy as np

from sa_jax.attention import inputs, masks


def effective_window(
    kind: str,
    n: int,
    *,
    is_causal: bool = True,
    nominal: bool = False,
    window: int | None = None,
    local_window: int | None = None,
    circular: bool = False,
    chunk_size: int | None = None,
    block_size: int | None = None,
    top_k: int | None = None,
    num_sinks: int = 0,
) -> float:
    """Mean number of keys a query of a sequence of n tokens sees, expected over permutations.

    Args:
      kind: 'full', 'sliding_window', 'stochastic', 'local_stochastic', 'stochastic_partition' or
        'moba'.
      n: tokens in the sequence.
      is_causal: whether later keys stay unseen.
      nominal: the number used to match methods instead, which leaves the sequence's ends, the half
        masked own block and sinks out: n for full attention, w for a sliding window, (w + 1)/2 for
        causal stochastic attention (w if not causal) and for chunks of w, local_window + (w - 1)/2
        for the union of both, block_size · top_k for MoBA.
      window: for 'sliding_window', 'stochastic' and 'local_stochastic'.
      local_window: for 'local_stochastic'.
      circular: for 'stochastic'.
      chunk_size: for 'stochastic_partition'.
      block_size: for 'moba'.
      top_k: for 'moba'.
      num_sinks: first tokens that are always visible; not counted for 'moba', whose chosen blocks
        may hold them.

    Returns:
      Keys per query, itself included.

    Raises:
      ValueError: unknown kind, an option missing or out of range, non-causal MoBA.
    """
    inputs.check_count('n', n, 1)
    inputs.check_count('num_sinks', num_sinks, 0)
    if kind == 'full':
        exact = (n + 1) / 2 if is_causal else n
        return float(n if nominal else exact)
    if kind in ('sliding_window', 'stochastic'):
        inputs.check_count('window', window, 1)
        if kind == 'sliding_window':
            pairs = _sliding_window(n, window, is_causal, num_sinks)
            matched = window
        else:
            in_line = _sliding_window(n, window, False, 0)
            in_window = n * min(window, n) if circular else in_line
            pairs = _randomly_connected(n, in_window, is_causal, num_sinks)
            matched = (window + 1) / 2 if is_causal else window
        return float(matched) if nominal else pairs / n
    if kind == 'local_stochastic':
        inputs.check_count('window', window, 1)
        inputs.check_count('local_window', local_window, 1)
        if not is_causal:
            raise ValueError('is_causal=False; local stochastic attention is causal')
        if nominal:
            return float(local_window + (window - 1) / 2)
        near = _sliding_window(n, local_window, True, num_sinks)
        likely = _likelihood(n, _sliding_window(n, window, False, 0))
        return (near + likely * (n * (n + 1) // 2 - near)) / n
    if kind == 'stochastic_partition':
        inputs.check_count('chunk_size', chunk_size, 1)
        if nominal:
            return float((chunk_size + 1) / 2 if is_causal else chunk_size)
        whole, rest = divmod(n, chunk_size)
        in_chunk = whole * chunk_size**2 + rest**2
        return _randomly_connected(n, in_chunk, is_causal, num_sinks) / n
    if kind == 'moba':
        inputs.check_count('block_size', block_size, 1)
        inputs.check_count('top_k', top_k, 1)
        if not is_causal:
            raise ValueError('is_causal=False; MoBA is only defined causally')
        if nominal:
            return float(block_size * top_k)
        return _moba(n, block_size, top_k) / n
    raise ValueError(
        f'unknown kind {kind!r}; expected full, sliding_window, stochastic, local_stochastic, '
        'stochastic_partition or moba'
    )


def _sliding_window(n, window, is_causal, num_sinks):
    """Visible pairs: those of the window and, beyond it, of the sinks."""
    back, ahead = (window - 1, 0) if is_causal else masks.window_sides(window)
    index = np.arange(n)
    first = np.maximum(index - back, 0)
    last = np.minimum(index + ahead, n - 1)
    pairs = (last - first + 1).sum()
    sinks = min(num_sinks, n)
    pairs += np.minimum(first, sinks).sum()
    if not is_causal:
        pairs += np.maximum(sinks - 1 - last, 0).sum()
    return int(pairs)


def _likelihood(n, connected):
    """That two tokens are connected, if `connected` pairs, own ones included, fall anywhere."""
    return (connected - n) / (n * (n - 1)) if n > 1 else 0.0


def _randomly_connected(n, connected, is_causal, num_sinks):
    """Expected pairs if `connected` ones, each token with itself among them, fall anywhere.

    Every pair of different tokens is as likely among them as any other.
    """
    likely = _likelihood(n, connected)
    sinks = min(num_sinks, n)
    if is_causal:
        to_sinks = sum(n - 1 - j for j in range(sinks))
        others = n * (n - 1) // 2 - to_sinks
    else:
        to_sinks = sinks * (n - 1)
        others = n * (n - 1) - to_sinks
    return n + to_sinks + likely * others


def _moba(n, block_size, top_k):
    """Visible pairs: min(past, top_k - 1) whole blocks and the own one up to the query."""
    index = np.arange(n)
    past = np.minimum(index // block_size, top_k - 1) * block_size
    return int((past + index % block_size + 1).sum())


def visible_keys_of(kind: str):
    """`effective_window` of a kind as `AttentionKind.visible_keys`, deaf to options of logits."""

    def visible_keys(n, *, is_causal=True, implementation=None, logits_soft_cap=None, **options):
        del implementation, logits_soft_cap
        return effective_window(kind, n, is_causal=is_causal, **options)

    return visible_keys
