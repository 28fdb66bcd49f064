"""Measurements of stochastic attention as an estimate and as a mixing chain, in plain numbers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from sa_jax.analysis import estimator, spectra
from sa_jax.attention.functions import full_attention
from sa_jax.attention.permutation import draw_permutation

LATER = 'later half'
MIXED = 0.25  # the total variation at which a chain is said to have mixed
_HEADS, _HEAD_DIM = 4, 64
# Iterations for a layer's second eigenvalue grow like tokens / window.
_MOST_WINDOWS = 1000
_STARTS = 16


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured; each field is a flag.

    Raises:
      ValueError: A field is out of range, or two don't fit.
    """

    tokens: int = 2048
    windows: tuple[int, ...] = (16, 32, 64, 128, 256)
    draws: int = 128
    layers: tuple[int, ...] = ()
    texts: int = 1
    spectral_tokens: tuple[int, ...] = (1024, 4096, 16384)
    spectral_window: int = 33
    depth: int = 8
    spectral_draws: int = 8
    seed: int = 0

    def __post_init__(self):
        for name in ('texts', 'depth'):
            if getattr(self, name) < 1:
                raise ValueError(f'{name}={getattr(self, name)}; expected at least 1')
        if self.spectral_draws < 2:
            raise ValueError(f'spectral_draws={self.spectral_draws}; expected at least 2')
        for name, least in (('windows', 3), ('spectral_tokens', 1)):
            values = getattr(self, name)
            if len(values) < least or list(values) != sorted(set(values)):
                raise ValueError(
                    f'{name}={",".join(map(str, values))}; expected at least {least}, ascending'
                )
        estimator.check_windows(self.tokens, self.windows)
        estimator.check_draws(self.draws)
        for length in self.spectral_tokens:
            spectra.check(length, self.spectral_window)


class Source(NamedTuple):
    """Where queries `[B, T, N, H]`, keys and values `[B, T, K, H]` come from."""

    name: str
    query: jax.Array
    key: jax.Array
    value: jax.Array


def gaussian(settings: Settings) -> Source:
    """Independent normal numbers."""
    shape = (3, 1, settings.tokens, _HEADS, _HEAD_DIM)
    return Source('random', *jax.random.normal(jax.random.key(settings.seed), shape))


