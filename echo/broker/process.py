"""A broker process behind its guard, and the ports, waits and log lines that starting one takes.

Refuses to know which broker it is.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from echo.broker import guard
from echo.errors import BrokerError
from echo.kafka import KafkaLogAdmin
from echo.process import is_readable

HOST = "127.0.0.1"
_GUARD_STARTS_S = 20.0
_POLL_S = 0.05


class GuardedProcess:
    """Runs a program that ends when this process does; in a session of its own, so that a Ctrl-C in the terminal, which its
    clients get too, does not take the broker from under them.

    log: what it prints is appended there. stop_signal, stop_s: how it is asked to end, and after how long it is killed.
    keep_open: file descriptors that must stay open for as long as it runs. Raises BrokerError if it can't be started.
    """

    def __init__(
        self,
        name: str,
        program: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str],
        log: Path,
        stop_signal: signal.Signals,
        stop_s: float,
        keep_open: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.log = log
        self._stop_s = stop_s
        command = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), str(int(stop_signal)), str(stop_s), *program]
        try:
            output = log.open("ab")
        except OSError as error:
            raise BrokerError(f"the log {log} of {name} can't be written: {error.strerror}: choose another folder") from None
        with output:
            self._log_start = output.tell()
            self._guard = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                pass_fds=keep_open,
                start_new_session=True,
            )
        self.pid = self._read_pid()

    def _read_pid(self) -> int:
        out = self._guard.stdout
        assert out is not None
        with out:
            line = out.readline() if is_readable(out.fileno(), _GUARD_STARTS_S) else b""
        if not line:
            self.stop()
            raise BrokerError(f"{self.name} can't be started: {self.last_words()}")
        return int(line)

    def running(self) -> bool:
        return self._guard.poll() is None

    def status(self) -> int | None:
        """Its exit status, 128 + n for a signal; None while it runs."""
        return self._guard.poll()

    def ask_to_stop(self) -> None:
        """Begin the end, without waiting for it."""
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()

    def stop(self) -> None:
        """End it: asked first, killed after `stop_s`."""
        self.ask_to_stop()
        try:
            self._guard.wait(self._stop_s + 5.0)
        except subprocess.TimeoutExpired:
            # The kernel kills the program with its guard.
            self._guard.kill()
            self._guard.wait()

    def kill(self) -> None:
        """kill -9, as a test or the kernel would, and wait for its end."""
        if self.running():
            os.kill(self.pid, signal.SIGKILL)
            self._guard.wait(self._stop_s + 5.0)
        self.ask_to_stop()

    def output(self) -> str:
        """What it has printed since it was started."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def last_words(self) -> str:
        """The last lines of its log and where the rest is, for an error message."""
        return f"{last_lines(self.output())} (log: {self.log})"


def last_lines(output: str, count: int = 3) -> str:
    """The last lines that tell something, in one line: stack frames don't."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.strip().startswith("at ")]
    return " | ".join(lines[-count:]) if lines else "it said nothing"


def free_ports(count: int, wanted: Sequence[int] = ()) -> list[int]:
    """Ports on the loopback interface: the wanted ones where they are free, others in place of those that are not."""
    held: list[socket.socket] = []
    try:
        for index in range(count):
            first = wanted[index] if index < len(wanted) else 0
            try:
                held.append(_bind(first))
            except OSError:
                held.append(_bind(0))
        return [held_port.getsockname()[1] for held_port in held]
    finally:
        for held_port in held:
            held_port.close()


def taken(ports: Iterable[int]) -> list[int]:
    """Those that something else listens on."""
    found = []
    for port in ports:
        try:
            _bind(port).close()
        except OSError:
            found.append(port)
    return found


def _bind(port: int) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As brokers do: connections that an earlier one closed don't keep the port from the next.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((HOST, port))
    except OSError:
        held.close()
        raise
    return held


def wait_ready(
    servers: str, cluster_id: str, *, nodes: int, processes: Callable[[], Iterable[GuardedProcess]], timeout_s: float
) -> None:
    """Return when metadata answers with our cluster id and all nodes are up.

    Raises PortTaken where a process ended because its port was taken, BrokerError where one ended otherwise or none is ready.
    """
    deadline = time.monotonic() + timeout_s
    addresses = [(host, int(port)) for host, _, port in (server.rpartition(":") for server in servers.split(","))]
    admin: KafkaLogAdmin | None = None
    said = "nothing listens there yet"
    while time.monotonic() < deadline:
        for process in processes():
            if not process.running():
                output = process.output()
                clash = "Address already in use" in output or "AddrInUse" in output or process.status() == 0
                kind = PortTaken if clash else BrokerError
                raise kind(f"{process.name} ended with status {process.status()} at its start: {process.last_words()}")
        if not all(_accepts(address) for address in addresses):
            time.sleep(_POLL_S)
            continue
        if admin is None:
            admin = KafkaLogAdmin({"bootstrap.servers": servers}, client_id="echo-broker")
        try:
            found = admin.metadata(min(2.0, max(0.1, deadline - time.monotonic())))
        except BrokerError as error:
            said = str(error)
            continue
        if found.cluster_id == cluster_id and len(found.brokers) >= nodes:
            return
        said = f"cluster {found.cluster_id} (expected {cluster_id}) answers with {len(found.brokers)} of {nodes} nodes"
        time.sleep(_POLL_S)
    last = "; ".join(process.last_words() for process in processes())
    raise BrokerError(f"the broker at {servers} is not ready after {timeout_s:g} s: {said}; {last}")


def _accepts(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=1.0).close()
    except OSError:
        return False
    return True


class PortTaken(BrokerError):
    """A broker ended at its start because something else listens on its port."""
