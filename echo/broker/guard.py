"""Ends a broker when the process that started it ends, in any way. A program of its own: standard library only.

    python -I -S guard.py PARENT SIGNAL DEADLINE_S PROGRAM [ARGUMENT ...]

Starts PROGRAM, writes its pid and a newline to standard output, closes it, and waits; the program's output goes to standard
error. When standard input ends (the parent alone holds its other end, so a kill -9 of the parent ends it too), or SIGTERM
comes, or the kernel says that the parent is gone, it sends SIGNAL, and SIGKILL after DEADLINE_S. It exits with the program's
status, 128 + n for a signal. If the guard itself is killed, the kernel kills the program. File descriptors that it inherits
stay open until then: so a lock on the data folder outlives the parent for as long as the broker does.

Refuses to restart anything: what died stays dead.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1


def _on_parent_death(number: int, parent: int) -> None:
    """Have the kernel send this process a signal when `parent` ends; send it now if that has happened. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), number)


def main(arguments: list[str]) -> int:
    parent, stop_signal, deadline_s, program = int(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3:]
    asked_to_stop = False

    def on_signal(number: int, frame: object) -> None:
        nonlocal asked_to_stop
        # The kernel's signal comes when the *thread* that started this process ends; only the process counts.
        if number == signal.SIGTERM or os.getppid() != parent:
            asked_to_stop = True

    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGUSR1, on_signal)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _on_parent_death(signal.SIGUSR1, parent)

    me = os.getpid()
    child = subprocess.Popen(
        program,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=lambda: _on_parent_death(signal.SIGKILL, me),
    )
    os.write(1, f"{child.pid}\n".encode())
    os.close(1)

    kill_at: float | None = None
    watched = [0, wake_read]
    while child.poll() is None:
        if asked_to_stop and kill_at is None:
            kill_at = time.monotonic() + deadline_s
            child.send_signal(stop_signal)
        left = None if kill_at is None else max(0.0, kill_at - time.monotonic())
        if left == 0.0:
            child.kill()
            child.wait()
            break
        ready, _, _ = select.select(watched, [], [], left)
        if wake_read in ready:
            os.read(wake_read, 512)
        if 0 in ready and not os.read(0, 512):
            watched.remove(0)
            asked_to_stop = True
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    status = main(sys.argv[1:])
    # Standard output is closed: nothing may be flushed to it on the way out.
    os._exit(status)
