"""Programs that do right, fail, and misbehave."""

import platform
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from sa_jax.evaluation import confinement, sandbox

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='programs run on Linux only')


def run(*programs, seconds=5.0, memory_bytes=1 << 28):
    return sandbox.run_programs(
        programs, confirm_run_unsafe_code=True, seconds=seconds, memory_bytes=memory_bytes
    )


def test_programs_that_reach_their_end_pass():
    assert run(
        'def double(x):\n    return 2 * x\n\nassert double(2) == 4',
        'assert 1 + 1 == 3',
        'this is no Python',
        # Neither is the end.
        'import sys; sys.exit(0)',
        'import os; os._exit(0)',
        'x = "never closed',
        'x = "é"  # An end without a new line',
        '# No character: \ud800',
    ) == ['passed', 'failed', 'failed', 'failed', 'failed', 'failed', 'passed', 'failed']


def test_endless_programs_time_out():
    start = time.monotonic()
    assert run('while True: pass', 'import time; time.sleep(60)', seconds=1) == ['timed out'] * 2
    assert time.monotonic() - start < 10


def test_memory_files_and_output_are_limited():
    flood = 'import sys\nfor _ in range(10_000): sys.stdout.write("x" * 10_000)'
    assert run(
        'x = bytearray(1 << 29)',
        'open("large", "wb").write(bytes(1 << 24))',
        'files = [open(f"{i}", "w") for i in range(1000)]',
        'x = bytearray(1 << 20); open("small", "wb").write(bytes(1 << 10))',
        flood,
        flood.replace('stdout', 'stderr'),
    ) == ['failed', 'failed', 'failed', 'passed', 'passed', 'passed']


def test_the_network_is_cut(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(tmp_path / 'socket'))
        local.listen()
        programs = (
            f'import socket; socket.create_connection({server.getsockname()!r}, timeout=1)',
            'import socket\n'
            f's = socket.socket(socket.AF_UNIX); s.connect({str(tmp_path / "socket")!r})',
            # A second look: it is the operating system that refuses, not a missing server.
            'import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    pass\n'
            'else:\n    raise AssertionError',
        )
        for program in programs[:2]:
            subprocess.run([sys.executable, '-c', program], check=True)
        assert run(*programs) == ['failed', 'failed', 'passed']


def test_no_further_processes(tmp_path):
    mark = tmp_path / 'mark'
    refused = 'try:\n    {}\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError'
    assert run(
        'import os\nwhile True: os.fork()',
        f'import os\nif os.fork() == 0:\n    os.setsid()\n    open({str(mark)!r}, "w")',
        'import subprocess; subprocess.run(["true"])',
        'import os\n' + refused.format('os.fork()'),
        f'import os\n{refused.format("os.kill(os.getppid(), 9)")}',
        'import threading\nt = threading.Thread(target=print)\nt.start(); t.join()',
    ) == ['failed', 'failed', 'failed', 'passed', 'passed', 'passed']
    assert not mark.exists()


def test_other_processes_are_out_of_reach_of_system_calls():
    refused = (
        'import ctypes, os, resource, signal\nlibc = ctypes.CDLL(None, use_errno=True)\n'
        'parent = os.getppid()\nfound = {}\nassert (found, ctypes.get_errno()) == (-1, 1), found'
    )
    tgkill = 'libc.syscall({}, {}, {}, 0)'.format(
        {'x86_64': 234, 'aarch64': 131}[platform.machine()], '{0}', '{0}'
    )
    raised = (
        'try:\n    {}\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError'
    ).format
    limit = 'import os, resource\n'
    assert (
        run(
            refused.format(tgkill.format('parent')),
            refused.format('libc.setpriority(0, parent, 19)'),
            limit + raised('resource.prlimit(os.getppid(), resource.RLIMIT_CPU)'),
            'import os\n' + raised('os.sched_setaffinity(os.getppid(), {0})'),
            'import os\n'
            + tgkill.replace('libc', '__import__("ctypes").CDLL(None)').format('os.getpid()'),
            limit
            + 'resource.prlimit(0, resource.RLIMIT_CPU); resource.getrlimit(resource.RLIMIT_AS)',
            'import os\nos.sched_setaffinity(0, os.sched_getaffinity(0))',
        )
        == ['passed'] * 7
    )


def test_a_killed_program_has_failed():
    # Which the kernel may do where memory runs out; it also shows that a program may signal itself.
    kill = 'import signal; signal.raise_signal(signal.{})'
    assert run(kill.format('SIGKILL'), kill.format('SIGXCPU')) == ['failed', 'timed out']


def test_the_surroundings_are_minimal(tmp_path, monkeypatch):
    monkeypatch.setenv('SECRET', 'word')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    (tmp_path / 'planted.py').write_text('')
    assert run(
        'import os; assert "SECRET" not in os.environ',
        'import os; assert os.listdir() == ["program.py"] and os.environ["HOME"] == os.getcwd()',
        'import planted',
        'import sa_jax.evaluation.confinement',
    )[:3] == ['passed', 'passed', 'failed']


def test_folders_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    assert run(
        f'import os; assert os.path.dirname(os.getcwd()) == {str(tmp_path)!r}; os.mkdir("more")'
    ) == ['passed']
    assert not list(tmp_path.iterdir())


def test_running_has_to_be_confirmed(monkeypatch):
    with pytest.raises(ValueError, match='confirm_run_unsafe_code'):
        sandbox.run_programs(['pass'], confirm_run_unsafe_code=False)
    monkeypatch.setattr(sys, 'platform', 'darwin')
    with pytest.raises(RuntimeError, match='Linux'):
        run('pass')


def test_where_nothing_confines_nothing_runs(tmp_path):
    mark = tmp_path / 'mark'
    program = tmp_path / 'program.py'
    program.write_text(f'open({str(mark)!r}, "w")')
    unknown = (
        f'import platform, runpy, sys; platform.machine = lambda: "vax"; '
        f'sys.argv[1:] = ["5", "{1 << 28}", {str(program)!r}]; '
        f'runpy.run_path({confinement.__file__!r}, run_name="__main__")'
    )
    result = subprocess.run([sys.executable, '-c', unknown], capture_output=True, text=True)
    assert 'no seccomp filter is known for vax' in result.stderr
    assert not mark.exists()
