"""Mixing of layers of uniform attention: circular windows of odd width, not causal.

Each query attends alike to the w slots around its own, so that a layer is a symmetric, doubly
stochastic n × n matrix: C, a circulant, for a sliding window, and PᵀCP for stochastic attention
with the permutation P. Nothing is quadratic in n but for small n, where dense linear algebra is
quicker. docs/theory.md derives the closed forms. (A causal layer is triangular: its eigenvalues are
its diagonal, and say nothing about mixing.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse.linalg import LinearOperator, eigsh, svds

from sa_jax.attention import inputs, masks

# Up to so many tokens matrices are dense.
DENSE_TOKENS = 256
_TOLERANCE = 1e-9  # relative, of singular values and eigenvalues


def check(length: int, window: int) -> None:
    """Raises a ValueError unless the layers are symmetric and have a window."""
    inputs.check_count('tokens', length, 3)
    inputs.check_count('window', window, 3)
    if window % 2 == 0:
        raise ValueError(
            f'window {window} is even: it reaches one slot further back than on, and a layer is '
            f'not symmetric; choose {window - 1} or {window + 1}'
        )
    if window > length:
        raise ValueError(
            f'window {window} of {length} tokens; expected at most as many slots as tokens'
        )


def circulant_eigenvalues(length: int, window: int) -> np.ndarray:
    """The eigenvalues `[n]` of C by frequency: sin(πkw/n) / (w·sin(πk/n)), a Dirichlet kernel."""
    angle = np.pi * np.arange(1, length) / length
    return np.append(1.0, np.sin(window * angle) / (window * np.sin(angle)))


def second_modulus(length: int, window: int) -> float:
    """The largest modulus of an eigenvalue of C but for the 1 of constant vectors."""
    return float(np.abs(circulant_eigenvalues(length, window)[1:]).max())


def mean_square(length: int, window: int) -> float:
    """By how much one layer contracts the square of what is not constant, on average.

    (n - w) / (w·(n - 1)): the mean square of the n - 1 other eigenvalues, and the factor by which
    a stochastic layer shortens the square of any fixed vector of mean zero in expectation.
    """
    return (length - window) / (window * (length - 1))


def layer_matrix(permutation: np.ndarray, window: int) -> np.ndarray:
    """The dense matrix `[n, n]` of a stochastic layer, from the mask of the attention function.

    Args:
      permutation: `[n]`, the token in each slot; the identity gives a sliding window.
      window: slots, odd.
    """
    matrix = np.asarray(_visible(jnp.asarray(permutation), window), np.float64)
    return matrix / matrix.sum(1, keepdims=True)


@functools.partial(jax.jit, static_argnames='window')
def _visible(permutation, window):
    length = len(permutation)
    tokens = jnp.arange(length)[None], jnp.ones((1, length), jnp.int32)
    return masks.stochastic(
        permutation[None], *tokens, window, is_causal=False, circular=True, num_sinks=0
    )[0]


def apply_layer(x: np.ndarray, permutation: np.ndarray, window: int) -> np.ndarray:
    """The same layer times vectors `[n, ...]`, in O(n) by a running sum."""
    half = window // 2
    slots = x[permutation]
    ring = np.concatenate([slots[-half - 1 :], slots, slots[:half]])
    sums = np.cumsum(ring, axis=0)
    y = np.empty_like(x)
    y[permutation] = (sums[window:] - sums[:-window]) / window
    return y


def second_eigenvalue(permutation: np.ndarray, window: int, seed: int) -> float:
    """The second largest modulus of a stochastic layer's eigenvalues, computed from the layer."""
    length = len(permutation)
    if length <= DENSE_TOKENS:
        moduli = np.abs(np.linalg.eigvalsh(layer_matrix(permutation, window)))
        return float(np.sort(moduli)[-2])
    layer = _deflated(length, lambda x: apply_layer(x, permutation, window))
    (found,) = eigsh(layer, k=1, tol=_TOLERANCE, v0=_start(length, seed), return_eigenvectors=False)
    return float(abs(found))


