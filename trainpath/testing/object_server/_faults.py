"""What goes wrong on purpose, for which objects, and how often."""

from __future__ import annotations

import fnmatch
import math
import threading
from dataclasses import dataclass
from typing import Final, Literal, get_args

from trainpath.errors import ConfigError

__all__ = ["Fault", "FaultPlan"]

Kind = Literal["status", "cut", "reset", "hang", "length", "changed"]
_KINDS: Final = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way in which the answers of an `ObjectServer` go wrong.

    Attributes:
        kind: `status`: an error answer. `cut`: the connection is closed early.
            `reset`: the connection is reset (no answer at all if `after_bytes` is 0).
            `hang`: the server pauses. `length`: the Content-Length is wrong. `changed`:
            the object turns into another version, with other bytes and another ETag,
            from this request on.
        times: How many requests it befalls; None for all from now on.
        skip: How many matching requests pass before it starts.
        method: The method it applies to; None for every method.
        after_bytes: For `cut`, `reset` and `hang`: bytes of the body that are sent before.
        status: For `status`: the code, for instance 503 or 429.
        retry_after_s: For `status`: value of a Retry-After header.
        pause_s: For `hang`: how long; endless unless given (then the answer goes on).
        extra_bytes: For `length`: by how much the announced length is off.
    """

    kind: Kind
    times: int | None = 1
    skip: int = 0
    method: str | None = "GET"
    after_bytes: int = 0
    status: int = 503
    retry_after_s: float | None = None
    pause_s: float = math.inf
    extra_bytes: int = 1

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.kind not in _KINDS:
            raise ConfigError(f"unknown kind of fault {self.kind!r}; use one of {_KINDS}")
        if self.times is not None and self.times < 1:
            raise ConfigError(f"times must be at least 1 or None, not {self.times}")
        if self.skip < 0 or self.after_bytes < 0:
            raise ConfigError("skip and after_bytes must not be negative")
        if not 400 <= self.status <= 599:
            raise ConfigError(f"status must be an error code (400 to 599), not {self.status}")
        if self.kind == "length" and self.extra_bytes == 0:
            raise ConfigError("a fault of kind 'length' needs extra_bytes other than 0")


class FaultPlan:
    """The faults that are still to come, by name pattern; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: list[_Entry] = []

    def add(self, pattern: str, fault: Fault) -> None:
        """Let `fault` befall requests of objects whose name matches `pattern`."""
        with self._lock:
            self._entries.append(_Entry(pattern, fault, fault.skip, fault.times))

    def clear(self) -> None:
        """Drop all faults that are still to come."""
        with self._lock:
            self._entries.clear()

    def take(self, name: str, method: str) -> Fault | None:
        """Return the fault for this request, if any; the oldest one that applies."""
        with self._lock:
            for entry in self._entries:
                if entry.fault.method not in (None, method):
                    continue
                if not fnmatch.fnmatchcase(name, entry.pattern):
                    continue
                if entry.skip > 0:
                    entry.skip -= 1
                    continue
                if entry.left is not None:
                    entry.left -= 1
                    if entry.left == 0:
                        self._entries.remove(entry)
                return entry.fault
        return None


@dataclass(slots=True)
class _Entry:
    pattern: str
    fault: Fault
    skip: int
    left: int | None
