"""Group assembly: members in any order become complete groups, or are dropped together at a deadline. Pure.

Refuses to read, decode or judge staleness. A group is the unit of advantage, admission and dropping: what is decided, is
decided for all of its members.
"""

from typing import NamedTuple

from echo.trajectory import Trajectory


class Member(NamedTuple):
    """A trajectory and where it stands in the log."""

    partition: int
    offset: int
    trajectory: Trajectory


class Group(NamedTuple):
    """A group that may be trained: `members` in order of `group_index`; all of them, unless the run allows fewer."""

    group_id: str
    members: tuple[Member, ...]

    @property
    def nbytes(self) -> int:
        return sum(member.trajectory.nbytes for member in self.members)


def mask_older(group: Group, version: int) -> Group:
    """The group with no token of a policy older than `version` to be trained; members that have none are as they were."""
    return group._replace(
        members=tuple(member._replace(trajectory=member.trajectory.masked_below(version)) for member in group.members)
    )


class Assembler:
    """Collects members until their group is complete. Not thread safe: its owner holds a lock.

    deadline_s: a group is overdue this long after its first member was added (seconds of reading, as the caller counts them).
    """

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # Insertion order is the order of first members, so the oldest group is the first key.
        self._open: dict[str, dict[int, Member]] = {}
        self._since: dict[str, float] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def members(self) -> int:
        return sum(len(found) for found in self._open.values())

    def holds(self, group_id: str, group_index: int) -> bool:
        """Whether this member is here already: the second one is a duplicate."""
        return group_index in self._open.get(group_id, {})

    def add(self, member: Member, now: float) -> Group | None:
        """Take a member; the group if it is now complete. The caller has asked `holds` first."""
        trajectory = member.trajectory
        found = self._open.setdefault(trajectory.group_id, {})
        assert trajectory.group_index not in found
        found[trajectory.group_index] = member
        self._since.setdefault(trajectory.group_id, now)
        self.nbytes += trajectory.nbytes
        if len(found) < trajectory.group_size:
            return None
        self.remove(trajectory.group_id)
        return Group(trajectory.group_id, tuple(found[index] for index in sorted(found)))

    def size_of(self, group_id: str) -> int | None:
        """The group size that the members here agree on; None where there is none yet."""
        found = self._open.get(group_id)
        return next(iter(found.values())).trajectory.group_size if found else None

    def remove(self, group_id: str) -> tuple[Member, ...]:
        """Give up a group: what was collected of it."""
        found = tuple(self._open.pop(group_id, {}).values())
        self._since.pop(group_id, None)
        self.nbytes -= sum(member.trajectory.nbytes for member in found)
        return found

    def ids(self) -> list[str]:
        """The open groups' ids."""
        return list(self._open)

    def open_groups(self) -> list[tuple[str, list[Member]]]:
        """Every open group with its members here."""
        return [(group_id, list(found.values())) for group_id, found in self._open.items()]

    def oldest(self) -> str | None:
        """The group whose first member was added first."""
        return next(iter(self._open), None)

    def overdue(self, now: float) -> list[str]:
        """Groups whose deadline has passed, oldest first."""
        found = []
        for group_id, since in self._since.items():
            if now - since < self._deadline_s:
                break
            found.append(group_id)
        return found
