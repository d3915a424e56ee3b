"""What a scoring worker takes from itself before it runs a verifier: the verifier may execute what a model wrote.

Refuses to promise more than the kernel gives: every measure is best effort, and `confine` says which are in force.
It is no jail against a determined attacker: files stay readable, the CPU is shared, and what a verifier executes lives in the
verifier's process, so it can forge its own reward. Run producers of untrusted models in a container of their own.
"""

import ctypes
import os
import resource
import signal
import struct
import sys

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYS_LANDLOCK_CREATE_RULESET, _SYS_LANDLOCK_RESTRICT_SELF = 444, 446

# Landlock: (first ABI, access bits). Handled and never allowed again = denied, whatever the path or port.
_WRITES = [
    (1, 0b1_1111_1111_0011),  # execute, write, make and remove; not read_file, read_dir
    (2, 1 << 13),  # link or rename across directories
    (3, 1 << 14),  # truncate
    (5, 1 << 15),  # ioctl on devices
]
_TCP_ABI, _TCP = 4, 0b11
_SCOPED_ABI, _SCOPED = 6, 0b11


def limit_memory(mib: int) -> list[str]:
    """Bound this process's address space. Returns the measures in force."""
    return _limit("memory", resource.RLIMIT_AS, mib * 2**20)


def confine() -> list[str]:
    """Give up programs, writing files, TCP, signals to others and core dumps. Returns the measures in force."""
    in_force = [
        *_limit("no file growth", resource.RLIMIT_FSIZE, 0),
        *_limit("no core dumps", resource.RLIMIT_CORE, 0),
        # Root is exempt from this one, but can't execute a program either where there is Landlock.
        *_limit("no new processes", resource.RLIMIT_NPROC, 0),
    ]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        # SIGTERM, which the process has asked for at its start, can be ignored by what it executes.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        in_force += _landlock(libc)
    return in_force


def _limit(name: str, which: int, value: int) -> list[str]:
    try:
        resource.setrlimit(which, (value, value))
    except (ValueError, OSError):
        return []
    return [name]


def _landlock(libc: ctypes.CDLL) -> list[str]:
    abi = libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, None, 0, 1)
    if abi < 1:
        return []
    files = 0
    for first, bits in _WRITES:
        files |= bits if abi >= first else 0
    fields = [files, _TCP if abi >= _TCP_ABI else 0, _SCOPED if abi >= _SCOPED_ABI else 0]
    known = 3 if abi >= _SCOPED_ABI else 2 if abi >= _TCP_ABI else 1
    ruleset = struct.pack(f"={known}Q", *fields[:known])
    descriptor = libc.syscall(_SYS_LANDLOCK_CREATE_RULESET, ruleset, len(ruleset), 0)
    if descriptor < 0:
        return []
    try:
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(_SYS_LANDLOCK_RESTRICT_SELF, descriptor, 0) != 0:
            return []
    finally:
        os.close(descriptor)
    return [
        "no programs",
        "no file writes",
        *(["no TCP"] if abi >= _TCP_ABI else []),
        *(["no signals to others"] if abi >= _SCOPED_ABI else []),
    ]
