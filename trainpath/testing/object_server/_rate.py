"""One bandwidth shared by every response of a server."""

from __future__ import annotations

import threading
import time
from typing import Final

__all__ = ["RateLimit"]

_MAX_CHUNK: Final = 1 << 20
_MIN_CHUNK: Final = 1 << 10
_CHUNK_S: Final = 0.01  # sent in pieces of this time, so that responses share the rate evenly
_MAX_CREDIT_S: Final = 0.1  # what a sender that was held up may catch up


class RateLimit:
    """Hands out the transmission times of a link of `bytes_per_s` (None: unlimited).

    Each piece is scheduled behind the one before it, whoever sends it. The schedule does
    not depend on how late a sleeping thread wakes up, so the long-term rate is exact as
    long as there is demand; time without demand is lost, as on a real link.
    """

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def chunk_bytes(self) -> int:
        """Return how much to send between two calls of `reserve`."""
        if self.bytes_per_s is None:
            return _MAX_CHUNK
        return max(_MIN_CHUNK, min(_MAX_CHUNK, int(self.bytes_per_s * _CHUNK_S)))

    def reserve(self, num_bytes: int, *, since: float) -> float:
        """Book the link for `num_bytes`; return the seconds until they have passed it.

        Args:
            num_bytes: Bytes to send.
            since: Monotonic time since when the sender has had something to send.
        """
        if self.bytes_per_s is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, since, now - _MAX_CREDIT_S)
            self._free_at = start + num_bytes / self.bytes_per_s
            return self._free_at - now

    def set(self, bytes_per_s: float | None) -> None:
        """Change the rate; what is already booked keeps its time."""
        with self._lock:
            self.bytes_per_s = bytes_per_s
