"""Errors of the GPU kernels against the float32 reference, over a grid of calls."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import sa_jax

FORMS = {
    'sliding_window': (sa_jax.sliding_window_attention, {'window': 100}),
    'sliding_window, two-sided': (
        sa_jax.sliding_window_attention,
        {'window': 100, 'is_causal': False},
    ),
    'stochastic': (sa_jax.stochastic_attention, {'window': 128}),
    'stochastic, two-sided': (sa_jax.stochastic_attention, {'window': 128, 'is_causal': False}),
    'stochastic_partition': (sa_jax.stochastic_partition_attention, {'chunk_size': 96}),
}
# Lengths and what comes along: whole blocks, documents and padding, caps and sinks, one token.
CALLS = ((1024, 'plain'), (777, 'packed'), (515, 'capped'), (1, 'plain'))
# Masks don't depend on head_dim: the other sizes do with these.
OTHER_FORMS, OTHER_CALLS = ('sliding_window', 'stochastic'), CALLS[:2]
OUTPUTS = ('output', 'query', 'key', 'value', 'sink_logits')
# Relative, in the norm of an array. A fault in a row shows there as an error of about 1.
VALUES = {'bfloat16': 2e-2, 'float32': 1e-5}
GRADIENTS = {'bfloat16': 2e-2, 'float32': 1e-4}
ROWS = 10  # the tolerance of single rows, as a multiple
SEED = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of two examples with four query heads on two key/value heads.

    Attributes:
      form: one of `FORMS`.
      dtype: of the kernel's inputs.
      head_dim: H.
      length: T.
      options: 'plain'; 'packed': two documents and padding; 'capped': soft cap and sinks.
    """

    form: str
    dtype: str
    head_dim: int
    length: int
    options: str

    def __str__(self):
        return f'{self.form}, {self.dtype}, H={self.head_dim}, T={self.length}, {self.options}'


def arguments(case: Case) -> tuple[jax.Array, ...]:
    """Query, key, value, sink logits and the output's gradient."""
    keys = jax.random.split(jax.random.key(SEED), 5)
    shapes = [(2, case.length, heads, case.head_dim) for heads in (4, 2, 2, 4)]
    query, key, value, gradient = (
        jax.random.normal(k, shape, case.dtype) for k, shape in zip(keys, shapes, strict=False)
    )
    return query, key, value, jax.random.normal(keys[4], (4,)), gradient


def build(case: Case, implementation: str):
    """(query, key, value, sink logits, gradient) -> output and the gradients of the others."""
    function, options = FORMS[case.form]
    options = options | {'implementation': implementation}
    if not case.form.startswith('sliding_window'):
        options['permutation_key'] = jax.random.key(SEED + 1)
    if case.options == 'packed':
        index = jnp.arange(case.length)
        cut, end = case.length // 3 + 1, case.length - case.length // 8
        segments = jnp.where(index < cut, 2, jnp.where(index < end, 1, 0))
        # The second row is one document without padding.
        options['segment_ids'] = jnp.stack([segments, jnp.ones_like(segments)])
    if case.options == 'capped':
        options['logits_soft_cap'] = 5.0
        if case.form != 'stochastic_partition':
            options['num_sinks'] = 3

    def attention_with_gradients(query, key, value, sink_logits, gradient):
        def attention(query, key, value, sink_logits):
            sinks = {'sink_logits': sink_logits} if case.options == 'capped' else {}
            return function(query, key, value, **options, **sinks)

        output, pull_back = jax.vjp(attention, query, key, value, sink_logits)
        return output, *pull_back(gradient)

    return jax.jit(attention_with_gradients)


def errors(found: jax.Array, expected: jax.Array) -> tuple[float, float]:
    """Relative errors in the norm: of the array, and of its worst row `[..., H]`.

    Arrays that ought to vanish are held against entries of 0.01, and rows shorter than the mean
    one against that.
    """
    found, expected = (np.asarray(x, np.float64) for x in (found, expected))
    size = max(np.linalg.norm(expected), 0.01 * np.sqrt(expected.size))
    difference = np.linalg.norm(found - expected, axis=-1)
    mean_row = size / np.sqrt(difference.size)
    rows = np.maximum(np.linalg.norm(expected, axis=-1), mean_row)
    return float(np.linalg.norm(difference) / size), float((difference / rows).max())


def cases(forms: Sequence[str], dtypes: Sequence[str], head_dims: Sequence[int]) -> list[Case]:
    """The grid: all of `CALLS` in all forms with the first head_dim, fewer with the others."""
    return [
        Case(form, dtype, head_dim, length, options)
        for dtype in dtypes
        for head_dim in head_dims
        for form in forms
        for length, options in (CALLS if head_dim == head_dims[0] else OTHER_CALLS)
        if head_dim == head_dims[0] or form in OTHER_FORMS
    ]


def prepare(case: Case, implementation: str) -> tuple[Callable, Callable]:
    """Compiles a case's functions: the kernels' and the reference's."""
    inputs = arguments(case)
    exact = [x.astype(jnp.float32) for x in inputs]
    kernels = build(case, implementation).lower(*inputs).compile()
    return kernels, build(case, 'reference').lower(*exact).compile()


def check(case: Case, kernels: Callable, reference: Callable) -> dict:
    """Runs both; returns the case, the errors of each output, and `is_good`."""
    inputs = arguments(case)
    exact = [x.astype(jnp.float32) for x in inputs]
    record, is_good = {'errors': {}}, True
    for name, a, b in zip(OUTPUTS, kernels(*inputs), reference(*exact), strict=True):
        if name == 'sink_logits' and case.options != 'capped':
            continue
        whole, row = errors(a, b)
        limit = tolerance(case.dtype, name)
        is_good &= whole <= limit and row <= ROWS * limit  # NaN is not
        record['errors'][name] = {'array': whole, 'worst_row': row}
    return dataclasses.asdict(case) | record | {'is_good': bool(is_good)}


def tolerance(dtype: str, name: str) -> float:
    """The largest error of an array that is one of `OUTPUTS`."""
    return (VALUES if name == 'output' else GRADIENTS)[dtype]


def largest(records: Sequence[dict]) -> dict[str, dict[str, dict[str, float]]]:
    """The largest errors by dtype and output; those of failed cases are unknown."""
    found = {}
    for record in records:
        for name, error in record.get('errors', {}).items():
            worst = found.setdefault(record['dtype'], {}).setdefault(name, dict(error))
            for key, value in error.items():
                worst[key] = float(np.maximum(worst[key], value))  # NaN stays
    return found


def table(records: Sequence[dict]) -> str:
    """The largest errors as Markdown."""
    lines = ['| dtype | of | largest error | tolerance | worst row |', '|---|---|---|---|---|']
    for dtype, outputs in largest(records).items():
        for name, error in outputs.items():
            of = name if name == 'output' else f'gradient of {name}'
            limit, row = tolerance(dtype, name), error['worst_row']
            lines.append(f'| {dtype} | {of} | {error["array"]:.1e} | {limit:.0e} | {row:.1e} |')
    return '\n'.join(lines) + '\n'
