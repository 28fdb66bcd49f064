"""Attention functions by name."""

import jax.numpy as jnp
import pytest

from sa_jax import AttentionContext, AttentionKind, get_attention, register_attention
from sa_jax.attention import registry


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, '_KINDS', dict(registry._KINDS))


def identity(query, key, value, context):
    del key, value, context
    return query


def test_registering_and_finding():
    kind = register_attention('identity', identity)
    assert get_attention('identity') is kind
    assert register_attention('identity', identity) == kind
    with pytest.raises(ValueError, match='already registered'):
        register_attention('identity', lambda *_: None)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'sliding_window'") as error:
        get_attention('sliding-window')
    assert 'full, local_stochastic, moba, sliding_window, stochastic' in str(error.value)


def test_entry_points(monkeypatch):
    class Point:
        name = 'outside'
        loaded = AttentionKind('outside', identity)

        def load(self):
            return self.loaded

    monkeypatch.setattr('importlib.metadata.entry_points', lambda group: [Point()])
    assert get_attention('outside').function is identity
    assert get_attention('outside') is Point.loaded
    Point.name = 'other'
    with pytest.raises(ValueError, match='expected one name'):
        get_attention('other')
    Point.name, Point.loaded = 'broken', identity
    with pytest.raises(TypeError, match='expected an AttentionKind'):
        get_attention('broken')


def test_stochastic_attention_needs_a_key():
    x = jnp.ones((1, 4, 1, 2))
    with pytest.raises(ValueError, match='without a key'):
        get_attention('stochastic').function(x, x, x, AttentionContext(), window=2)
