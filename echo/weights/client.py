"""Pulls a whole policy over HTTP into host memory: verified, resumable, all or nothing.

The manifest must have the announced digest, run and version; every chunk is checked while it arrives, straight into the
memory of its tensor. A broken transfer goes on where it ended. Refuses to return anything partial or unverified.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from echo.errors import ManifestError
from echo.weights.buffers import Buffers
from echo.weights.clock import Difference, ServerClock
from echo.weights.peers import PeerNode
from echo.weights.plan import Held
from echo.weights.pull import Pull, Pulled, Wanted
from echo.weights.reputations import Reputations
from echo.weights.transport import Abort, Access, Retries, Session, trusting
from echo.weights.urls import base_of, check_token, check_url, latest_url, manifest_url

__all__ = ["Latest", "Pulled", "WeightClient"]


class Latest(NamedTuple):
    """The newest version that a server has: its manifest's digest and URL."""

    version: int
    digest: str
    url: str


class WeightClient:
    """Pulls from weight servers. Holds no connection between pulls; may be used from several threads.

    token: sent to every server whose URL is given. attempts: for each chunk, over all servers; with the default waits of
    0.1 s to 5 s a server may be away for about 10 s. connections: chunks that are fetched at the same time. tls_ca: whom to
    trust over https, instead of the system's authorities. make_node: makes what serves this client's chunks to others and finds
    theirs; with it, one pull at a time. Memory is used again for a later pull once nothing refers to it any more.
    Raises ConfigError for a token that can't travel in a header, and for `tls_ca`.
    """

    def __init__(
        self,
        *,
        token: SecretStr | None = None,
        tls_ca: Path | None = None,
        connect_timeout_s: float = 5.0,
        read_timeout_s: float = 60.0,
        connections: int = 4,
        attempts: int = 8,
        first_wait_s: float = 0.1,
        longest_wait_s: float = 5.0,
        make_node: Callable[[Access], PeerNode] | None = None,
    ) -> None:
        tls = trusting(tls_ca) if tls_ca is not None else None
        self._access = Access(check_token(token), connect_timeout_s, read_timeout_s, tls)
        self._buffers = Buffers()
        self._reputations = Reputations()
        self._clock = ServerClock()
        self._node = make_node(self._access).start() if make_node is not None else None
        self._connections = connections
        self._attempts = attempts
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s

    def pull(
        self,
        manifest_urls: Sequence[str],
        *,
        run_id: str,
        version: int,
        manifest_digest: str,
        deadline_s: float,
        cancelled: Callable[[], bool] = lambda: False,
        have: Held | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Pulled:
        """Pull one version from the servers behind `manifest_urls`, the first preferred.

        have: an earlier pull. Only what changed since travels, as deltas where the server has them; a tensor without change is
        returned as it was given. Its bytes must never be written to. cancelled: asked about 20 times a second, in the calling
        thread; also a blocked transfer ends then. progress: told (bytes fetched, bytes to fetch), in the calling thread.

        Raises ManifestError, ChunkError, PullCancelled; WeightsError for the deadline. `have` is then as it was.
        """
        bases = list(dict.fromkeys(base_of(url, run_id, version) for url in manifest_urls))
        if not bases:
            raise ManifestError(f"version {version} of run {run_id!r} was announced without a URL")
        abort = Abort()
        pull = Pull(
            Wanted(bases, run_id, version, manifest_digest),
            have,
            sessions=lambda: Session(self._access, abort),
            retries=self._retries(abort),
            abort=abort,
            buffers=self._buffers,
            reputations=self._reputations,
            node=self._node,
            clock=self._clock,
        )
        return pull.run(self._connections, deadline_s, cancelled, progress)

    def clock_difference(self) -> Difference | None:
        """The weight server's clock less ours, as the answers of its last manifests tell; None before the first."""
        return self._clock.difference()

    def check(self) -> None:
        """Raise what ended the part that serves peers, if anything did."""
        if self._node is not None:
            self._node.check()

    def close(self) -> None:
        """Serve no peers any more."""
        if self._node is not None:
            self._node.close()

    def latest(self, base_url: str, run_id: str) -> Latest:
        """Ask the server at `base_url` for the newest version of a run. Raises ManifestError."""
        url = latest_url(base_url, run_id)
        check_url(url)
        abort = Abort()
        session = Session(self._access, abort)

        def fetch(url: str) -> bytes:
            with session.ask(url, ManifestError) as response:
                return response.read(2**16)

        try:
            raw = self._retries(abort).run([url], fetch)
            answer = json.loads(raw)
            version, digest = int(answer["version"]), str(answer["digest"])
        except (ValueError, KeyError, TypeError) as error:
            raise ManifestError(f"{url}: not the answer of a weight server: {error}") from None
        finally:
            session.close()
        return Latest(version, digest, manifest_url(base_url, run_id, version))

    def _retries(self, abort: Abort) -> Retries:
        return Retries(attempts=self._attempts, first_s=self._first_wait_s, longest_s=self._longest_wait_s, abort=abort)
