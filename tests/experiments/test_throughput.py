"""The throughput experiment on two steps of a tiny model."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """
import sys
sys.path.insert(0, {folder!r})
import tiny_config

def get_config(variant):
    config = tiny_config.get_config(variant)
    config.data.path = {data!r}
    config.data.cross_document_attention = True
    if variant == 'full':
        config.model.attention_options = {{}}
    return config
"""


@pytest.mark.slow
@pytest.mark.parametrize('has_peer', [False, True], ids=['alone', 'peer'])
def test_throughput(run_experiment, tmp_path, has_peer):
    for split in ('train', 'validation'):
        (tmp_path / 'data' / split).mkdir(parents=True)
        for index in range(12):
            text = ' '.join(f'word {index}' for _ in range(60))
            (tmp_path / 'data' / split / f'{index}.txt').write_text(text)
    config = tmp_path / 'config.py'
    folder = str(ROOT / 'tests' / 'training')
    config.write_text(CONFIG.format(folder=folder, data=str(tmp_path / 'data')))
    flags = ['--variants=full,sa_swa', f'--config={config}', f'--workdir={tmp_path / "out"}']
    flags += ['--rounds=1', '--steps=2', f'--data_dir={tmp_path / "cache"}']
    if has_peer:
        pytest.importorskip('transformers')
        flags.append('--peer')
    done = run_experiment('throughput', *flags)
    assert done.returncode == 0, done.stderr
    assert '| sa_swa |' in done.stdout
    figures = json.loads((tmp_path / 'out' / 'result.json').read_text())['figures']
    assert set(figures) == {'full', 'sa_swa'} | ({'transformers'} if has_peer else set())
    for x in figures.values():
        rate = x['tokens_per_s']
        assert 0 < rate['least'] <= rate['median'] <= rate['most']
        assert ('speedup' in x) == has_peer
