"""Files that several processes may write."""

from pathlib import Path

import pytest

from sa_jax.training.files import write_atomically


def test_two_processes_may_write_the_same_file(tmp_path, monkeypatch):
    path, write_text = tmp_path / 'cell.json', Path.write_text

    def interrupted(temporary, text):
        # Another process writes in the middle.
        write_text(temporary, text)
        if text == 'ours':
            write_atomically(path, 'theirs')
            assert path.read_text() == 'theirs'

    monkeypatch.setattr(Path, 'write_text', interrupted)
    write_atomically(path, 'ours')
    assert path.read_text() == 'ours'
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_old_content_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / 'cell.json'
    write_atomically(path, 'old')

    def fail(source, target):
        raise OSError('no space')

    monkeypatch.setattr('os.replace', fail)
    with pytest.raises(OSError, match='no space'):
        write_atomically(path, 'new')
    assert path.read_text() == 'old'
    assert list(tmp_path.iterdir()) == [path]
