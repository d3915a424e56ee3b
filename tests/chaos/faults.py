"""What a run meets beside kills: hostile records, strangers' connections and transactions, bad peers, more partitions, a broker
that freezes, a disk that is full for a while.

    with Faults(swarm, random.Random(7)) as faults:
        faults.strike()

Refuses to harm what the run may rely on: no record of the run is touched, and what is taken away for a while comes back. A
fault may outlast its own strike: connections and peers stay until the next of their kind.
"""

import itertools
import json
import os
import random
import signal
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions

from echo.broker import ApacheBroker
from tests.chaos.bad_peer import KINDS, BadPeer
from tests.chaos.swarm import PARTITIONS, VOCABULARY, Swarm
from tests.poison import fuzz
from tests.poison.protocol import RawProducer
from tests.poison.records import poisons

_POISONS = 40
_BATCHES = 10
_CONNECTIONS = 300
_MOST_PARTITIONS = 6
_BAD_PEERS = 5
# Versions ahead for which bad peers announce themselves: those that a run reaches before the next strike of their kind.
_VERSIONS_AHEAD = 12
_FROZEN_S, _FULL_S, _OPEN_S = (0.5, 4.0), (0.5, 2.0), 1.0
_FLUSH_S = 60.0
_ASK_S = 5.0


class Faults:
    """The faults that this swarm can meet. draw: chooses them and their details. struck: how often each was."""

    def __init__(self, swarm: Swarm, draw: random.Random) -> None:
        self._swarm = swarm
        self._draw = draw
        self._poisons = poisons(random.Random(draw.random()), vocabulary=VOCABULARY)
        self._producer = Producer(self._settings())
        self._connections = ExitStack()
        self._peers = ExitStack()
        self._partitions = PARTITIONS
        self._kinds: dict[str, Callable[[], None]] = {
            "poison": self._poison,
            "connections": self._connect,
            "bad_peers": self._add_bad_peers,
            "frozen_broker": self._freeze_broker,
        }
        if isinstance(swarm.broker, ApacheBroker):
            self._kinds |= {
                "raw_batches": self._send_raw,
                "partitions": self._add_partition,
                "open_transaction": self._open_transaction,
            }
            self._pool, self._bombs = fuzz.pool_of(random.Random(draw.random())), fuzz.bombs_of_all_kinds()
        if swarm.small_disk is not None:
            self._kinds["full_disk"] = self._fill_disk
        self._next: list[str] = []
        self.struck: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()

    def strike(self) -> None:
        """One fault; each kind once before any comes again. Raises ChaosError as `Swarm.look` does."""
        if not self._next:
            self._next = self._draw.sample(list(self._kinds), len(self._kinds))
        name = self._next.pop()
        self.struck[name] += 1
        self._swarm.say(f"fault: {name}")
        self._kinds[name]()

    def end(self) -> None:
        """Take back whatever lasts."""
        self._connections.close()
        self._peers.close()

    def _settings(self) -> dict[str, object]:
        return {**self._swarm.run.broker.settings, "client.id": "stranger", "log_level": 2}

    def _poison(self) -> None:
        together = itertools.islice(self._poisons, self._draw.randint(1, _POISONS))
        for poison in itertools.chain.from_iterable(together):
            self._producer.produce(
                self._swarm.spec.names.trajectories, key=poison.key, value=poison.value, headers=poison.headers
            )
        self._flush(self._producer)

    def _send_raw(self) -> None:
        """Batches that no client would write, one of them unpacking to many megabytes: the broker may refuse them."""
        topic = self._swarm.spec.names.trajectories
        batches = [fuzz.any_batch(self._draw, self._pool, self._bombs) for _ in range(self._draw.randint(1, _BATCHES))]
        with RawProducer(self._swarm.broker.bootstrap_servers) as raw:
            for batch in [*batches, self._draw.choice(self._bombs)]:
                raw.produce(topic, self._draw.randrange(PARTITIONS), batch)

    def _connect(self) -> None:
        """Idle, with half a request line, and with a body that never comes, to every port of the run."""
        self._connections.close()
        for port in self._swarm.ports():
            for number in range(_CONNECTIONS):
                try:
                    connection = socket.create_connection(("127.0.0.1", port), timeout=1.0)
                except OSError:
                    break  # Nothing listens there now, or it takes no more.
                self._connections.callback(connection.close)
                connection.setblocking(False)
                part = (b"", b"GET /met", b"POST /v1 HTTP/1.1\r\nContent-Length: 400000000\r\n\r\n")[number % 3]
                try:
                    connection.send(part)
                except OSError:
                    continue

    def _add_bad_peers(self) -> None:
        """Each claims to hold, or to be fetching, every chunk of the versions to come."""
        self._peers.close()
        newest = max((line.get("version", 0) for line in self._swarm.journal()), default=0)
        for _ in range(_BAD_PEERS):
            peer = self._peers.enter_context(BadPeer(self._draw.choice(KINDS)))
            body = json.dumps({"url": peer.url, "pending" if peer.only_claims else "have": "/" * 4096}).encode()
            for version in range(newest, newest + _VERSIONS_AHEAD):
                url = f"{self._swarm.run.weights_url}/v1/runs/{self._swarm.run.run_id}/peers/{version}"
                request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"}, method="POST")
                try:
                    urllib.request.urlopen(request, timeout=_ASK_S).close()
                except OSError:
                    return  # The weight server is away just now.

    def _add_partition(self) -> None:
        if self._partitions >= _MOST_PARTITIONS:
            return
        self._partitions += 1
        names = self._swarm.spec.names
        asked = self._swarm.admin.client.create_partitions([NewPartitions(names.trajectories, self._partitions)])
        asked[names.trajectories].result(_FLUSH_S)

    def _freeze_broker(self) -> None:
        nodes = self._swarm.broker.nodes.values()
        for node in nodes:
            os.kill(node, signal.SIGSTOP)
        try:
            self._swarm.live_on(self._draw.uniform(*_FROZEN_S))
        finally:
            for node in nodes:
                os.kill(node, signal.SIGCONT)

    def _open_transaction(self) -> None:
        """A stranger begins one in the trajectories, and is gone without an end of it."""
        stranger = Producer(self._settings() | {"transactional.id": f"stranger-{self._draw.random()}"})
        stranger.init_transactions(_FLUSH_S)
        stranger.begin_transaction()
        stranger.produce(self._swarm.spec.names.trajectories, value=b"open")
        self._flush(stranger)
        self._swarm.live_on(_OPEN_S)

    def _fill_disk(self) -> None:
        assert self._swarm.small_disk is not None
        ballast = self._swarm.small_disk / "ballast"
        try:
            with ballast.open("wb", buffering=0) as out:
                while True:
                    out.write(bytes(2**20))
        except OSError:
            self._swarm.live_on(self._draw.uniform(*_FULL_S))
        finally:
            ballast.unlink()

    def _flush(self, producer: Producer) -> None:
        left = producer.flush(_FLUSH_S)
        assert left == 0, f"{left} of a stranger's records were not taken within {_FLUSH_S:g} s"
