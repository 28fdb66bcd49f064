"""Files from elsewhere: whatever is in them, they load, or a ValueError says what is wrong.

Each loader reads damaged copies of a small file of its kind, in a process that may use little more
memory than for the whole one. FUZZ_SECONDS=600 gives each that much of the processor's time and a
random seed; FUZZ_SEED repeats one. What failed stays in the test's folder.
"""

import ast
import contextlib
import faulthandler
import itertools
import json
import multiprocessing
import os
import pickle
import random
import resource
import shutil
import signal
import time
import traceback
from pathlib import Path

import loaders
import mutations
import pytest

import sa_jax
from sa_jax.training.manifest import write_manifest

pytest.importorskip('gguf')
pytest.importorskip('pyarrow')
pytest.importorskip('sentencepiece')
pytest.importorskip('zstandard')

_MEMORY = 1 << 30  # bytes beside what whole files need
_LONGEST = 60  # seconds of the processor's for a file
# Once, for all processes.
_IMPORTS = ['gguf', 'pyarrow.parquet', 'pytest', 'sentencepiece', 'zstandard']
_IMPORTS += ['sa_jax.models.pretrained', 'sa_jax.report.page', 'sa_jax.training.comparison']
_SECONDS = float(os.environ.get('FUZZ_SECONDS', 0))
_SEED = os.environ.get('FUZZ_SEED') or (str(time.time_ns()) if _SECONDS else 'fixed')


