"""Counts of every request and byte, by object and method."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Counters"]


@dataclass(slots=True)
class _Count:
    requests: int = 0
    sent: int = 0  # bytes of bodies sent
    received: int = 0  # bytes of bodies received
    statuses: dict[int, int] = field(default_factory=lambda: defaultdict(int))


class Counters:
    """Counts requests when they arrive and bytes as they are sent; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, str], _Count] = defaultdict(_Count)
        self._connections = 0

    def connection(self) -> None:
        """Count a connection that was accepted."""
        with self._lock:
            self._connections += 1

    def request(self, name: str, method: str) -> None:
        """Count a request that has arrived."""
        with self._lock:
            self._counts[name, method].requests += 1

    def answer(self, name: str, method: str, status: int) -> None:
        """Count a status line that is about to be sent."""
        with self._lock:
            self._counts[name, method].statuses[status] += 1

    def sent(self, name: str, method: str, num_bytes: int) -> None:
        """Count bytes of a body that go to the network; negative: that did not go after all."""
        with self._lock:
            self._counts[name, method].sent += num_bytes

    def received(self, name: str, method: str, num_bytes: int) -> None:
        """Count bytes of a body that have arrived."""
        with self._lock:
            self._counts[name, method].received += num_bytes

    def total(self, what: str, name: str | None = None, method: str | None = None) -> int:
        """Sum `requests`, `sent` or `received` over what matches."""
        with self._lock:
            return sum(
                getattr(count, what)
                for (its_name, its_method), count in self._counts.items()
                if name in (None, its_name) and method in (None, its_method)
            )

    def clear(self) -> None:
        """Start again from zero."""
        with self._lock:
            self._counts.clear()
            self._connections = 0

    def snapshot(self) -> dict[str, Any]:
        """Return everything as plain dicts (see `ObjectServer.stats`)."""
        with self._lock:
            objects: dict[str, dict[str, Any]] = {}
            for (name, method), count in sorted(self._counts.items()):
                objects.setdefault(name, {})[method] = {
                    "requests": count.requests,
                    "bytes_sent": count.sent,
                    "bytes_received": count.received,
                    "statuses": {str(status): n for status, n in sorted(count.statuses.items())},
                }
            counts = self._counts.values()
            return {
                "connections": self._connections,
                "requests": sum(count.requests for count in counts),
                "bytes_sent": sum(count.sent for count in counts),
                "bytes_received": sum(count.received for count in counts),
                "objects": objects,
            }
