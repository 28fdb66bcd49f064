"""Damage to files is found by their manifest."""

import json

import pytest

from sa_jax.training import manifest


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / 'checkpoint'
    (folder / 'state' / 'inner').mkdir(parents=True)
    (folder / 'state' / 'a').write_bytes(bytes(range(256)) * 40)
    (folder / 'state' / 'inner' / 'b').write_text('text')
    manifest.write_manifest(folder)
    return folder


def test_what_was_written_is_whole(folder):
    assert manifest.find_damage(folder) is None
    (folder / 'state' / 'later').write_text('is not in the manifest')
    (folder / 'note').write_text('nor is this')
    assert manifest.find_damage(folder) is None


@pytest.mark.parametrize('position', [0, 5_000, 10_239])
def test_a_flipped_bit(folder, position):
    content = bytearray((folder / 'state' / 'a').read_bytes())
    content[position] ^= 16
    (folder / 'state' / 'a').write_bytes(content)
    assert manifest.find_damage(folder) == 'state/a has other content than was written'


def test_a_file_cut_off_or_missing(folder):
    (folder / 'state' / 'a').write_bytes(b'123')
    assert manifest.find_damage(folder) == 'state/a has 3 bytes instead of 10,240'
    (folder / 'state' / 'a').unlink()
    assert manifest.find_damage(folder) == 'state/a is missing'


@pytest.mark.parametrize(
    'text',
    [
        '{',
        '[]',
        '{"state/a": 3}',
        '{"state/a": {"bytes": 10240}}',
        '{"state/a": {"bytes": 1, "sha256": 2}}',
    ],
)
def test_a_damaged_manifest(folder, text):
    (folder / manifest.NAME).write_text(text)
    assert manifest.find_damage(folder) is not None


def test_names_stay_within_the_folder(folder, tmp_path):
    (tmp_path / 'secret').write_text('text')
    for name in ('../secret', 'state/../../secret', str(tmp_path / 'secret')):
        (folder / manifest.NAME).write_text(json.dumps({name: {'bytes': 4, 'sha256': ''}}))
        assert 'which is elsewhere' in manifest.find_damage(folder)
