"""Sequential mode's loop beside the dispatcher: looks at what has come, and sends what is to be asked for.

Refuses to wait and to decide: the trainer calls `turn` while it waits for a batch, `dispatcher` decides.
"""

from collections.abc import Callable, Mapping, Sequence

import structlog

from consumers.dispatcher import Dispatcher
from consumers.fleet import GivenUp, ProducerStatus
from consumers.groups import Group
from consumers.intake import Intake
from echo.control import Request

log = structlog.get_logger("requests")


class Requester:
    """alive: the living producers. send: writes requests to the log, all of them or none.

    given_up: what producers gave up since it was asked last, by request; the same word may come again.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        intake: Intake,
        alive: Callable[[], Sequence[ProducerStatus]],
        send: Callable[[Sequence[Request]], None],
        given_up: Callable[[], Mapping[str, GivenUp]],
    ) -> None:
        self._dispatcher = dispatcher
        self._intake = intake
        self._alive = alive
        self._send = send
        self._given_up = given_up
        # What is in the log already was asked for by a former trainer, or by nobody.
        intake.request(())

    def begin(self, step: int, version: int) -> None:
        """From now on the groups of this step are asked for, of the newest announced version. See `Dispatcher.begin`."""
        self._dispatcher.begin(step, version)
        self._intake.request(self._dispatcher.wanted())

    def turn(self) -> None:
        """Send what is to be sent now. Raises BrokerError, FencedError, UndeliverableGroupError."""
        standing = self._intake.standing(self._dispatcher.missing())
        requests = self._dispatcher.turn(
            self._alive(), ready=standing.ready, dropped=standing.dropped, given_up=self._given_up()
        )
        if standing.dropped:
            log.warning(
                "requested groups were dropped", groups={name: reason.value for name, reason in standing.dropped.items()}
            )
            self._intake.request(self._dispatcher.wanted())
        if not requests:
            return
        self._send(requests)
        for request in requests:
            say = log.warning if request.issue else log.debug
            say(
                "groups asked for",
                producer=request.producer,
                version=request.version,
                groups=len(request.group_ids),
                issue=request.issue,
            )

    def complete(self, batch: Sequence[Group]) -> list[Group]:
        """The step's batch was cut: its groups in the order in which they are trained, whatever came first."""
        return self._dispatcher.complete(batch)

    def held(self) -> dict[str, int]:
        """Groups asked for and missing, by producer incarnation."""
        return self._dispatcher.held()

    def describe(self) -> str:
        """What is waited for, for people."""
        return self._dispatcher.describe()