def measure_errors(source: Source, settings: Settings, progress: tqdm) -> list[dict[str, Any]]:
    """Errors and fits by weights, mask and queries."""
    value = estimator.in_units_of_spread(source.value)
    cases = []
    for is_causal in (False, True):
        for weights in ('uniform', 'softmax'):
            query = source.query if weights == 'softmax' else jnp.zeros_like(source.query)
            inputs = query, source.key, value
            target = full_attention(*inputs, is_causal=is_causal)
            first_order = estimator.first_order(*inputs, is_causal=is_causal)
            errors = []
            for window in settings.windows:
                progress.set_description(f'{source.name}, {weights}, w = {window}')
                key = jax.random.fold_in(jax.random.key(settings.seed), window)
                stochastic = estimator.stochastic_errors(
                    *inputs,
                    target,
                    window=window,
                    is_causal=is_causal,
                    permutation_key=key,
                    draws=settings.draws,
                )
                sliding = estimator.sliding_errors(
                    *inputs, target, window=window, is_causal=is_causal
                )
                expected = first_order.errors(settings.tokens, window, is_causal)
                errors.append((stochastic, sliding, *expected))
                progress.update()
            for queries in ('all', LATER) if is_causal else ('all',):
                which = slice(settings.tokens // 2 if queries == LATER else 0, None)
                effective = 1 / np.asarray(first_order.squares)[:, which]
                cases.append(
                    {
                        'source': source.name,
                        'weights': weights,
                        'mask': 'causal' if is_causal else 'bidirectional',
                        'queries': queries,
                        'effective_keys': float(np.median(effective)),
                        **_summarise(errors, which, is_causal, settings),
                    }
                )
    return cases


def _summarise(
    errors: list[tuple], which: slice, is_causal: bool, settings: Settings
) -> dict[str, Any]:
    """Points and fits over some of the queries.

    Fits are of errors that the share of unseen keys is taken out of: they also vanish as w nears n.
    """
    points, shares = [], []
    for window, (found, sliding, *first_order) in zip(settings.windows, errors, strict=True):
        shares.append(1 - estimator.inclusion(settings.tokens, window, is_causal))
        bias, variance = (float(x[which].mean()) for x in first_order)
        points.append(
            {
                'window': window,
                'slots': estimator.slots(window, is_causal),
                'bias_squared': estimator.estimate(found.bias_squared, which)._asdict(),
                'variance': estimator.estimate(found.variance, which)._asdict(),
                'sliding_squared': float(sliding[which].mean()),
                'first_order_bias_squared': bias,
                'first_order_variance': variance,
            }
        )
    return {
        'points': points,
        'fits': {
            'bias': _fit(points, shares, 'bias_squared', 2),
            'first_order_bias': _fit(points, shares, 'first_order_bias_squared', 2),
            'variance': _fit(points, shares, 'variance', 1),
            'first_order_variance': _fit(points, shares, 'first_order_variance', 1),
            # As of the mean of a random sample.
            'sliding': _fit(points, shares, 'sliding_squared', 1),
        },
    }


def _fit(points: list[dict], shares: list[float], name: str, power: int) -> dict | None:
    """The power law of errors over a power of the unseen share; of the root of squared ones."""
    estimates = []
    for point, share in zip(points, shares, strict=True):
        found = point[name] if isinstance(point[name], dict) else {'value': point[name]}
        scale = share**power
        value = found['value'] / scale if scale > 0 else 0.0
        error = found.get('standard_error', 0.0) / scale if scale > 0 else 0.0
        if name.endswith('squared'):
            value = max(value, 0.0) ** 0.5
            error = error / (2 * value) if value else 0.0
        estimates.append(estimator.Estimate(value, error))
    fit = estimator.fit_power_law([x['window'] for x in points], estimates)
    return None if fit is None else fit._asdict()


def measure_spectra(length: int, settings: Settings, progress: tqdm) -> dict[str, Any]:
    """Gap, singular values and total variation of stochastic layers beside a sliding window's."""
    window, seed = settings.spectral_window, settings.seed
    depths = list(range(1, settings.depth + 1))
    root = jax.random.fold_in(jax.random.key(seed), length)
    keys = jax.random.split(root, (settings.spectral_draws, settings.depth))
    draw = functools.partial(draw_permutation, length=length)
    starts = np.random.default_rng(seed).choice(length, min(length, _STARTS), replace=False)
    found = {'eigenvalue': [], 'singular': [], 'distance': []}
    for of_stack in keys:
        progress.set_description(f'spectra, n = {length}')
        layers = [np.asarray(draw(key)) for key in of_stack]
        if length <= _MOST_WINDOWS * window:
            found['eigenvalue'].append(spectra.second_eigenvalue(layers[0], window, seed))
        found['singular'].append(
            [spectra.second_singular_value(layers[:depth], window, seed) for depth in depths[1:]]
        )
        found['distance'].append(spectra.distances(layers, window, starts))
        progress.update()
    largest = spectra.second_modulus(length, window)
    distances = np.concatenate(found['distance'], axis=1)
    bounds = spectra.stochastic_bounds(length, window, depths)
    singular = np.array(found['singular']).reshape(len(keys), -1)
    mixing_depth = spectra.sliding_mixing_depth(length, window, MIXED)
    sliding_depths = np.unique(np.geomspace(1, 3 * mixing_depth, 60).astype(int))
    mixed = np.flatnonzero(distances.mean(1) <= MIXED)
    return {
        'tokens': length,
        'window': window,
        'sliding_eigenvalue': largest,
        'stochastic_eigenvalues': found['eigenvalue'],
        'mean_square': spectra.mean_square(length, window),
        'depths': depths,
        'sliding_singular': [largest**depth for depth in depths],
        'stochastic_singular': [largest, *singular.mean(0).tolist()],
        'stochastic_singular_spread': [None, *singular.std(0, ddof=1).tolist()],
        'distance': distances.mean(1).tolist(),
        'distance_spread': distances.std(1, ddof=1).tolist(),
        'distance_lower': bounds.lower.tolist(),
        'distance_upper': bounds.upper.tolist(),
        'sliding_distance': spectra.sliding_distances(length, window, depths).tolist(),
        'sliding_curve': {
            'depths': sliding_depths.tolist(),
            'distance': spectra.sliding_distances(length, window, sliding_depths).tolist(),
        },
        'mixing_depth': int(mixed[0]) + 1 if len(mixed) else None,
        'sliding_mixing_depth': mixing_depth,
    }
