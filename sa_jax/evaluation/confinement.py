"""Confines this process and becomes a program: `python -I confinement.py CPU_SECONDS MEMORY PATH`.

It is run as a file of its own, by `sandbox`, and hence imports nothing but the standard library.
After it the program can't open a socket, start a process or reach into another one, and its CPU
time, memory and the size of its files are limited. What can't be set up is written to standard
error, and nothing is run; the program's own outputs are dropped.
"""

import ctypes
import os
import platform
import resource
import struct
import sys

_FILE_BYTES = 1 << 20
_OPEN_FILES = 64

# Linux: <linux/prctl.h>, <linux/seccomp.h>, <linux/bpf_common.h>, <linux/sched.h>.
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_SECCOMP_MODE_FILTER = 2
_KILL, _ERRNO, _ALLOW = 0x8000_0000, 0x0005_0000, 0x7FFF_0000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_CALL, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_CLONE_THREAD = 0x0001_0000
# The numbers from here on belong to x86-64's other calling convention.
_X32_CALLS = 0x4000_0000
_EPERM, _ENOSYS = 1, 38

_ARCHITECTURES = {'x86_64': 0xC000_003E, 'aarch64': 0xC000_00B7}
# Numbers of system calls.
_CLONE = {'x86_64': 56, 'aarch64': 220}
_CLONE3 = 435
_DENIED = {
    # socket, fork, vfork, kill, ptrace, tkill, process_vm_readv, process_vm_writev,
    # pidfd_send_signal, io_uring_setup, pidfd_open, pidfd_getfd
    'x86_64': (41, 57, 58, 62, 101, 200, 310, 311, 424, 425, 434, 438),
    # The same; fork and vfork don't exist.
    'aarch64': (198, 129, 117, 130, 270, 271, 424, 425, 434, 438),
}


def main(cpu_seconds: str, memory_bytes: str, path: str) -> None:
    """Becomes the program at `path`."""
    try:
        _limit(int(cpu_seconds), int(memory_bytes))
        _filter_system_calls()
    except OSError as error:
        sys.exit(f'A program cannot be confined here: {error}')
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)
    os.execv(sys.executable, [sys.executable, '-I', '-B', path])


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    for what, value in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(what)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(what, (value, value))


def _filter_system_calls() -> None:
    """Has the kernel refuse what reaches beyond this process, for good."""
    code = _filter_code(platform.machine())
    instructions = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: the number of instructions, and where they are.
    address = ctypes.addressof(instructions)
    program = ctypes.create_string_buffer(struct.pack('HP', len(code) // 8, address))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0),
    ):
        if libc.prctl(call[0], *map(ctypes.c_ulong, call[1:])):
            error = os.strerror(ctypes.get_errno())
            raise OSError(f'the kernel takes no seccomp filter ({error})')


def _filter_code(machine: str) -> bytes:
    """The filter in the kernel's instructions of eight bytes."""
    if machine not in _ARCHITECTURES:
        raise OSError(f'no seccomp filter is known for {machine}, only for x86_64 and aarch64')
    # Each is (operation, operand, instructions to skip if true, and if false).
    code = [
        (_LOAD, _ARCHITECTURE, 0, 0),
        (_IF_EQUAL, _ARCHITECTURES[machine], 1, 0),
        (_RETURN, _KILL, 0, 0),
        (_LOAD, _CALL, 0, 0),
        (_IF_AT_LEAST, _X32_CALLS, 0, 1),
        (_RETURN, _ERRNO | _ENOSYS, 0, 0),
        # Its flags lie in memory, out of the filter's sight; the C library then uses clone.
        (_IF_EQUAL, _CLONE3, 0, 1),
        (_RETURN, _ERRNO | _ENOSYS, 0, 0),
    ]
    for number in _DENIED[machine]:
        code += [(_IF_EQUAL, number, 0, 1), (_RETURN, _ERRNO | _EPERM, 0, 0)]
    code += [
        (_IF_EQUAL, _CLONE[machine], 0, 3),
        (_LOAD, _FIRST_ARGUMENT, 0, 0),
        (_IF_ANY_BIT, _CLONE_THREAD, 1, 0),
        (_RETURN, _ERRNO | _EPERM, 0, 0),
        (_RETURN, _ALLOW, 0, 0),
    ]
    return b''.join(
        struct.pack('HBBI', operation, if_true, if_false, operand)
        for operation, operand, if_true, if_false in code
    )


if __name__ == '__main__':
    main(*sys.argv[1:])
