"""The settings of a sweep, its cases and inputs."""

import numpy as np
import pytest

from sa_jax.benchmarks.settings import Case, Sweep, cases, draw_inputs


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'window': 0}, 'window is 0; expected at least 1'),
        ({'modes': ('backward',)}, "modes: 'backward'; expected forward, forward_backward"),
        ({'dtypes': ('f32',)}, "dtypes: 'f32'; expected float32"),
        ({'lengths': (1024, 512)}, r'lengths are \[1024, 512\]; expected them ascending'),
        ({'lengths': ()}, r'lengths is \[\]; expected one or more'),
        ({'kinds': ('full', 'full')}, 'expected one or more, each once'),
        ({'peers': ('torch',)}, "peers: 'torch'; expected jax_xla"),
        ({'heads': 4, 'kv_heads': 3}, 'kv_heads 3; expected a divisor of heads'),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Sweep(**settings)


def test_cases_pair_a_peer_with_the_kinds_it_has():
    sweep = Sweep(kinds=('full', 'moba'), implementations=('default', 'xla'), modes=('forward',))
    pairs = [x[:2] for x in cases(sweep)]
    full = ['default', 'xla', 'jax_xla', 'jax_cudnn', 'tokamax', 'torch_sdpa', 'torch_flex']
    assert pairs == [*(('full', x) for x in full), ('moba', 'default'), ('moba', 'xla')]
    assert str(cases(sweep)[0]) == 'full default float32 forward'
    assert cases(sweep)[-1] == Case('moba', 'xla', 'float32', 'forward')


def test_inputs_repeat_and_have_their_shapes():
    sweep = Sweep(batch=2, heads=4, kv_heads=2, head_dim=8)
    first, again = draw_inputs(sweep, 16), draw_inputs(sweep, 16)
    assert [x.shape for x in first.numbers] == [
        (2, 16, 4, 8),
        (2, 16, 2, 8),
        (2, 16, 2, 8),
        (2, 16, 4, 8),
    ]
    np.testing.assert_array_equal(first.key, again.key)
    np.testing.assert_array_equal(np.sort(first.draw.permutation), np.arange(16))
    # bfloat16 keeps eight bits.
    error = np.abs(first.rounded('bfloat16').query - first.query) / np.abs(first.query)
    assert 0 < error.max() <= 2**-8
