"""Variants are run once each, scored, and compared."""

import json
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

from sa_jax.report import comparison_plot, comparison_tables
from sa_jax.training import comparison
from sa_jax.training.comparison import Case, Comparison, far_batches
from sa_jax.training.program import build_program

FILE = """
    import sys
    sys.path.insert(0, {tests!r})
    import tiny_config

    VARIANTS = {{'main': {{'full': 0, 'sa_swa': 0}}, 'others': {{'swa': 0}}}}
    SEEDS = {{'main': 2, 'others': 0, 'swa': 1}}

    def get_config(variant):
        config = tiny_config.get_config(variant)
        config.data.path = {text!r}
        config.training.steps = {steps}
        config.evaluation.every = 1
        config.evaluation.batches = 1
        return config
"""


@pytest.fixture
def write_config(text_dir, tmp_path):
    def write(steps=3):
        path = tmp_path / 'config.py'
        tests = str(Path(__file__).parent)
        text = FILE.format(tests=tests, text=str(text_dir), steps=steps)
        path.write_text(textwrap.dedent(text))
        return path

    return write


def test_all_first_seeds_come_before_others(write_config):
    path = write_config()
    assert Comparison(path).cases == [
        Case('main', 'full', 0),
        Case('main', 'sa_swa', 0),
        Case('others', 'swa', 0),
        Case('main', 'full', 1),
        Case('main', 'sa_swa', 1),
    ]
    chosen = Comparison(path, variants=['swa'], seeds=[4, 7])
    assert chosen.cases == [Case('others', 'swa', 4), Case('others', 'swa', 7)]
    assert chosen.config(chosen.cases[1]).seed == 7


@pytest.mark.parametrize('name', ['table1_mini', 'table1_gpu'])
def test_variants_of_the_project_differ_in_what_they_attend_with(name):
    study = Comparison(Path(f'configs/pretrain/{name}.py'), seeds=[0])
    made = {}
    for case in study.cases:
        config = study.config(case)
        model = build_program(config, jax.devices()[:1]).model_config
        made[case.variant] = model, config.training.fresh_permutations
    assert len(set(made.values())) == len(made) >= 4
    sizes = {(model.hidden_size, model.num_layers, model.vocab_size) for model, _ in made.values()}
    assert len(sizes) == 1


def test_errors(write_config, tmp_path):
    with pytest.raises(ValueError, match='no variant fulll; expected some of full, sa_swa, swa'):
        Comparison(write_config(), variants=['fulll'])
    with pytest.raises(ValueError, match='does not exist'):
        Comparison(tmp_path / 'absent.py')
    (tmp_path / 'empty.py').write_text('')
    with pytest.raises(ValueError, match='lacks VARIANTS, SEEDS, get_config'):
        Comparison(tmp_path / 'empty.py')
    with pytest.raises(ValueError, match='no finished run yet'):
        comparison.collect(Comparison(write_config()), tmp_path)


def test_only_tokens_far_into_a_row_count():
    batch = {'positions': np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 0, 1, 2, 3, 0]])}
    batch['weights'] = np.ones((2, 8), np.float32)
    (far,) = far_batches([batch])
    np.testing.assert_array_equal(far['weights'], [[0] * 6 + [1] * 2, [0] * 8])


@pytest.mark.slow
def test_runs_are_finished_once_and_reported(write_config, data_dir, tmp_path, one_device):
    path, workdir = write_config(), tmp_path / 'runs'
    started = []

    def run(**options):
        study = Comparison(path, **options)
        return comparison.run_all(study, workdir, data_dir, on_start=started.append)

    assert run(variants=['sa_swa', 'swa'], seeds=[0])
    assert [x.variant for x in started] == ['sa_swa', 'swa']
    assert run(variants=['sa_swa'])
    assert [x[1:] for x in started[2:]] == [('sa_swa', 1)]
    scores = json.loads((workdir / 'sa_swa' / 'seed1' / 'scores.json').read_text())['figures']
    assert 0 < scores['far']['tokens'] < scores['held_out']['tokens']
    assert scores['last_word']['items'] > 400
    assert scores['tokens'] == 3 * 8 * 64
    assert np.shape(scores['gates']['means']['1_sliding_window']) == (3, 2)
    scores = json.loads((workdir / 'swa' / 'seed0' / 'scores.json').read_text())['figures']
    assert scores['learning_curve']['steps'] == [1, 2, 3]
    # Without permutations, all evaluations of a state are the same.
    last = scores['learning_curve']['perplexity'][-1]
    assert last == pytest.approx(scores['held_out']['perplexity'], rel=1e-6)

    figures = json.loads(json.dumps(comparison.collect(Comparison(path), workdir)))
    assert figures['missing'] == [
        {'group': 'main', 'variant': 'full', 'seed': seed} for seed in (0, 1)
    ]
    tables = comparison_tables.tables(figures)
    assert 'Not run yet: `full` (seeds 0, 1).' in tables
    assert '| `sa_swa` | 2 |' in tables
    copy = workdir / 'sa_swa' / 'seed7'
    copy.mkdir()
    scores = json.loads((workdir / 'sa_swa' / 'seed1' / 'scores.json').read_text())
    scores['config']['seed'] = 7
    (copy / 'scores.json').write_text(json.dumps(scores))
    further = comparison.collect(Comparison(path), workdir)['runs']
    assert [x['seed'] for x in further if x['variant'] == 'sa_swa'] == [0, 1, 7]
    comparison_plot.plot(figures, tmp_path)
    for name in ('variants', 'learning', 'gates'):
        for kind in ('png', 'svg'):
            assert (tmp_path / f'{name}.{kind}').stat().st_size > 1000
    write_config(steps=4)
    with pytest.raises(ValueError, match=r'another configuration(.|\n)*training.steps: 3 -> 4'):
        run()


def test_differences_are_paired_by_seed():
    def of(variant, seed, perplexity):
        return {'variant': variant, 'seed': seed, 'held_out': {'perplexity': perplexity}}

    runs = [of('a', 0, 10.0), of('a', 1, 20.0), of('a', 2, 30.0)]
    runs += [of('b', 0, 9.0), of('b', 1, 18.0), of('c', 2, 31.0)]
    found = comparison_tables.difference(runs, 'a', 'b', 'perplexity')
    # 1 and 2: mean 1.5, standard error 0.5, t of one degree of freedom 12.706.
    assert found.value == 1.5
    assert found.half_width == pytest.approx(12.706 * 0.5, rel=1e-4)
    assert comparison_tables.difference(runs, 'c', 'a', 'perplexity') == (1.0, None)
    assert comparison_tables.difference(runs, 'c', 'b', 'perplexity') is None


def test_a_variant_far_behind_does_not_hide_the_others(tmp_path):
    runs = [
        {
            'group': 'main',
            'variant': variant,
            'seed': 0,
            'held_out': {'perplexity': perplexity},
            'far': {'perplexity': 20.0},
            'last_word': {'accuracy': accuracy},
            'gates': {'steps': []},
        }
        for variant, perplexity, accuracy in (
            ('swa', 27.0, 0.09),
            ('sa', 61.8, 0.027),
            ('sa_swa', 26.9, 0.08),
        )
    ]
    comparison_plot.plot({'runs': runs}, tmp_path)
    drawn = (tmp_path / 'variants.svg').read_text()
    assert '61.8 →' in drawn
    assert '← 2.7' in drawn
    assert drawn.count('→') == drawn.count('←') == 1
