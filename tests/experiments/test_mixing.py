"""The mixing experiment on short sequences, and on a tiny model of bytes."""

import json

import pytest

from sa_jax.analysis.mixing import Settings

SMALL = ['--tokens=48', '--windows=4,8,16', '--draws=32', '--depth=3', '--spectral_draws=2']
SMALL += ['--spectral_tokens=40,300', '--spectral_window=5']


@pytest.mark.slow
def test_the_experiment(run_experiment, byte_model, tmp_path):
    text = tmp_path / 'tale.txt'
    text.write_text('A heron came by and sat with the otter; the otter had seen one before. ' * 2)
    out = tmp_path / 'out'
    model = [f'--model={byte_model}', f'--text={text}', '--layers=0,2', '--texts=2']
    done = run_experiment('mixing', f'--workdir={out}', *SMALL, *model)
    assert done.returncode == 0, done.stderr
    assert (out / 'mixing.md').read_text() in done.stdout
    for name in ('estimator_random', 'estimator_layer_0', 'estimator_layer_2', 'spectra'):
        for suffix in ('png', 'svg'):
            assert (out / f'{name}.{suffix}').stat().st_size > 1000
    result = json.loads((out / 'result.json').read_text())
    assert (result['config']['model'], result['config']['text']) == ('tiny', 'tale.txt')
    cases = {
        (x['source'], x['weights'], x['mask'], x['queries']): x for x in result['figures']['errors']
    }
    assert len(cases) == 3 * 2 * 3
    # Zero queries see all keys alike, whatever the model; its own queries don't.
    assert cases['layer 2', 'uniform', 'bidirectional', 'all']['effective_keys'] == pytest.approx(
        48
    )
    assert cases['layer 2', 'softmax', 'bidirectional', 'all']['effective_keys'] < 40
    points = cases['random', 'uniform', 'bidirectional', 'all']['points']
    assert [x['slots'] for x in points] == [4, 8, 16]
    assert points[0]['variance']['value'] > 3 * points[2]['variance']['value']
    small, large = result['figures']['spectra']
    for x in (small, large):
        assert x['stochastic_eigenvalues'] == pytest.approx([x['sliding_eigenvalue']] * 2)
        assert x['stochastic_singular'][2] < 0.7 * x['sliding_singular'][2]
    # More tokens, more layers.
    assert large['distance'][2] > small['distance'][2]


@pytest.mark.slow
def test_bad_flags_are_named(run_experiment, tmp_path):
    def refused(message, *flags):
        done = run_experiment('mixing', f'--workdir={tmp_path}', *flags)
        assert done.returncode != 0
        assert 'Traceback' not in done.stderr
        assert message in done.stdout + done.stderr

    refused('--windows=4,a; expected whole numbers', '--windows=4,a')
    refused('give --model as well', '--layers=0')
    refused('neither a directory, nor a GGUF file', '--model=absent')


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'tokens': 0}, 'tokens=0; expected'),
        ({'tokens': 128}, 'window 256 of 128 tokens'),
        ({'windows': (0, 4, 8)}, 'window 0 of 2048 tokens'),
        ({'windows': (8, 16)}, 'windows=8,16; expected at least 3, ascending'),
        ({'windows': (8, 8, 16)}, 'ascending'),
        ({'draws': 100}, 'draws=100; expected a multiple of 16'),
        ({'spectral_window': 32}, 'window 32 is even'),
        ({'spectral_tokens': (31,)}, 'window 33 of 31 tokens'),
        ({'spectral_tokens': ()}, 'spectral_tokens=; expected at least 1'),
        ({'spectral_draws': 1}, 'spectral_draws=1; expected at least 2'),
        ({'depth': 0}, 'depth=0; expected at least 1'),
        ({'texts': -1}, 'texts=-1; expected at least 1'),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        Settings(**changes)
