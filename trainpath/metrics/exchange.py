"""Rows of all ranks to rank 0, through the job's key-value store and without a collective.

Each rank owns a ring of keys in the store and overwrites the oldest, so the store holds a
bounded amount however long the job runs; what rank 0 did not read in time is lost and
counted. Nothing ever waits for a key.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Collector", "KeyValueStore", "Publisher"]

_SLOTS = 32
_LINES = 64


class KeyValueStore(Protocol):
    """What is needed of a `torch.distributed.Store`."""

    def set(self, key: str, value: Any, /) -> Any:
        """Put a value."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value; may wait for a missing key, so `check` comes first."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Tell whether all keys are there."""
        ...


class Publisher:
    """Writes this rank's lines to its ring of keys.

    Args:
        store: The job's store.
        prefix: Starts every key; the same on all ranks, another one for each recorder.
        rank: This rank.
        header: Line that identifies the rank; repeated in every slot, for a late reader.
    """

    def __init__(self, store: KeyValueStore, prefix: str, *, rank: int, header: str) -> None:
        self._store = store
        self._prefix = f"{prefix}/{rank}"
        self._header = header
        self._sequence = 0

    def publish(self, lines: list[str], status: str) -> None:
        """Put `lines`, and the rank's `status` line, into the next slots."""
        for begin in range(0, max(1, len(lines)), _LINES):
            body = "".join([self._header, *lines[begin : begin + _LINES], status])
            key = f"{self._prefix}/{self._sequence % _SLOTS}"
            self._store.set(key, b"%d\n" % self._sequence + zlib.compress(body.encode(), 1))
            self._sequence += 1


class Collector:
    """Reads the rings of the other ranks.

    Args:
        store: The job's store.
        prefix: As given to the publishers.
        ranks: The ranks to read.

    Attributes:
        num_lost: Slots that were overwritten before they were read.
    """

    def __init__(self, store: KeyValueStore, prefix: str, ranks: Sequence[int]) -> None:
        self._store = store
        self._prefix = prefix
        self._ranks = ranks
        self._next = dict.fromkeys(ranks, 0)
        self.num_lost = 0

    def fetch(self) -> Iterator[tuple[int, list[str]]]:
        """Yield (rank, lines) of every slot that is new; never waits for one."""
        for rank in self._ranks:
            while (lines := self._read_slot(rank)) is not None:
                yield rank, lines

    def _read_slot(self, rank: int) -> list[str] | None:
        while True:
            wanted = self._next[rank]
            key = f"{self._prefix}/{rank}/{wanted % _SLOTS}"
            if not self._store.check([key]):
                return None
            number, _, body = bytes(self._store.get(key)).partition(b"\n")
            sequence = int(number)
            if sequence < wanted:
                return None
            if sequence > wanted:
                # The writer came round: go on at the oldest slot it has not overwritten.
                oldest = max(wanted + 1, sequence - _SLOTS + 1)
                self.num_lost += oldest - wanted
                self._next[rank] = oldest
                continue
            self._next[rank] = wanted + 1
            return zlib.decompress(body).decode().splitlines()
