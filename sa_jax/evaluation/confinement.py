"""Confines this process and becomes a program: `python -I confinement.py CPU_SECONDS MEMORY PATH`.

It is run as a file of its own, by `sandbox`, and hence imports nothing but the standard library.
After it the program can't open a socket, start a process, or signal, trace, limit or reschedule
another one by a system call, and its CPU time, memory and the size of each of its files are
limited. Not limited are the number of its files and what else its user may read and write: that
includes the memory of this user's other processes under /proc, unless the kernel forbids it (Yama).
What can't be set up is written to standard error, and nothing is run; the program's own outputs are
dropped.
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
    # pidfd_send_signal, io_uring_setup, pidfd_open, pidfd_getfd, setpriority, ioprio_set
    'x86_64': (41, 57, 58, 62, 101, 200, 310, 311, 424, 425, 434, 438, 141, 251),
    # The same; fork and vfork don't exist.
    'aarch64': (198, 129, 117, 130, 270, 271, 424, 425, 434, 438, 140, 30),
}
# Whose first argument is a process: allowed for the own one only, by its number or as 0.
_OWN_ONLY = {
    # tgkill (which raise and abort use), rt_sigqueueinfo, rt_tgsigqueueinfo, prlimit64,
    # sched_setparam, sched_setscheduler, sched_setaffinity, sched_setattr
    'x86_64': (234, 129, 297, 302, 142, 144, 203, 314),
    'aarch64': (131, 138, 240, 261, 118, 119, 122, 274),
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
    for what, value, grace in (
        # The second of grace lets SIGXCPU tell a program out of time from one that is killed.
        (resource.RLIMIT_CPU, cpu_seconds, 1),
        (resource.RLIMIT_AS, memory_bytes, 0),
        (resource.RLIMIT_FSIZE, _FILE_BYTES, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, most = resource.getrlimit(what)
        most = float('inf') if most == resource.RLIM_INFINITY else most
        resource.setrlimit(what, (int(min(value, most)), int(min(value + grace, most))))


def _filter_system_calls() -> None:
    """Has the kernel refuse what reaches beyond this process, for good."""
    # The program keeps this process and so its number.
    code = _filter_code(platform.machine(), os.getpid())
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


def _filter_code(machine: str, process: int) -> bytes:
    """The filter in the kernel's instructions of eight bytes; `process` is the one confined."""
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
    for number in _OWN_ONLY[machine]:
        code += [
            (_IF_EQUAL, number, 0, 5),
            (_LOAD, _FIRST_ARGUMENT, 0, 0),
            (_IF_EQUAL, 0, 2, 0),
            (_IF_EQUAL, process, 1, 0),
            (_RETURN, _ERRNO | _EPERM, 0, 0),
            (_RETURN, _ALLOW, 0, 0),
        ]
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
