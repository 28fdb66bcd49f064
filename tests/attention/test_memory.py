"""Long sequences in little memory."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import jax, jax.numpy as jnp
import sa_jax

length = 131_072
inputs = [jax.random.normal(jax.random.key(i), (1, length, 4, 64)) for i in range(3)]

@jax.jit
def step(inputs, key):
    def loss(inputs):
        output = sa_jax.stochastic_attention(*inputs, window=256, permutation_key=key)
        return jnp.sum(jnp.square(output))
    return jax.value_and_grad(loss)(inputs)

loss, gradients = step(inputs, jax.random.key(3))
assert all(bool(jnp.isfinite(x).all()) for x in (loss, *gradients))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.slow
def test_131072_tokens_forward_and_backward_within_4_gib():
    result = subprocess.run(
        [sys.executable, '-c', SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={'JAX_PLATFORMS': 'cpu', 'PATH': ''},
    )
    peak = int(result.stdout)
    print(f'peak resident memory: {peak / 2**30:.2f} GiB')
    assert peak <= 4 * 2**30
