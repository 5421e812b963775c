"""What a cache did: counters of one process, and the result of a check."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

__all__ = ["CacheStats", "Counters", "VerifyReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Counters of one `ShardCache` object in one process, and the state of its directory.

    Attributes:
        num_hits: Opens served from the directory at once.
        num_waits: Opens served from the directory after another process's download.
        num_misses: Opens or prefetches for which this process downloaded into the cache.
        num_bypassed: Opens that passed through: no room, object over the budget, or trouble.
        num_evicted: Objects removed to make room.
        num_corrupt: Objects removed because their bytes were wrong.
        num_revalidated: Versions asked of the origin for an object that was here already.
        bytes_hit: Bytes of the objects opened by hits and waits.
        bytes_fetched: Bytes downloaded into the cache.
        bytes_bypassed: Bytes downloaded past the cache.
        bytes_evicted: Bytes removed to make room.
        bytes_used: Bytes of the objects in the directory now, of all processes.
        bytes_reserved: Bytes held for downloads that are running now, of all processes.
        degraded: True while trouble with the disk makes every miss pass through.
    """

    num_hits: int = 0
    num_waits: int = 0
    num_misses: int = 0
    num_bypassed: int = 0
    num_evicted: int = 0
    num_corrupt: int = 0
    num_revalidated: int = 0
    bytes_hit: int = 0
    bytes_fetched: int = 0
    bytes_bypassed: int = 0
    bytes_evicted: int = 0
    bytes_used: int = 0
    bytes_reserved: int = 0
    degraded: bool = False


class Counters:
    """The counters of one process; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, **amounts: int) -> None:
        """Add to counters, by the names of `CacheStats`."""
        with self._lock:
            self._counts.update(amounts)

    def stats(self, *, bytes_used: int, bytes_reserved: int, degraded: bool) -> CacheStats:
        """Return all of them, with the state of the directory."""
        with self._lock:
            return CacheStats(
                **self._counts,
                bytes_used=bytes_used,
                bytes_reserved=bytes_reserved,
                degraded=degraded,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Outcome of `ShardCache.verify()`.

    Attributes:
        num_objects: Objects read.
        num_bytes: Bytes read.
        removed: File names of objects with wrong bytes; they are gone and will be fetched again.
    """

    num_objects: int
    num_bytes: int
    removed: tuple[str, ...]
