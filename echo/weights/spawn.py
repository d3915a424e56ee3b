"""Starts the weight server as a child process: what echo-train does unless `weights.serve` is false.

The child ends with its parent, however that ends. The token travels in its environment, the port that it really has comes
back through a pipe. A `KeptWeightServer` is started again when it dies, on the same port. Refuses to return before the server
answers.
"""

import http.client
import os
import ssl
import sys
import time
from pathlib import Path

import structlog

from echo.addresses import authority, local_host
from echo.background import Background
from echo.config import RunConfig
from echo.errors import WeightsError
from echo.process import Child, is_readable, stop_children
from echo.restarts import Restarts
from echo.weights.urls import TOKEN_VARIABLE, check_token

log = structlog.get_logger("weights.spawn")


class WeightServerProcess:
    """A running weight server. `url` is where producers reach it, `port` the real one, also where 0 was asked for."""

    def __init__(self, child: Child, url: str, port: int) -> None:
        self._child = child
        self.url = url
        self.port = port

    @classmethod
    def start(cls, run: RunConfig, log_path: Path, *, deadline_s: float = 30.0, append: bool = False) -> "WeightServerProcess":
        """Serve the run's store, and return when /health answers. append: to the log of an earlier life.

        Call it from a thread that lives as long as the process: the kernel ends the child with the thread that started it.
        Raises ConfigError; WeightsError where its log can't be written, and with the end of that log where it does not come
        up in time.
        """
        weights = run.weights
        check_token(weights.token)
        # That producers can reach it at all.
        weights.url_at(weights.port)
        deadline = time.monotonic() + deadline_s
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path.open("ab" if append else "wb").close()
        except OSError as error:
            raise WeightsError(
                f"the weight server's log {log_path} can't be written: {error.strerror}. It lies beside weights.dir, which is "
                f"{weights.dir}: set weights.dir to a folder in one that this process may write to"
            ) from None
        receiving, sending = os.pipe()
        try:
            try:
                child = _start(run, log_path, sending, append=append)
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
                f"the weight server on {authority(weights.host, weights.port)} "
                + (f"did not answer within {deadline_s:g} s" if status is None else f"ended with status {status}")
                + f". Its log {log_path} ends with:\n{child.log_tail()}"
            )
        server = cls(child, weights.url_at(port), port)
        log.info("weight server started", url=server.url, port=port, store=str(weights.dir), pid=child.pid)
        return server

    @property
    def pid(self) -> int:
        return self._child.pid

    def poll(self) -> int | None:
        """The exit status (negative: the signal that ended it); None while it runs."""
        return self._child.poll()

    def wait(self) -> int | None:
        """Wait until it has ended. Returns the exit status."""
        return self._child.wait()

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


class KeptWeightServer:
    """A weight server process that is started again when it dies, on the port that it had: what was announced stays valid.

    url, port: as of `WeightServerProcess`.
    """

    def __init__(self, server: WeightServerProcess, run: RunConfig, log_path: Path, restarts: Restarts) -> None:
        self.url = server.url
        self.port = server.port
        self._server = server
        self._run = run.model_copy(update={"weights": run.weights.model_copy(update={"port": server.port})})
        self._log_path = log_path
        self._restarts = restarts
        # A server that it starts ends with its thread, too; it ends last.
        self._keeping = Background("weight-server-keeper", self._keep)

    @classmethod
    def start(cls, run: RunConfig, log_path: Path, *, restarts: Restarts | None = None) -> "KeptWeightServer":
        """As `WeightServerProcess.start`: the first start must succeed."""
        kept = cls(WeightServerProcess.start(run, log_path), run, log_path, restarts or Restarts())
        kept._keeping.start()
        return kept

    @property
    def pid(self) -> int:
        """Of the process that is there now, or was last."""
        return self._server.pid

    def check(self) -> None:
        """Raise WeightsError where it died too often to be started again."""
        self._keeping.check()

    def stop(self) -> None:
        """End it as `WeightServerProcess.stop` does."""
        self._keeping.stopping.set()
        self._server.stop()
        # It may be starting another one this very moment, which it then stops.
        self._keeping.stop()

    def _keep(self) -> None:
        stopping = self._keeping.stopping
        while True:
            status = self._server.wait()
            if stopping.is_set():
                return
            pause_s = self._restarts.died()
            if pause_s is None:
                raise WeightsError(
                    f"the weight server died more than {self._restarts.limit} times within {self._restarts.within_s:g} s, last "
                    f"with status {status}: see {self._log_path}"
                )
            log.error("the weight server died and is started again", status=status, port=self.port, log=str(self._log_path))
            if stopping.wait(pause_s):
                return
            try:
                self._server = WeightServerProcess.start(self._run, self._log_path, append=True)
            except WeightsError as error:
                # Counts as a death: the process that is waited for above is still the one before.
                log.error("the weight server could not be started again", error=str(error))
            if stopping.is_set():
                self._server.stop()
                return


def _start(run: RunConfig, log_path: Path, ready: int, *, append: bool) -> Child:
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
    return Child("weights", command, log_path=log_path, env=environment, pass_fds=(ready,), append=append)


def _read_port(receiving: int, deadline: float) -> int | None:
    """The child writes one line when its socket listens; the pipe ends when the child does."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(receiving, 64) if is_readable(receiving, max(deadline - time.monotonic(), 0)) else b""
        if not piece:
            return None
        line += piece
    return int(line)


def _is_healthy(host: str, port: int, deadline: float, *, is_tls: bool) -> bool:
    # The socket listens: a server that comes up answers the first request, only later.
    local = local_host(host)
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
