"""Starts the weight server as a child process: what echo-train does unless `weights.serve` is false.

The child ends with its parent, however that ends. The token travels in its environment, the port that it really has comes
back through a pipe. Refuses to return before the server answers.
"""

import http.client
import os
import select
import ssl
import sys
import time
from pathlib import Path

import structlog

from echo.config import RunConfig
from echo.errors import ConfigError, WeightsError
from echo.process import Child, stop_children
from echo.weights.urls import TOKEN_VARIABLE, WILDCARDS, check_token

log = structlog.get_logger("weights.spawn")


class WeightServerProcess:
    """A running weight server. `url` is where producers reach it, `port` the real one, also where 0 was asked for."""

    def __init__(self, child: Child, url: str, port: int) -> None:
        self._child = child
        self.url = url
        self.port = port

    @classmethod
    def start(cls, run: RunConfig, log_path: Path, *, deadline_s: float = 30.0) -> "WeightServerProcess":
        """Serve the run's store, and return when /health answers.

        Call it from a thread that lives as long as the process: the kernel ends the child with the thread that started it.
        Raises ConfigError; WeightsError where its log can't be written, and with the end of that log where it does not come
        up in time.
        """
        weights = run.weights
        check_token(weights.token)
        if weights.host in WILDCARDS and weights.url is None:
            raise ConfigError(f"weights.host is {weights.host!r}, which producers can't reach: set weights.url as well")
        deadline = time.monotonic() + deadline_s
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path.write_bytes(b"")
        except OSError as error:
            raise WeightsError(
                f"the weight server's log {log_path} can't be written: {error.strerror}. It lies beside weights.dir, which is "
                f"{weights.dir}: set weights.dir to a folder in one that this process may write to"
            ) from None
        receiving, sending = os.pipe()
        try:
            try:
                child = _start(run, log_path, sending)
            finally:
                os.close(sending)
            port = _read_port(receiving, deadline)
        finally:
            os.close(receiving)
        is_tls = weights.tls_cert is not None
        if port is None or not _is_healthy(weights.host, port, deadline, is_tls=is_tls):
            # Its end of the pipe closes a moment before it is gone.
            status = child.wait(1.0)
            child.kill()
            raise WeightsError(
                f"the weight server on {weights.host}:{weights.port} "
                + (f"did not answer within {deadline_s:g} s" if status is None else f"ended with status {status}")
                + f". Its log {log_path} ends with:\n{child.log_tail()}"
            )
        host = f"[{weights.host}]" if ":" in weights.host else weights.host
        server = cls(child, weights.url or f"{'https' if is_tls else 'http'}://{host}:{port}", port)
        log.info("weight server started", url=server.url, port=port, store=str(weights.dir), pid=child.pid)
        return server

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended it); None while it runs."""
        return self._child.poll()

    def stop(self, timeout_s: float = 10.0) -> int | None:
        """Let running transfers finish for a few seconds, then end it. Returns the exit status, 0 for a planned stop."""
        if stop_children([self._child], timeout_s=timeout_s):
            log.warning("the weight server did not stop and was killed", pid=self._child.pid)
        return self._child.poll()

    def kill(self) -> None:
        """End it at once, in mid-transfer."""
        self._child.kill()

    def __enter__(self) -> "WeightServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _start(run: RunConfig, log_path: Path, ready: int) -> Child:
    weights = run.weights
    command = [sys.executable, "-m", "echo.cli.weights", "serve", str(weights.dir)]
    command += ["--host", weights.host, "--port", str(weights.port), "--ready-fd", str(ready)]
    if weights.tls_cert is not None:
        command += ["--tls-cert", str(weights.tls_cert), "--tls-key", str(weights.tls_key)]
    if weights.max_egress_bytes_per_s is not None:
        command += ["--max-egress", str(weights.max_egress_bytes_per_s)]
    if weights.accel_redirect is not None:
        command += ["--accel-redirect", weights.accel_redirect]
    environment = dict(os.environ)
    environment.pop(TOKEN_VARIABLE, None)
    if weights.token is not None:
        environment[TOKEN_VARIABLE] = weights.token.get_secret_value()
    return Child("weights", command, log_path=log_path, env=environment, pass_fds=(ready,))


def _read_port(receiving: int, deadline: float) -> int | None:
    """The child writes one line when its socket listens; the pipe ends when the child does."""
    line = b""
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([receiving], [], [], max(deadline - time.monotonic(), 0))
        piece = os.read(receiving, 64) if readable else b""
        if not piece:
            return None
        line += piece
    return int(line)


def _is_healthy(host: str, port: int, deadline: float, *, is_tls: bool) -> bool:
    # The socket listens: a server that comes up answers the first request, only later.
    local = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    timeout_s = max(deadline - time.monotonic(), 0.1)
    connection = http.client.HTTPConnection(local, port, timeout=timeout_s)
    if is_tls:
        # Our own child, which is sent nothing secret: its certificate may well name another host than loopback.
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(local, port, timeout=timeout_s, context=context)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
