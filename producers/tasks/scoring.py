"""Scores completions in worker processes that have no secrets, and whose death or hang costs one completion.

Refuses to import a scorer here: it may execute what a model wrote. A worker gets a scrubbed environment, an empty working
directory, a memory limit and what else `sandbox` takes away. A completion that exceeds its time is killed with its
worker, the rest of its batch is scored by the next one.
"""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import structlog

from echo.errors import TaskError
from producers.tasks import wire
from producers.tasks.base import Score, Task

log = structlog.get_logger("scoring")

# Interpreter, imports and data files of a scorer, on a busy machine.
START_TIMEOUT_S = 60.0
# A worker gets its share of what waits in this many portions: few enough for throughput, enough to even out slow ones.
_PORTIONS = 4
_READ_BYTES = 1 << 16
# One thread each: a worker scores one completion at a time, and threads count against its memory limit.
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class ScorerPool:
    """Worker processes for one task's scorer.

    workers: processes. timeout_s: wall-clock seconds for one completion. memory_mib: address space of a worker.
    Use it from one thread that outlives it: the kernel ends a worker together with the thread that started it.
    """

    def __init__(self, task: Task, *, workers: int = 1, timeout_s: float, memory_mib: int) -> None:
        self._hello = wire.encode(
            {"scorer": task.scorer, "params": dict(task.scorer_params), "memory_mib": memory_mib},
        )
        self._name = task.scorer
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="echo-scoring-", ignore_cleanup_errors=True)
        self._told: set[str] = set()
        self._closed = False
        self._workers: list[_Worker] = []
        for _ in range(workers):
            self._workers.append(self._start())

    def wait_ready(self) -> None:
        """Wait until every worker has imported the scorer. Raises TaskError where one can't."""
        self._run(_Batch([]))

    def score(self, completions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Score]:
        """Score (text, reference) pairs, in order. What fails or takes too long scores 0 and says so in its outcome.

        Raises TaskError where the scorer can't be started, or a reference is more than plain data.
        """
        batch = _Batch(completions)
        self._run(batch)
        return [score for score in batch.scores if score is not None]

    def close(self) -> None:
        """End the workers. Harmless when repeated."""
        self._closed = True
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._folder.cleanup()

    def _start(self) -> "_Worker":
        return _Worker(self._folder.name, self._hello)

    def _run(self, batch: "_Batch") -> None:
        """Hand out, listen and replace workers until every completion has its score and every worker is ready."""
        if self._closed:
            raise TaskError(f"scorer {self._name}: the pool is closed")
        for index, worker in enumerate(self._workers):
            if not worker.alive():
                worker.kill()
                self._workers[index] = self._start()
            elif not worker.ready:
                # Nobody has listened to it until now, for as long as an engine takes to be built: that is not its time.
                worker.deadline = time.monotonic() + START_TIMEOUT_S
        try:
            while batch.left or not all(worker.ready for worker in self._workers):
                for worker in self._workers:
                    if worker.ready and not worker.asked and batch.waiting:
                        worker.ask(batch.take(len(self._workers)), batch.completions, self._timeout_s)
                for worker in self._wait():
                    self._attend(worker, batch)
                for index, worker in enumerate(self._workers):
                    if worker.ended or (worker.busy and time.monotonic() >= worker.deadline):
                        self._workers[index] = self._replace(worker, batch)
        except BaseException:
            # Replies that nobody waits for must not be taken for those of the next call.
            for worker in self._workers:
                if worker.asked:
                    worker.kill()
            raise

    def _wait(self) -> list["_Worker"]:
        """Workers that have something to read, or took something to write, before the next deadline."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                if worker.busy:
                    selector.register(worker.replies, selectors.EVENT_READ, worker)
                    if worker.unsent:
                        selector.register(worker.requests, selectors.EVENT_WRITE, worker)
            deadline = min(worker.deadline for worker in self._workers if worker.busy)
            found = {id(key.data): key.data for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
        return list(found.values())

    def _attend(self, worker: "_Worker", batch: "_Batch") -> None:
        worker.send()
        if not worker.ready:
            for ready in worker.receive(wire.Ready):
                self._greet(worker, ready)
        for reply in worker.receive(wire.Reply):
            if not worker.asked or reply.index != worker.answered:
                # What it executes has written to its pipe: nothing that it says can be trusted.
                worker.ended = True
                return
            score = _score(reply)
            if score.outcome != "ok":
                self._tell(score.outcome, reply.error or f"reward {reply.reward}, components {reply.components}")
            batch.settle(worker.take_answered(), score)
            worker.deadline = time.monotonic() + self._timeout_s

    def _greet(self, worker: "_Worker", ready: wire.Ready) -> None:
        if ready.error is not None:
            self.close()
            raise TaskError(f"scorer {self._name} can't be loaded in a scoring worker: {ready.error}")
        worker.ready = True
        log.debug("scoring worker ready", pid=worker.pid, confined=ready.confined)

    def _replace(self, worker: "_Worker", batch: "_Batch") -> "_Worker":
        """A new worker for one that hangs or died; the completion that it was at has its score."""
        hung = not worker.ended
        status = worker.kill()
        if not worker.ready:
            what = f"is not ready after {START_TIMEOUT_S:.0f} s" if hung else f"ended with status {status}"
            self.close()
            raise TaskError(f"scorer {self._name}: its worker {what}: {worker.last_words or 'no message'}")
        if worker.asked:
            outcome = "timeout" if hung else "error"
            self._tell(outcome, f"took longer than {self._timeout_s} s" if hung else f"its worker ended with status {status}")
            batch.settle(worker.take_answered(), Score(0.0, {}, outcome))
            batch.waiting.extend(worker.asked)
            worker.asked.clear()
        return self._start()

    def _tell(self, outcome: str, why: str) -> None:
        """The first of its kind as a warning; the outcomes are counted by whoever asked."""
        level = log.debug if outcome in self._told else log.warning
        self._told.add(outcome)
        level("completion not scored, its reward is 0", outcome=outcome, why=why)


class _Batch:
    """The completions of one call: which wait, and the scores so far."""

    def __init__(self, completions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.completions = completions
        self.scores: list[Score | None] = [None] * len(completions)
        self.left = len(completions)
        self.waiting = deque(range(len(completions)))

    def settle(self, index: int, score: Score) -> None:
        self.scores[index] = score
        self.left -= 1

    def take(self, workers: int) -> list[int]:
        portion = math.ceil(len(self.waiting) / (workers * _PORTIONS))
        return [self.waiting.popleft() for _ in range(portion)]


class _Worker:
    """One process with its pipes.

    asked: the completions that it owes scores for, in order. answered: how many of its batch it has scored. deadline: for its
    next message. last_words: once it was killed, the end of what it wrote to standard error before it was ready.
    """

    def __init__(self, folder: str, hello: bytes) -> None:
        self.ready = False
        self.ended = False
        self.asked: deque[int] = deque()
        self.answered = 0
        self.last_words = ""
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.unsent = memoryview(hello)
        self._received = bytearray()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill
        self._process = subprocess.Popen(
            [sys.executable, "-B", "-P", "-m", "producers.tasks.scoring_worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=folder,
            env=_environment(folder),
            # A Ctrl-C in the terminal is the producer's; and a kill reaches what the worker started.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests, self.replies = self._process.stdin, self._process.stdout
        for pipe in (self.requests, self.replies):
            os.set_blocking(pipe.fileno(), False)
        # It imports what it is told here, while its starter does something else.
        self.send()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def busy(self) -> bool:
        return not self.ready or bool(self.asked)

    def alive(self) -> bool:
        """Looks without reaping: until `kill` has reaped it, its id can't belong to another process group."""
        return not self.ended and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def ask(self, indices: Sequence[int], completions: Sequence[tuple[str, Mapping[str, Any]]], timeout_s: float) -> None:
        message = wire.encode([[text, dict(reference)] for text, reference in (completions[index] for index in indices)])
        self.asked.extend(indices)
        self.answered = 0
        self.unsent = memoryview(message)
        self.deadline = time.monotonic() + timeout_s
        self.send()

    def take_answered(self) -> int:
        self.answered += 1
        return self.asked.popleft()

    def send(self) -> None:
        """Write what the pipe takes now."""
        while self.unsent:
            try:
                self.unsent = self.unsent[os.write(self.requests.fileno(), self.unsent) :]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self.ended = True
                return

    def receive(self, kind: type[wire.R]) -> Iterator[wire.R]:
        """The messages that are complete; marks the worker as ended where it hung up or talks nonsense."""
        self._read()
        while len(self._received) >= wire.LENGTH.size:
            (length,) = wire.LENGTH.unpack_from(self._received)
            end = wire.LENGTH.size + length
            if length > wire.MAX_REPLY_BYTES:
                self.ended = True
                return
            if len(self._received) < end:
                return
            body = bytes(self._received[wire.LENGTH.size : end])
            del self._received[:end]
            try:
                message = wire.decode_reply(body, kind)
            except ValueError:
                self.ended = True
                return
            yield message

    def _read(self) -> None:
        """Take what the pipe holds, but not more at once than one reply and a piece."""
        while len(self._received) <= wire.MAX_REPLY_BYTES:
            try:
                piece = os.read(self.replies.fileno(), _READ_BYTES)
            except BlockingIOError:
                return
            if not piece:
                self.ended = True
                return
            self._received += piece

    def kill(self) -> int:
        """End it and its children; its exit status. Harmless when repeated."""
        if self._process.returncode is not None:
            return self._process.returncode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        status = self._process.wait()
        self.ended = True
        self._errors.seek(0)
        self.last_words = self._errors.read().decode(errors="replace").strip()[-500:]
        for opened in (self.requests, self.replies, self._errors):
            opened.close()
        return status


def _score(reply: wire.Reply) -> Score:
    if reply.error is None and all(math.isfinite(value) for value in (reply.reward, *reply.components.values())):
        return Score(reply.reward, reply.components, "ok")
    return Score(0.0, {}, "error")


def _environment(folder: str) -> dict[str, str]:
    """Nothing of ours but where modules are found."""
    paths = [str(Path(path).resolve()) for path in sys.path]
    return {"PYTHONPATH": os.pathsep.join(paths), "HOME": folder, "LANG": "C.UTF-8", **_ONE_THREAD}
