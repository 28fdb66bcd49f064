"""The conformance suite for attention functions, this package's own and anybody's.

`check_attention('stochastic', window=8)` raises an AssertionError that says what is wrong, or
returns the names of the checks that passed.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from sa_jax.attention import reference
from sa_jax.attention.permutation import segment_rank
from sa_jax.attention.registry import AttentionContext, AttentionKind, get_attention

_HEADS, _KV_HEADS, _HEAD_DIM = 4, 2, 8
_SEGMENTS = ((5, 23), (2, 17))  # number and length of the packed documents; padding follows


def check_attention(
    attention: str | AttentionKind | Callable[..., jax.Array],
    *,
    seed: int = 0,
    is_subquadratic: bool = True,
    **options,
) -> tuple[str, ...]:
    """Checks everything that the model and the experiments rely on.

    Shapes and dtypes (odd lengths, grouped heads, bfloat16), causality, padding (NaN included),
    packing, independence of the batch, jit, vmap, remat and gradients, determinism under a key,
    agreement with the dense reference where the kind has a mask, and growth of memory.

    Args:
      attention: a registered name, an `AttentionKind`, or a function
        `(query, key, value, context, **options)`.
      seed: of the random inputs and of the context's key.
      is_subquadratic: whether memory must grow slower than the square of the length.
      **options: passed to the function, such as `window=8`; choose them small against 40 tokens.

    Returns:
      The names of the checks that passed.

    Raises:
      AssertionError: the first check that fails, with what was found.
    """
    if isinstance(attention, str):
        attention = get_attention(attention)
    elif not isinstance(attention, AttentionKind):
        attention = AttentionKind(getattr(attention, '__name__', 'attention'), attention)
    suite = _Suite(attention, seed, options)
    checks = [
        suite.shapes_and_dtypes,
        suite.causality,
        suite.padding,
        suite.packing,
        suite.independence_of_the_batch,
        suite.transformations,
        suite.determinism,
    ]
    if attention.mask is not None:
        checks.append(suite.agreement_with_the_reference)
    if is_subquadratic:
        checks.append(suite.growth_of_memory)
    for check in checks:
        check()
    return tuple(check.__name__ for check in checks)


class _Suite:
    def __init__(self, kind, seed, options):
        self.kind, self.seed, self.options = kind, seed, options
        self.function = functools.partial(kind.function, **options)
        self.compiled = jax.jit(self.function)

    def inputs(self, batch, length, heads=_HEADS, kv_heads=_KV_HEADS, dtype=jnp.float32):
        """Random query, key and value."""
        shapes = [(batch, length, h, _HEAD_DIM) for h in (heads, kv_heads, kv_heads)]
        keys = jax.random.split(jax.random.key(self.seed), 3)
        return tuple(
            jax.random.normal(key, shape).astype(dtype)
            for key, shape in zip(keys, shapes, strict=True)
        )

    def context(self, segment_ids=None, positions=None):
        return AttentionContext(positions, segment_ids, jax.random.key(self.seed))

    def run(self, inputs, context=None):
        context = self.context() if context is None else context
        return self.compiled(*inputs, context)

    def fail(self, message):
        raise AssertionError(f'{self.kind.name} with {self.options}: {message}')

    def expect_close(self, found, expected, what, tolerance=1e-5):
        """Relative error in the norm; what ought to vanish is held against entries of 0.01."""
        found, expected = (np.asarray(x, np.float64) for x in (found, expected))
        smallest = 0.01 * np.sqrt(expected.size)
        if not np.isfinite(found).all():
            self.fail(f'{what}: not finite')
        error = np.linalg.norm(found - expected) / max(np.linalg.norm(expected), smallest)
        if error > tolerance:
            self.fail(f'{what}: relative error {error:.2e}, expected at most {tolerance:.0e}')

    def expect_zero(self, x, what):
        if np.any(np.asarray(x, np.float32) != 0):
            self.fail(f'{what}: expected exact zeros, found up to {np.abs(x).max():.3g}')

    def shapes_and_dtypes(self):
        """The output is like the query, for lengths 1, 7 and 53 and any grouping of heads."""
        exact = {}
        for length, kv_heads in ((1, 2), (7, 1), (53, _HEADS)):
            for dtype in (jnp.float32, jnp.bfloat16):
                inputs = self.inputs(2, length, kv_heads=kv_heads, dtype=dtype)
                output = self.run(inputs)
                if (output.shape, output.dtype) != (inputs[0].shape, dtype):
                    self.fail(
                        f'query {inputs[0].shape} {inputs[0].dtype} gave {output.shape} '
                        f'{output.dtype}; expected the same'
                    )
                exact[dtype] = np.asarray(output, np.float32)
            self.expect_close(exact[jnp.bfloat16], exact[jnp.float32], 'bfloat16', 3e-2)

    def causality(self):
        """No output depends on a later token, by exactly zero gradients and by changed inputs."""
        length = 37
        inputs = self.inputs(1, length)
        context = self.context()
        output = self.run(inputs, context)

        @jax.jit
        def gradients(cotangent):
            return jax.vjp(lambda *x: self.function(*x, context), *inputs)[1](cotangent)

        for token in (0, 5, length // 2, length - 2):
            one = jnp.zeros_like(output).at[:, token].set(1.0)
            for name, gradient in zip('qkv', gradients(one), strict=True):
                what = f'gradient of output {token} by later {name}'
                self.expect_zero(gradient[:, token + 1 :], what)
            changed = tuple(x.at[:, token + 1 :].multiply(-3.0) for x in inputs)
            difference = self.run(changed)[:, : token + 1] - output[:, : token + 1]
            self.expect_zero(difference, f'change up to token {token} when later ones change')

    def packed(self):
        """Two documents and padding in one row: inputs, context and the documents' slices."""
        numbers = [number for number, length in _SEGMENTS for _ in range(length)]
        segment_ids = jnp.asarray([numbers + [0] * 7], jnp.int32)
        inputs = self.inputs(1, segment_ids.shape[1])
        context = self.context(segment_ids, segment_rank(segment_ids))
        starts = np.cumsum([0, *(length for _, length in _SEGMENTS)])
        slices = [slice(a, b) for a, b in itertools.pairwise(starts)]
        return inputs, context, slices

    def padding(self):
        """Padding queries give zeros, and NaN in padding reaches neither outputs nor gradients."""
        inputs, context, _ = self.packed()
        expected = self.run(inputs, context)
        is_padding = (context.segment_ids == 0)[..., None, None]
        self.expect_zero(jnp.where(is_padding, expected, 0), 'outputs of padding queries')
        broken = tuple(jnp.where(is_padding, jnp.nan, x) for x in inputs)
        self.expect_close(self.run(broken, context), expected, 'NaN in padding', 0)

        def loss(*inputs):
            output = self.function(*inputs, context)
            return jnp.sum(jnp.where(is_padding, 0, output) ** 2)

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        for name, found, clean in zip('qkv', gradients(*broken), gradients(*inputs), strict=True):
            self.expect_close(found, clean, f'gradient of {name} with NaN in padding', 1e-6)
            self.expect_zero(jnp.where(is_padding, found, 0), f'gradient of padding {name}')

    def packing(self):
        """A document's result is the same alone, padded, and packed behind another."""
        inputs, context, slices = self.packed()
        packed = self.run(inputs, context)
        for part in slices:
            alone = tuple(x[:, part] for x in inputs)
            length = part.stop - part.start
            expected = self.run(alone)
            self.expect_close(packed[:, part], expected, f'document of {length} tokens packed')
            padded = tuple(jnp.pad(x, ((0, 0), (0, 9), (0, 0), (0, 0))) for x in alone)
            valid = (jnp.arange(length + 9) < length).astype(jnp.int32)[None]
            found = self.run(padded, self.context(valid))[:, :length]
            self.expect_close(found, expected, f'document of {length} tokens padded')

    def independence_of_the_batch(self):
        """An example's result doesn't depend on the others."""
        inputs = self.inputs(3, 41)
        expected = self.run(inputs)[1:2]
        self.expect_close(self.run(tuple(x[1:2] for x in inputs)), expected, 'example alone')

    def transformations(self):
        """Under vmap, remat and gradient, calls give what plain ones give."""
        inputs = self.inputs(3, 29)
        context = self.context()

        def function(*inputs):
            return self.function(*inputs, context)

        self.expect_close(function(*inputs), self.run(inputs), 'outside jit')
        mapped = jax.jit(jax.vmap(function))(*(x[:, None] for x in inputs))
        self.expect_close(mapped[:, 0], self.run(inputs), 'vmap')

        def loss(function, *inputs):
            return jnp.sum(jnp.sin(function(*inputs)))

        gradients = [
            jax.jit(jax.grad(functools.partial(loss, f), argnums=(0, 1, 2)))(*inputs)
            for f in (function, jax.checkpoint(function))
        ]
        for name, plain, remat in zip('qkv', *gradients, strict=True):
            self.expect_close(remat, plain, f'gradient of {name} under remat')

    def determinism(self):
        """The same key gives the same bits."""
        inputs = self.inputs(2, 45)
        self.expect_zero(self.run(inputs) - self.run(inputs), 'difference of two runs')

    def agreement_with_the_reference(self):
        """Values and gradients equal dense attention under the kind's mask."""
        shared = ('logits_soft_cap', 'sink_logits')
        logits = {name: self.options[name] for name in shared if name in self.options}
        packed, context, _ = self.packed()
        cases = [(packed, context), (self.inputs(2, 61), self.context())]

        def fast(inputs, context):
            return self.function(*inputs, context)

        def dense(inputs, context):
            mask = self.kind.mask(*inputs[:2], context, **self.options)
            return reference.masked_attention(*inputs, mask, scale=_HEAD_DIM**-0.5, **logits)

        for inputs, context in cases:
            results = []
            for function in (fast, dense):

                def loss(inputs, function=function, context=context):
                    output = function(inputs, context)
                    return jnp.sum(jnp.sin(output)), output

                results.append(jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs))
            ((_, found), gradients), ((_, expected), expected_gradients) = results
            self.expect_close(found, expected, 'against the reference')
            for name, a, b in zip('qkv', gradients, expected_gradients, strict=True):
                self.expect_close(a, b, f'gradient of {name} against the reference', 1e-4)

    def growth_of_memory(self):
        """Four times the length takes less than eight times the temporary memory, backward too."""

        def loss(*inputs):
            return jnp.sum(self.function(*inputs, self.context()))

        sizes = []
        for length in (2048, 8192):
            inputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in self.inputs(1, length)]
            compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*inputs).compile()
            sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        if sizes[1] > 8 * max(sizes[0], 1):
            self.fail(
                f'temporary memory grows from {sizes[0]:,} to {sizes[1]:,} bytes as the length '
                'grows from 2,048 to 8,192; expected less than eightfold'
            )
