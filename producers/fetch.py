"""From an announcement to a policy in host memory: what changed since the last one, and an adapter's full version with it.

Refuses to decide when to pull: `producers.policy` does. What was pulled last stays in memory, so that the next pull is
a fraction of it, and so that peers can be served.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import structlog

from echo.control import Announcement
from echo.metrics import ProducerMetrics
from echo.weights.clock import Difference
from echo.weights.manifest import HostTensor, Manifest
from echo.weights.urls import base_of, manifest_url
from producers.engines.base import Adapter, Policy

log = structlog.get_logger("policy")

# A pull that lasts says so often how far it is, seconds.
_TELL_S = 10.0


class Pulled(Protocol):
    """What a pull gives: the parts of `echo.weights.client.Pulled` that are used here."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def manifest_digest(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, HostTensor]: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def peer_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def retries(self) -> int: ...
    @property
    def patched(self) -> int: ...


class PullClient(Protocol):
    """Verified pulls, as `echo.weights.client.WeightClient` does them."""

    def pull(
        self,
        manifest_urls: Sequence[str],
        *,
        run_id: str,
        version: int,
        manifest_digest: str,
        deadline_s: float,
        cancelled: Callable[[], bool],
        have: Pulled | None,
        progress: Callable[[int, int], None] | None,
    ) -> Pulled: ...

    def clock_difference(self) -> Difference | None:
        """The weight server's clock less ours; None before anything is known."""

    def check(self) -> None:
        """Raise what ended its work in the background, if anything did."""


class _Version(NamedTuple):
    number: int
    digest: str
    urls: tuple[str, ...]


class Fetcher:
    """Pulls for one run, one version after the other. Not to be used from two threads."""

    def __init__(self, client: PullClient, *, metrics: ProducerMetrics, deadline_s: float) -> None:
        self._client = client
        self._metrics = metrics
        self._deadline_s = deadline_s
        # The version pulled last, and the last full one: the same unless it is an adapter.
        self._last: Pulled | None = None
        self._full: Pulled | None = None

    def fetch(self, announcement: Announcement, cancelled: Callable[[], bool]) -> Policy:
        """The announced policy, verified. Raises PullCancelled, WeightsError; what was pulled before is then still held."""
        run_id = announcement.run_id
        wanted = _Version(announcement.version, announcement.manifest_digest, announcement.manifest_urls)
        pulled = self._pull(run_id, wanted, self._last, cancelled)
        adapter = pulled.manifest.adapter
        if adapter is None:
            self._last = self._full = pulled
            return Policy(wanted.number, pulled.tensors, canary=pulled.manifest.canary)
        full = self._full
        if full is None or full.manifest_digest != adapter.model_digest:
            bases = [base_of(url, run_id, wanted.number) for url in wanted.urls]
            urls = tuple(manifest_url(base, run_id, adapter.model_version) for base in bases)
            model = _Version(adapter.model_version, adapter.model_digest, urls)
            log.info("pulling the full version that an adapter is for", version=wanted.number, full=adapter.model_version)
            full = self._pull(run_id, model, full, cancelled)
        self._last, self._full = pulled, full
        base = Adapter(full.tensors, adapter.config)
        return Policy(wanted.number, pulled.tensors, adapter=base, canary=pulled.manifest.canary)

    def _pull(self, run_id: str, wanted: _Version, have: Pulled | None, cancelled: Callable[[], bool]) -> Pulled:
        told = time.monotonic()

        def progress(fetched: int, total: int) -> None:
            nonlocal told
            if time.monotonic() - told >= _TELL_S:
                told = time.monotonic()
                log.info("pulling", version=wanted.number, fetched=fetched, total=total)

        pulled = self._client.pull(
            wanted.urls,
            run_id=run_id,
            version=wanted.number,
            manifest_digest=wanted.digest,
            deadline_s=self._deadline_s,
            cancelled=cancelled,
            have=have,
            progress=progress,
        )
        metrics, me = self._metrics, (self._metrics.run_id, self._metrics.producer_id)
        metrics.pull_seconds.observe(pulled.seconds)
        metrics.pull_bytes.labels(*me, "origin").inc(pulled.received_bytes - pulled.peer_bytes)
        metrics.pull_bytes.labels(*me, "peer").inc(pulled.peer_bytes)
        metrics.pull_retries.inc(pulled.retries)
        log.info(
            "pulled",
            version=wanted.number,
            bytes=pulled.received_bytes,
            of=pulled.manifest.nbytes,
            from_peers=pulled.peer_bytes,
            patched=pulled.patched,
            seconds=round(pulled.seconds, 3),
            retries=pulled.retries,
        )
        return pulled
