"""Which cached objects may go when another one needs the room."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainpath.cache.names import ObjectName

__all__ = ["EvictionPolicy", "KeepUntilFull", "Resident"]


@dataclass(frozen=True, slots=True)
class Resident:
    """An object that is in the cache.

    Attributes:
        name: What it is; `name.key` is the digest of its URL.
        last_used_ns: When a job first used it lately (file times of the cache's own disk).
    """

    name: ObjectName
    last_used_ns: int


class EvictionPolicy(Protocol):
    """Chooses victims. Must be picklable and give the same answer in every process."""

    def victims(
        self, key: str, residents: Sequence[Resident], *, in_use_since_ns: int
    ) -> Iterable[Resident]:
        """Return what may be evicted in favour of the object `key`, first victim first.

        Args:
            key: Digest of the URL of the object that wants in.
            residents: Everything in the cache.
            in_use_since_ns: When the oldest process that has the cache open opened it.

        Returns:
            The cache takes from the front as many as it needs and skips those that are open;
            if all of them are not enough, nothing is evicted and the object passes through.
        """
        ...


@dataclass(frozen=True, slots=True)
class KeepUntilFull:
    """Admit until full, then keep: the right thing while the future order is not known.

    With a fresh shuffle per epoch and room for a fraction c of the set, keeping what is there
    hits c of the reads; evicting the least recently used hits c + (1 - c) ln(1 - c), for
    c = 1/2 that is 15 % instead of 50 %. Only objects that no running job has used are
    victims, oldest first, so that the data of last week's job makes room for today's. (A
    process that keeps a cache open for weeks keeps what was used since from being evicted.)
    """

    def victims(
        self, key: str, residents: Sequence[Resident], *, in_use_since_ns: int
    ) -> Iterable[Resident]:
        """Return what no running job has used, longest unused first."""
        idle = [
            resident
            for resident in residents
            if resident.last_used_ns < in_use_since_ns and resident.name.key != key
        ]
        return sorted(idle, key=lambda resident: (resident.last_used_ns, str(resident.name)))
