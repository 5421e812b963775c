"""One named thread that runs bounded background work and never loses an error."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from trainpath.errors import ClosedError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    """Runs submitted calls one after another on its own thread.

    Args:
        name: Thread name, `trainpath-...`.
        depth: How many calls may wait; `submit` blocks beyond it.

    Cost:
        One daemon thread, started at the first `submit`.

    Guarantee:
        Calls run in the order submitted. The error of a call is in its future and is
        raised again by the next `submit` or by `close`, whichever comes first, unless
        somebody took it from the future before.
    """

    def __init__(self, name: str, *, depth: int = 2) -> None:
        self._name = name
        self._queue: queue.Queue[tuple[Callable[[], Any], _SeenFuture[Any]] | None] = queue.Queue(
            depth
        )
        self._thread: threading.Thread | None = None
        self._failed: deque[_SeenFuture[Any]] = deque()
        self._closed = False

    def submit(self, call: Callable[[], T], *, timeout_s: float = 600.0) -> Future[T]:
        """Queue `call`; return its future.

        Raises:
            ClosedError: After `close()`.
            DeadlineError: The queue stayed full for `timeout_s`.
            Exception: An earlier call failed and nobody looked at its future.
        """
        if self._closed:
            raise ClosedError(f"{self._name} is closed; it takes no more work")
        self._raise_pending()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        future: _SeenFuture[T] = _SeenFuture()
        try:
            self._queue.put((call, future), timeout=timeout_s)
        except queue.Full:
            raise DeadlineError(
                f"{self._name} did not start a queued call within {timeout_s:.0f} s; "
                "its current call hangs or is far too slow"
            ) from None
        return future

    def _run(self) -> None:
        while not (self._closed and self._queue.empty()):
            item = self._queue.get()
            if item is None:
                return
            call, future = item
            try:
                result = call()
            except BaseException as error:  # it surfaces at the next call
                self._failed.append(future)
                future.set_exception(error)
            else:
                future.set_result(result)

    def _raise_pending(self) -> None:
        while self._failed:
            future = self._failed.popleft()
            if not future.seen:
                future.result()

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Run what is queued and end the thread; safe to call twice.

        Raises:
            DeadlineError: The thread did not end within `timeout_s`.
            Exception: An earlier call failed and nobody looked at its future.
        """
        if not self._closed:
            self._closed = True
            if self._thread is not None:
                self._end(self._thread, timeout_s)
        self._raise_pending()

    def _end(self, thread: threading.Thread, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(queue.Full):  # then the thread is alive below
            self._queue.put(None, timeout=timeout_s)
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            raise DeadlineError(
                f"{self._name} did not finish within {timeout_s:.0f} s; its current call hangs "
                "or is far too slow"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class _SeenFuture(Future[T]):
    """A future that knows whether its outcome was taken."""

    seen = False

    def result(self, timeout: float | None = None) -> T:
        self.seen = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.seen = True
        return super().exception(timeout)
