"""A store that is slow or fails on purpose."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from trainpath.types import Store

__all__ = ["FaultyStore"]


class FaultyStore:
    """Wraps a `Store` with delays and errors.

    Args:
        store: The store that does the work.
        delay_s: Time that each call waits first; may be set at any time.
        errors: Raised one after another, one per call of `size` or `fetch`; None lets one
            call pass. When they are used up, all calls pass. More may be added to the
            attribute `errors` at any time.
        after_bytes: Bytes that a `fetch` writes before it raises its error.

    Attributes:
        calls: Method and URL of every call so far.

    Cost:
        No thread; a fetch that fails in the middle passes its bytes through one function.

    Guarantee:
        Without a delay or an error a call is the call of the wrapped store. It can be
        pickled if the store and the errors can.
    """

    def __init__(
        self,
        store: Store,
        *,
        delay_s: float = 0.0,
        errors: Iterable[Exception | None] = (),
        after_bytes: int = 0,
    ) -> None:
        if delay_s < 0 or after_bytes < 0:
            raise ConfigError("delay_s and after_bytes must not be negative")
        self.delay_s = delay_s
        self.errors = deque(errors)
        self.after_bytes = after_bytes
        self.calls: list[tuple[str, str]] = []
        self._store = store

    def size(self, url: str) -> tuple[int, str | None]:
        """Return what the wrapped store says, or raise the next error."""
        if (error := self._next("size", url)) is not None:
            raise error
        return self._store.size(url)

    def fetch(self, url: str, destination: BinaryIO, *, etag: str | None) -> int:
        """Write the object, or the first `after_bytes` of it and raise the next error."""
        error = self._next("fetch", url)
        if error is None:
            return self._store.fetch(url, destination, etag=etag)
        if self.after_bytes > 0:
            cut = _CutWriter(destination, self.after_bytes, error)
            self._store.fetch(url, cast("BinaryIO", cut), etag=etag)
        raise error

    def _next(self, method: str, url: str) -> Exception | None:
        self.calls.append((method, url))
        if self.delay_s > 0:
            time.sleep(self.delay_s)
        try:
            return self.errors.popleft()
        except IndexError:
            return None


class _CutWriter:
    """Passes `left` bytes on to a file, then raises."""

    def __init__(self, destination: BinaryIO, left: int, error: Exception) -> None:
        self._destination = destination
        self._left = left
        self._error = error

    def write(self, data: Any) -> int:
        """Write what is still allowed of `data`."""
        view = memoryview(data).cast("B")
        if len(view) > self._left:
            self._destination.write(view[: self._left])
            self._left = 0
            raise self._error
        self._left -= len(view)
        return self._destination.write(view)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._destination, name)
