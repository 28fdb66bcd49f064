"""The page of all results."""

import json
import re

import pytest

from sa_jax.report import page

PNG = bytes.fromhex(
    '89504e470d0a1a0a0000000d4948445200000001000000010806000000'
    '1f15c4890000000d49444154789c6360000002000001e221bc330000000049454e44ae426082'
)


def write(folder, experiment, config=0, day=1, **changes):
    folder.mkdir(parents=True)
    result = {
        'command': f'python -m experiments.{experiment} --workdir=runs/x',
        'config': {'n': config},
        'device': {'kind': 'cpu', 'host': 'x86_64, 2 CPUs'},
        'figures': {},
        'finished': f'2026-01-{day:02}T00:00:00+00:00',
        'git_revision': '0123456789abcdef0123',
        'versions': {'jax': '0.10.2', 'sa_jax': page.__version__},
    }
    (folder / 'result.json').write_text(json.dumps(result | changes))
    return folder


def run_of(variant, seed, perplexity):
    return {
        'variant': variant,
        'seed': seed,
        'held_out': {'perplexity': perplexity},
        'parameters': 1_400_000,
        'tokens': 10_000_000,
    }


def test_the_page(tmp_path):
    runs = [run_of('full', 0, 50.0), run_of('full', 1, 52.0), run_of('sa_swa', 0, 54.0)]
    folder = write(tmp_path / 'results' / 'mini', 'compare', figures={'runs': runs})
    (folder / 'comparison.md').write_text('# Variants\n\n| a | b |\n|---|---|\n| 1 | 2 |\n')
    (folder / 'gates.png').write_bytes(PNG)
    write(folder / 'full' / 'seed0', 'compare', config=1)  # a run of its own
    found, messages = page.collect([tmp_path / 'results'])
    assert messages == []
    text = page.to_markdown(found, messages, tmp_path / 'out')
    assert '| sa_swa | 51.98 | 1.012 | 54.00 | 1.059 |' in text
    assert '| full | 51.34 | 1.000 | 51.00 ± 1.41 | 1.000 |' in text
    assert '| swa | 57.05 | 1.111 | not measured | not measured |' in text
    assert '![gates](../results/mini/gates.png)' in text
    assert '#### Variants' in text
    assert 'revision 0123456789ab, cpu (x86_64, 2 CPUs), JAX 0.10.2, 2026-01-01.' in text
    assert 'Not measured: `python -m experiments.recall --workdir=DIR`' in text
    assert '(#table-1-pre-training-from-scratch)\n' in text
    assert '(#recall-against-distance): not measured\n' in text
    assert '2 seeds.' in text
    pytest.importorskip('markdown')
    (tmp_path / 'out').mkdir()
    html = page.to_html(text, tmp_path / 'out')
    assert 'src="data:image/png;base64,iVBOR' in html
    assert '<td style="text-align: right;">54.00</td>' in html
    assert set(re.findall(r'href="#([^"]+)"', html)) <= set(re.findall(r'id="([^"]+)"', html))
    assert not re.search('(src|href)="http', html)  # nothing is fetched


def test_what_is_left_out(tmp_path):
    root = tmp_path / 'results'
    old = write(root / 'a', 'mixing', day=1)
    new = write(root / 'b', 'mixing', day=2)
    other = write(root / 'c', 'mixing', config=1)
    write(root / 'd', 'mixing', config=2, versions={'sa_jax': '0.0.1'})
    write(root / 'e', 'mixing', config=3, command='python train.py')
    (root / 'f').mkdir()
    (root / 'f' / 'result.json').write_text('{"config": 0}')
    (root / 'g').mkdir()
    (root / 'g' / 'result.json').write_text('{')
    found, messages = page.collect([root])
    assert [x.folder for x in found] == [new, other]
    assert len(messages) == 5
    assert messages[0] == f'{old}: left out, {new} is newer and has its configuration'
    for message, words in zip(
        messages[1:],
        ('sa_jax 0.0.1', "'python train.py' is no experiment", 'it lacks command', 'Expecting'),
        strict=True,
    ):
        assert words in message
    text = page.to_markdown(found, messages, tmp_path)
    assert '## Left out' in text
    with pytest.raises(ValueError, match='is no folder'):
        page.collect([tmp_path / 'absent'])