def second_singular_value(permutations: Sequence[np.ndarray], window: int, seed: int) -> float:
    """The second largest singular value of a product of stochastic layers, which isn't symmetric.

    It bounds how far the product is from the mean of all tokens, from the worst start.

    Args:
      permutations: one for each layer, the first layer first.
      window: slots, odd.
      seed: of the iteration's first vector.
    """
    length = len(permutations[0])
    if length <= DENSE_TOKENS:
        product = np.eye(length)
        for permutation in permutations:
            product = layer_matrix(permutation, window) @ product
        return float(np.linalg.svd(product, compute_uv=False)[1])

    def through(layers):
        def multiply(x):
            for permutation in layers:
                x = apply_layer(x, permutation, window)
            return x

        return multiply

    # Each layer is symmetric: the adjoint is the product in reverse.
    product = _deflated(length, through(permutations), through(permutations[::-1]))
    (found,) = svds(
        product,
        k=1,
        tol=_TOLERANCE,
        v0=_start(length, seed),
        return_singular_vectors=False,
    )
    return float(found)


def distances(permutations: Sequence[np.ndarray], window: int, starts: np.ndarray) -> np.ndarray:
    """Total variation `[layers, starts]` between where a token's share went and uniform.

    Args:
      permutations: one for each layer, the first layer first.
      window: slots, odd.
      starts: tokens.
    """
    length = len(permutations[0])
    mass = np.zeros((length, len(starts)))
    mass[starts, np.arange(len(starts))] = 1
    found = []
    for permutation in permutations:
        mass = apply_layer(mass, permutation, window)
        found.append(np.abs(mass - 1 / length).sum(0) / 2)
    return np.array(found)


def sliding_distances(length: int, window: int, depths: Sequence[int]) -> np.ndarray:
    """The same for layers of a sliding window, at each depth; all starts are alike."""
    eigenvalues = circulant_eigenvalues(length, window)[: length // 2 + 1]
    return np.array(
        [
            np.abs(np.fft.irfft(eigenvalues**depth, length) - 1 / length).sum() / 2
            for depth in depths
        ]
    )


def sliding_mixing_depth(length: int, window: int, distance: float) -> int:
    """The layers of a sliding window after which the total variation is at most `distance`."""
    above, below = 0, 1
    while sliding_distances(length, window, [below])[0] > distance:
        above, below = below, 2 * below
    while below - above > 1:
        middle = (above + below) // 2
        if sliding_distances(length, window, [middle])[0] > distance:
            above = middle
        else:
            below = middle
    return below


class Bounds(NamedTuple):
    """Between what the expected total variation of stochastic layers must lie, by depth."""

    lower: np.ndarray
    upper: np.ndarray


def stochastic_bounds(length: int, window: int, depths: Sequence[int]) -> Bounds:
    """1 - w^ℓ/n from what ℓ layers can reach, ½·√((n - 1)·c^ℓ) from `mean_square` c; 0 to 1."""
    depths = np.asarray(depths, float)
    reached = np.exp(depths * np.log(window) - np.log(length))
    upper = np.sqrt((length - 1) * mean_square(length, window) ** depths) / 2
    return Bounds(np.maximum(0, 1 - reached), np.minimum(1, upper))


def _deflated(
    length: int, multiply: Callable, multiply_by_adjoint: Callable | None = None
) -> LinearOperator:
    """An operator on the vectors of mean zero, which doubly stochastic matrices keep."""

    def centred(function):
        return lambda x: function(x - x.mean(0))

    return LinearOperator(
        (length, length),
        matvec=centred(multiply),
        rmatvec=centred(multiply_by_adjoint or multiply),
        dtype=np.float64,
    )


def _start(length: int, seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).normal(size=length)
    return x - x.mean()
