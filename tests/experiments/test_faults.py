"""What happens to long runs, done to the real binary at random moments.

After each fault the run is continued: no step may be lost beyond the last complete checkpoint, none
done twice, and the metrics have to be those of a run that nothing happened to.

`scripts/fault_drill.sh` repeats each fault several times, and prints a table.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from sa_jax.training.metrics import TIME_FIELDS, read_metrics

pytestmark = pytest.mark.slow
STEPS = 40
RHYTHM = (f'--config.training.steps={STEPS}', '--config.training.checkpoint_every=3')
ROUNDS = int(os.environ.get('FAULT_ROUNDS', '1'))
FAULTS = {}


def fault(function):
    """Registers what is done to a run: it gets a `Drill` and returns what was seen."""
    FAULTS[function.__name__] = function
    return function


class Drill:
    """A run that something happens to."""

    def __init__(self, start, texts, workdir, draw):
        self._start, self.texts, self.workdir, self.draw = start, texts, workdir, draw

    def start(self, *flags, workdir=None, processes=None):
        """Starts the run, or another one in the same workdir."""
        return self._start(workdir or self.workdir, *RHYTHM, *flags, processes=processes)

    def finish(self, process):
        """Waits for a process; returns its exit status and output."""
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def start_until(self, at_least=4, **options):
        """Starts the run and returns it at a random moment."""
        process = self.start(**options)
        steps = at_least + self.draw.randint(0, 20)
        while len(read_metrics(self.workdir / 'metrics.jsonl')) < steps and process.poll() is None:
            time.sleep(0.002)
        time.sleep(self.draw.uniform(0, 0.05))
        assert process.poll() is None, self.finish(process)
        return process

    def kill(self, process):
        """Ends a process as a crash would."""
        os.killpg(process.pid, signal.SIGKILL)
        self.finish(process)

    def refused(self, process, words):
        """Waits for a process that has to end by itself, with a message."""
        status, output = self.finish(process)
        assert status != 0
        assert re.search(words, output), output
        return re.search(words, output)[0]

    def checkpoints(self):
        """The complete checkpoints, the newest first."""
        found = (x for x in (self.workdir / 'checkpoints').iterdir() if x.name.isdecimal())
        return sorted(found, key=lambda x: -int(x.name))


@fault
def sigkill(drill):
    drill.kill(drill.start_until())
    return 'killed'


@fault
def sigkill_while_saving(drill):
    process = drill.start_until()
    folder = drill.workdir / 'checkpoints'
    while process.poll() is None and not list(folder.glob('*tmp*')):
        time.sleep(0.0005)
    drill.kill(process)
    return f'{len(list(folder.glob("*tmp*")))} unfinished checkpoint left'


@fault
def sigterm(drill):
    process = drill.start_until()
    process.send_signal(signal.SIGTERM)
    status, output = drill.finish(process)
    assert status == 0, output
    assert 'the same command continues' in output
    (newest, *_), records = drill.checkpoints(), read_metrics(drill.workdir / 'metrics.jsonl')
    assert int(newest.name) == records[-1]['step']
    return 'saved and ended'


@fault
def sigkill_of_one_of_two_processes(drill):
    process = drill.start_until(processes=2)
    found = subprocess.run(
        ['pgrep', '-s', str(process.pid), '-f', f'process={drill.draw.randint(0, 1)}'],
        capture_output=True,
        text=True,
        check=True,
    )
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
    killed = time.monotonic()
    message = drill.refused(process, 'Process . ended with exit code')
    seconds = time.monotonic() - killed
    assert seconds < 60
    return f'{message} …, the other after {seconds:.0f} s'


@fault
def full_disk(drill):
    drill.workdir.mkdir()
    kilobytes = drill.draw.randint(1500, 3500)
    with mounted(drill.workdir, f'size={kilobytes}k'):
        status, output = drill.finish(drill.start('--config.training.keep_checkpoints=100'))
        assert status != 0
        assert output.splitlines()[-1].endswith('which continues from the last one.'), output
        assert 'no space left on device' in output
        kept = drill.workdir.with_name('kept')
        shutil.copytree(drill.workdir, kept)
    shutil.copytree(kept, drill.workdir, dirs_exist_ok=True)
    complete = len(drill.checkpoints())
    assert complete > 0
    return f'stopped with {complete} complete checkpoints'


def damaged(drill, change):
    """Changes a file of the newest of several checkpoints; the next call has to notice."""
    drill.kill(drill.start_until(at_least=8))
    newest = drill.checkpoints()[0]
    files = [x for x in newest.glob('*/**/*') if x.is_file() and x.stat().st_size]
    chosen = drill.draw.choice(files)
    change(chosen)
    status, output = drill.finish(drill.start())
    assert status == 0, output
    assert f'are set aside:\n  {newest.name}: {chosen.relative_to(newest)} ' in output
    assert (drill.workdir / 'checkpoints' / f'damaged-{newest.name}').exists()
    return f'{chosen.relative_to(newest)}: the checkpoint before was taken'


@fault
def truncated_file(drill):
    return damaged(drill, lambda x: os.truncate(x, drill.draw.randrange(x.stat().st_size)))


@fault
def flipped_bit(drill):
    def flip(path):
        content = bytearray(path.read_bytes())
        content[drill.draw.randrange(len(content))] ^= 1 << drill.draw.randrange(8)
        path.write_bytes(content)

    return damaged(drill, flip)


@fault
def missing_file(drill):
    return damaged(drill, Path.unlink)


@fault
def damaged_text(drill):
    drill.kill(drill.start_until())
    (path,) = drill.texts.glob('data/text-*/text/*/text-train.array_record*')
    whole = path.read_bytes()
    content = bytearray(whole)
    used = [index for index, byte in enumerate(whole) if byte]  # blocks are filled up with zeros
    content[drill.draw.choice(used)] ^= 1 << drill.draw.randrange(8)
    path.write_bytes(content)
    try:
        status, output = drill.finish(drill.start())
    finally:
        path.write_bytes(whole)
    if status == 0:
        return 'in no document that is read'  # as the metrics have to show
    found = re.search(r'is damaged \([^(:]*', output)
    assert found, output
    return found[0]


@fault
def not_a_number(drill):
    workdir = drill.workdir.with_name('diverged')
    process = drill.start(
        '--config.optimizer.learning_rate=1e30', '--config.optimizer.clip_norm=0', workdir=workdir
    )
    message = drill.refused(process, r'NonFiniteError: Step \d+')
    assert not list((workdir / 'checkpoints').glob('[0-9]*'))
    return message


@fault
def second_trainer(drill):
    first = drill.start_until()
    os.killpg(first.pid, signal.SIGSTOP)  # or it would be done before the second one starts
    message = drill.refused(drill.start(), 'is in use by process [0-9]+')
    os.killpg(first.pid, signal.SIGCONT)
    status, output = drill.finish(first)
    assert status == 0, output
    return message


@fault
def read_only_workdir(drill):
    drill.workdir.mkdir()
    with mounted(drill.workdir, 'ro'):
        return drill.refused(drill.start(), 'cannot be written: Read-only file system')


@fault
def wrong_tokenizer(drill):
    drill.kill(drill.start_until())
    flags = '--config.data.tokenizer.kind=bpe', '--config.data.tokenizer.vocab_size=258'
    return drill.refused(drill.start(*flags), "data.tokenizer.kind: 'bytes' -> 'bpe'")


@fault
def changed_configuration(drill):
    drill.kill(drill.start_until())
    flag = '--config.optimizer.learning_rate=0.5'
    return drill.refused(drill.start(flag), 'optimizer.learning_rate: 0.01 -> 0.5')


@contextlib.contextmanager
def mounted(folder, options):
    """A file system of its own, in memory."""
    command = ['mount', '-t', 'tmpfs', '-o', options, 'tmpfs', str(folder)]
    if shutil.which('mount') is None or subprocess.run(command, check=False).returncode:
        pytest.skip('no file system can be mounted here')
    try:
        yield
    finally:
        subprocess.run(['umount', '-l', str(folder)], check=True)


def records(workdir):
    return [
        {name: value for name, value in record.items() if name not in TIME_FIELDS}
        for record in read_metrics(workdir / 'metrics.jsonl')
    ]


@pytest.fixture(scope='module')
def undisturbed():
    """The metrics of a run that nothing happens to, once one test has made them."""
    return []


@pytest.mark.parametrize('number', range(ROUNDS))
@pytest.mark.parametrize('name', FAULTS)
def test_nothing_is_lost(
    start_training, texts, tmp_path, undisturbed, record_property, name, number
):
    drill = Drill(start_training, texts, tmp_path / 'run', random.Random(f'{name} {number}'))
    if not undisturbed:
        status, output = drill.finish(drill.start(workdir=tmp_path / 'undisturbed'))
        assert status == 0, output
        undisturbed += records(tmp_path / 'undisturbed')
        assert [x['step'] for x in undisturbed] == list(range(1, STEPS + 1))
    seen = FAULTS[name](drill)
    status, output = drill.finish(drill.start())
    assert status == 0, output
    found = records(drill.workdir)
    if name == 'sigkill_of_one_of_two_processes':
        # Sums over two processes are rounded otherwise.
        assert [x['step'] for x in found] == [x['step'] for x in undisturbed]
        losses = [[x['loss'] for x in y] for y in (found, undisturbed)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    else:
        assert found == undisturbed
    assert json.loads((drill.workdir / 'result.json').read_text())['figures']['steps'] == STEPS
    assert not list((drill.workdir / 'checkpoints').glob('*tmp*'))
    record_property('seen', seen)
