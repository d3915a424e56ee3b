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
    """A complete group: `members` in order of `group_index`."""

    group_id: str
    members: tuple[Member, ...]

    @property
    def min_policy_version(self) -> int:
        return min(member.trajectory.min_policy_version for member in self.members)

    @property
    def nbytes(self) -> int:
        return sum(member.trajectory.nbytes for member in self.members)
