"""Admission: how many groups this producer incarnation may begin now. Pure, and small.

Refuses to wait, to read Kafka, and to know weights: it is told what the trainer granted and which versions there are.
"""

from echo import staleness
from echo.control import Grant

UNTIL_GRANTED = Grant(window=1, resolved=0)
"""Before the trainer knows an incarnation it may have one group outstanding: enough to be measured by."""


class Window:
    """Counts the groups that this incarnation began, against what the trainer granted.

    max_staleness: S of the run. publish_every: its learner steps per version (kappa). Not thread safe: it belongs to the loop.
    """

    def __init__(self, max_staleness: int, publish_every: int = 1) -> None:
        self._max_staleness = max_staleness
        self._publish_every = publish_every
        self._grant = UNTIL_GRANTED
        self.sequence = -1
        """The control message whose grant is in force, -1 before the first."""
        self.started = 0

    @property
    def grant(self) -> Grant:
        return self._grant

    @property
    def outstanding(self) -> int:
        """Groups begun that the trainer has not resolved; never negative."""
        return max(0, self.started - self._grant.resolved)

    @property
    def limit(self) -> int:
        """What `started` may reach under the grant in force."""
        return self._grant.resolved + self._grant.window

    def granted(self, grant: Grant | None, sequence: int) -> None:
        """The newest grant in force, of this control message; None falls back to the window of an unknown incarnation.

        What was resolved stays resolved, so a producer that is forgotten is held back and not stuck.
        """
        self._grant = grant if grant is not None else Grant(window=UNTIL_GRANTED.window, resolved=self._grant.resolved)
        self.sequence = sequence

    def begin(self, groups: int) -> None:
        """These groups are sampled now."""
        self.started += groups

    def give_up(self, groups: int) -> None:
        """These groups were begun and will never be published: nobody will resolve them, so they hold no room."""
        self.started = max(0, self.started - groups)

    def room(self, newest_announced: int, serving: int) -> int:
        """Groups that may begin now: none where they would be stale at birth, or nothing is served yet.

        A group is trained after what is outstanding before it. One that begins `behind` versions late has so many versions
        less until it is stale, so its window is that of a run with S - behind.
        """
        if serving < 0 or not staleness.may_sample(newest_announced, serving, self._max_staleness):
            return 0
        behind = staleness.staleness(newest_announced, serving)
        left = staleness.total_window(self._max_staleness - behind, 1, self._publish_every)
        whole = staleness.total_window(self._max_staleness, 1, self._publish_every)
        return staleness.room(max(1, self._grant.window * left // whole), self.started, self._grant.resolved)