def run(target, folder, *args):
    """Runs a function in a process of its own, whose messages are in the folder's log."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(_IMPORTS)
    child = context.Process(target=logged, args=(target, folder, *args))
    child.start()
    child.join()
    assert child.exitcode == 0, f'{folder}: {(folder / "log").read_text()[-5000:]}'


def logged(target, folder, *args):
    os.dup2(os.open(folder / 'log', os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.register(signal.SIGXCPU, chain=True)
    limit_time()
    target(folder, *args)


def limit_time():
    soft = int(time.process_time()) + _LONGEST
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def limit_memory():
    pages = int(Path('/proc/self/statm').read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fuzz(folder, name, seed, seconds):
    """Reads damaged files; writes down how many, and what went wrong where."""
    loader, files = loaders.LOADERS[name], folder / 'files'
    files.mkdir()
    loader.write(files)
    paths = sorted(path for path in files.rglob('*') if path.is_file())
    whole = {path: path.read_bytes() for path in paths}
    loader.read(files)
    limit_memory()
    counts, failures, end = {'read': 0, 'refused': 0}, {}, time.process_time() + seconds
    for number in itertools.count() if seconds else range(loader.count):
        if seconds and time.process_time() > end:
            break
        draw = random.Random(f'{seed} {number}')
        path = draw.choice(paths)
        path.write_bytes(mutations.mutated(draw, whole[path]))
        for manifest in files.rglob('manifest.json'):
            if path != manifest and draw.random() < 0.7:
                write_manifest(manifest.parent)  # so that its sums are right again
        limit_time()
        failure = None
        try:
            loader.read(files)
            counts['read'] += 1
        except ValueError as error:
            counts['refused'] += 1
            text = str(error)
            if not (str(folder) in text or 'saved state of the data' in text):
                failure = f'no file is named: {text[:300]}'
            elif len(text) > 5_000:
                failure = f'{len(text)} characters: {text[:300]}'
        except BaseException:
            failure = traceback.format_exc()[-1_200:]
        if failure:
            failures.setdefault(failure[-100:], f'{number}, {path.name}: {failure}')
            shutil.copytree(files, folder / f'failed-{number}', symlinks=True)
        for path, content in whole.items():
            path.write_bytes(content)
    (folder / 'outcome.json').write_text(json.dumps([counts, list(failures.values())]))


@pytest.mark.parametrize(
    'name',
    [
        pytest.param(name, marks=pytest.mark.slow if loader.is_slow else ())
        for name, loader in loaders.LOADERS.items()
    ],
)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    run(fuzz, tmp_path, name, _SEED, _SECONDS)
    counts, failures = json.loads((tmp_path / 'outcome.json').read_text())
    where = f'{name}, FUZZ_SEED={_SEED}, {tmp_path}: {counts}'
    print(where)
    assert not failures, '\n'.join([where, *failures])
    assert counts['refused'] > sum(counts.values()) / 10


def read_bombs(folder):
    import pyarrow
    import zstandard
    from pyarrow import parquet

    from sa_jax.data import sources
    from sa_jax.data.parquet import read_parquet
    from sa_jax.evaluation.tasks import load_task
    from sa_jax.untrusted import read_json

    limit_memory()
    line = b'{"text": "' + b'a' * 1_000 + b'"}\n'
    for name, piece, size in (('zeros', bytes(1 << 20), 3 << 29), ('lines', line, 1 << 28)):
        path = folder / f'{name}.jsonl.zst'
        with zstandard.open(path, 'wb') as file:
            for _ in range(size // len(piece)):
                file.write(piece)
        with pytest.raises(ValueError, match='is no text: it becomes more than 1,000 times'):
            for _ in sources.read_jsonl(path):
                pass
    path = folder / 'a.parquet'
    rows = pyarrow.DictionaryArray.from_arrays([0] * 1_200, ['x' * (1 << 20)])
    parquet.write_table(pyarrow.table({'text': rows}), path, store_schema=False)
    assert sum(len(text) for _, text in read_parquet(path)) == 1_200 << 20
    plain = pyarrow.table({'text': pyarrow.array(['x' * (65 << 20)])})
    parquet.write_table(plain, path, compression='zstd', use_dictionary=False)
    with pytest.raises(ValueError, match=r'the page at 4 of .* becomes 68,1'):
        next(read_parquet(path))
    for name in ('a.json', 'a.jsonl'):
        with (folder / name).open('wb') as file:
            file.truncate(1 << 36)  # takes no space
    with pytest.raises(ValueError, match='is larger than'):
        read_json(folder / 'a.json')
    with pytest.raises(ValueError, match='a line of more than'):
        next(sources.read_jsonl(folder / 'a.jsonl'))
    with pytest.raises(ValueError, match=r'a.jsonl:1: expected a JSON object'):
        load_task(folder / 'a.jsonl')


@pytest.mark.slow
def test_small_files_that_become_large(tmp_path):
    run(read_bombs, tmp_path)


class Hostile:
    def __init__(self, path):
        self._path = path

    def __reduce__(self):
        return os.mkdir, (str(self._path),)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['own', 'safetensors', 'tokenizers', 'checkpoint'])
def test_pickles_are_not_unpickled(name, tmp_path):
    trap, loader, files = tmp_path / 'trap', loaders.LOADERS[name], tmp_path / 'files'
    payload = pickle.dumps(Hostile(trap))
    pickle.loads(payload)
    trap.rmdir()
    files.mkdir()
    loader.write(files)
    paths = [path for path in files.rglob('*') if path.is_file()]
    for folder in {path.parent for path in paths}:
        for planted in ('pytorch_model.bin', 'model.pth', 'a.pkl', 'a.npy', 'checkpoint'):
            (folder / planted).write_bytes(payload)
    with contextlib.suppress(ValueError):
        loader.read(files)
    for path in paths:
        content = path.read_bytes()
        path.write_bytes(payload)
        for manifest in files.rglob('manifest.json'):
            write_manifest(manifest.parent)
        with contextlib.suppress(ValueError):
            loader.read(files)
        path.write_bytes(content)
    assert not trap.exists()


def test_weights_that_can_hold_code_are_refused(tmp_path):
    loaders.write_safetensors(tmp_path)
    for path in tmp_path.glob('*.safetensors'):
        path.rename(path.with_suffix('.bin'))
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(index.read_text().replace('.safetensors"', '.bin"'))
    (tmp_path / '0.bin').write_bytes(pickle.dumps(Hostile(tmp_path / 'trap')))
    with pytest.raises(ValueError, match=r'0.bin is no safetensors file'):
        loaders.read_pretrained(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=r'pickled .* are never read'):
        loaders.read_pretrained(tmp_path)


def test_nothing_that_runs_content_is_called():
    """But for configuration files, which are the user's own."""
    hostile = {'allow_pickle', 'cloudpickle', 'dill', 'eval', 'exec', 'joblib', 'marshal'}
    hostile |= {'np.load', 'numpy.load', 'pickle', 'runpy', 'shelve', 'torch.load', 'yaml'}
    found = set()
    for path in Path(sa_jax.__file__).parent.rglob('*.py'):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import() | ast.ImportFrom():
                    names = {x.name for x in node.names} | {getattr(node, 'module', None)}
                case ast.Call():
                    names = {ast.unparse(node.func), *(x.arg for x in node.keywords)}
                case _:
                    continue
            found |= {(path.name, name) for name in names & hostile}
    assert found == {('comparison.py', 'runpy'), ('step_compile.py', 'runpy')}
