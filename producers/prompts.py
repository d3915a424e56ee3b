"""The task's prompts on their way to the engine: made in a thread of their own, tokenised, and left out if they can't be used.

An item of a data set may raise, be too long for the model, be empty, or have a reference that can't cross to the scorer. It
costs nothing but itself: it is counted, named in a warning, and passed over. Ten in a row are no chance any more: they end the
producer with the reason of the last.

Refuses to block the loop: a stream that gives nothing is waited for in its thread, and the loop reports it.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import structlog

from echo import sequential
from echo.background import Background
from echo.errors import TaskError
from producers.collaborators import Tokenizer
from producers.engines.base import Limits, unfit
from producers.tasks import wire
from producers.tasks.base import Prompt, Task

log = structlog.get_logger("prompts")

IN_A_ROW = 10
_CLOSE_S = 1.0


class Made(NamedTuple):
    """A prompt that the engine can sample from, and its token ids (at least one)."""

    prompt: Prompt
    token_ids: list[int]


class LeftOut(NamedTuple):
    """A prompt that can't be used. reason: of a few words, for a metric; why: for people."""

    name: str
    reason: str
    why: str


class SharedTokenizer:
    """A tokenizer for two threads, one at a time: prompts are encoded in one, completions decoded in the other."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        with self._lock:
            return self._tokenizer.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        with self._lock:
            return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


class PromptMaker:
    """Prompts of one task for one model. limits: the engine's. max_tokens: of a completion. left_out: called with each."""

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        limits: Limits,
        max_tokens: int,
        left_out: Callable[[LeftOut], None] = lambda _: None,
    ) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._limits = limits
        self._max_tokens = max_tokens
        self._left_out = left_out

    def stream(self, seed: int) -> Iterator[Made]:
        """The prompts of the task's stream for a seed that can be used, in its order and without end. Raises TaskError."""
        raised: list[LeftOut] = []
        try:
            prompts = iter(self._task.prompts(seed))
        except Exception as error:
            raise TaskError(f"task {self._task.name}: its stream of prompts can't be begun: {_phrase(error)}") from error

        def following(place: int) -> Prompt:
            try:
                return next(prompts)
            except StopIteration:
                before = f"; the last one raised: {raised[-1].why}" if raised else ""
                raise _EndedError(
                    f"task {self._task.name}: its prompts ended after {place}, a task's stream has no end{before}"
                ) from None

        in_a_row: list[LeftOut] = []
        for place in itertools.count():
            made = self._try(lambda place=place: following(place), f"{place} of stream {seed}")  # type: ignore[misc]
            if isinstance(made, Made):
                in_a_row.clear()
                yield made
            else:
                raised = [made] if made.reason == "task" else []
                self._pass_over(made, in_a_row)

    def asked(self, task_seed: int, places: Iterable[int]) -> Iterator[Made]:
        """Sequential mode: the prompts at these places of the run's stream, each with its substitute if it can't be used.

        The substitute follows from the place alone (`echo.sequential.candidates`). Raises TaskError.
        """
        for place in places:
            in_a_row: list[LeftOut] = []
            for seed, index in sequential.candidates(task_seed, place):
                made = self._try(
                    lambda seed=seed, index=index: self._task.prompt(seed, index),  # type: ignore[misc]
                    f"{index} of stream {seed}",
                )
                if isinstance(made, Made):
                    yield made
                    break
                self._pass_over(made, in_a_row)

    def _try(self, make: Callable[[], Prompt], name: str) -> Made | LeftOut:
        try:
            prompt = make()
        except _EndedError:
            raise
        except Exception as error:  # noqa: BLE001 - a task is foreign code
            return LeftOut(name, "task", _phrase(error))
        if not isinstance(prompt, Prompt):
            return LeftOut(name, "task", f"the task gave a {type(prompt).__name__}, not a Prompt")
        try:
            wire.encode(dict(prompt.reference))
        except TaskError as error:
            return LeftOut(prompt.prompt_id, "reference", str(error))
        try:
            token_ids = self._tokenizer.encode(prompt.text)
        except Exception as error:  # noqa: BLE001 - a chat template is a program, and is given any text
            return LeftOut(prompt.prompt_id, "tokenizer", f"it can't be tokenised: {_phrase(error)}")
        problem = unfit(token_ids, self._max_tokens, self._limits)
        return Made(prompt, token_ids) if problem is None else LeftOut(prompt.prompt_id, problem.reason, f"it {problem.why}")

    def _pass_over(self, left_out: LeftOut, in_a_row: list[LeftOut]) -> None:
        """Count and name one. Raises TaskError where it is the last of so many in a row."""
        in_a_row.append(left_out)
        self._left_out(left_out)
        log.warning("a prompt is left out", prompt=left_out.name, reason=left_out.reason, why=left_out.why)
        if len(in_a_row) >= IN_A_ROW:
            raise TaskError(
                f"task {self._task.name}: {len(in_a_row)} prompts in a row can't be used, the last of them is "
                f"{left_out.name}: {left_out.why}"
            )


class _EndedError(TaskError):
    """The stream has an end: there is nothing to pass over."""


class PromptSource:
    """Takes prompts from an iterator in a thread of its own, some ahead of what is asked for.

    task: its name, for people. changed: notified whenever a prompt is ready, and when the thread died.
    """

    def __init__(self, task: str, *, changed: threading.Condition, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._changed = changed
        self._clock = clock
        self._from: Iterator[Made] | None = None
        self._ahead = 0
        self._ready: deque[Made] = deque()
        self._since = clock()
        self._making = Background("prompts", self._run, wake=self._notify)

    def start(self) -> "PromptSource":
        self._making.start()
        return self

    def check(self) -> None:
        """Raise what ended the thread: TaskError where the task gives no usable prompts."""
        self._making.check()

    def close(self) -> None:
        # A stream that blocks is not waited for: nothing of it outlives the process.
        self._making.stop(_CLOSE_S)

    def begin(self, prompts: Iterator[Made], *, ahead: int) -> None:
        """Take prompts from here from now on, and have at most `ahead` of them ready. Those of before are let go."""
        with self._changed:
            self._from, self._ahead = prompts, ahead
            self._ready.clear()
            self._since = self._clock()
            self._changed.notify_all()

    @property
    def ready(self) -> int:
        return len(self._ready)

    def take(self, count: int) -> list[Made] | None:
        """The next `count` prompts, at most `ahead`; None until so many are ready."""
        with self._changed:
            if len(self._ready) < count:
                return None
            taken = [self._ready.popleft() for _ in range(count)]
            self._since = self._clock()
            self._changed.notify_all()
            return taken

    def describe(self) -> str:
        """For a line about a wait."""
        return f"task {self._task} has given no prompt for {self._clock() - self._since:.0f} s, {self.ready} are ready"

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._making.stopping.is_set() and (self._from is None or len(self._ready) >= self._ahead):
                    self._changed.wait()
                source = self._from
            if self._making.stopping.is_set() or source is None:
                return
            made = next(source, None)
            with self._changed:
                if source is not self._from:
                    continue
                if made is None:
                    self._from = None
                    continue
                self._ready.append(made)
                self._since = self._clock()
                self._changed.notify_all()


def _phrase(error: BaseException) -> str:
    text = str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())
