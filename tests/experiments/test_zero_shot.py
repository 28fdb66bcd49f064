"""Scoring a run's checkpoint, and the files it is converted into."""

import json

import pytest

pytestmark = pytest.mark.slow


def test_a_run_and_its_files_score_alike(run_experiment, tmp_path):
    tales = tmp_path / 'text'
    tales.mkdir()
    text = 'The otter swam, and the heron watched the otter. ' * 20
    for name in ('train0', 'train1', 'validation0'):
        (tales / f'{name}.txt').write_text(text)
    tasks = tmp_path / 'tasks'
    tasks.mkdir()
    item = {'context': 'The otter swam, and the heron watched the', 'continuation': 'otter'}
    (tasks / 'last_word.jsonl').write_text(json.dumps(item) + '\n')
    (tasks / 'tale.txt').write_text(text)
    data_dir = f'--data_dir={tmp_path / "data"}'
    config = [
        '--config=tests/training/tiny_config.py',
        f'--config.data.path={tales}',
        '--config.model.vocab_size=300',
        '--config.data.virtual_shards=2',
        '--config.data.tokenizer.kind=bpe',
        '--config.data.tokenizer.vocab_size=300',
        '--config.training.steps=3',
        '--config.optimizer.warmup_steps=0',
    ]
    done = run_experiment('pretrain', *config, f'--workdir={tmp_path / "run"}', data_dir)
    assert done.returncode == 0, done.stderr
    done = run_experiment(
        'convert', f'--checkpoint={tmp_path / "run"}', f'--output={tmp_path / "f"}', data_dir
    )
    assert done.returncode == 0, done.stderr

    def score(checkpoint, workdir):
        done = run_experiment(
            'zero_shot',
            f'--checkpoint={checkpoint}',
            f'--workdir={workdir}',
            '--tasks=last_word,tale',
            f'--task_data={tasks}',
            '--draws=2',
            '--text_window=64',
            '--dtype=float32',
            data_dir,
        )
        assert done.returncode == 0, done.stderr
        assert '| tale | perplexity |' in (workdir / 'zero_shot.md').read_text()
        return json.loads((workdir / 'result.json').read_text())['figures']

    of_run = score(tmp_path / 'run', tmp_path / 'a')
    of_files = score(tmp_path / 'f', tmp_path / 'b')
    assert of_run == of_files
    assert of_run['tale']['draws'] == 2
    assert of_run['tale']['metrics']['perplexity']['std'] > 0

    done = run_experiment(
        'zero_shot', f'--checkpoint={tmp_path}', '--workdir=x', '--tasks=a', data_dir
    )
    assert done.returncode != 0
    assert 'Traceback' not in done.stderr
    done = run_experiment('convert', f'--checkpoint={tmp_path / "run"}')
    assert 'Give --checkpoint and --output' in done.stdout + done.stderr
