"""Background downloads: a few threads, a list of URLs, no lost error."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Prefetcher"]

_THREADS: Final = 2


class Prefetcher:
    """Calls `download` for each URL, in order, on at most two daemon threads.

    Args:
        download: Called with one URL; its error stops the prefetching of the rest.

    Cost:
        No thread while there is nothing to do.
    """

    def __init__(self, download: Callable[[str], None]) -> None:
        self._download = download
        self._lock = threading.Lock()
        self._urls: deque[str] = deque()
        self._threads: set[threading.Thread] = set()
        self._error: BaseException | None = None

    def add(self, urls: Iterable[str]) -> None:
        """Append `urls` to what is to be downloaded."""
        with self._lock:
            self._urls.extend(urls)
            for _ in range(min(len(self._urls), _THREADS - len(self._threads))):
                thread = threading.Thread(
                    target=self._run, name="trainpath-cache-prefetch", daemon=True
                )
                self._threads.add(thread)
                thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._urls:
                    self._threads.discard(threading.current_thread())
                    return
                url = self._urls.popleft()
            try:
                self._download(url)
            except BaseException as error:  # it surfaces at the next call
                with self._lock:
                    self._error = self._error or error
                    self._urls.clear()

    def raise_error(self) -> None:
        """Raise what a download raised, once."""
        if self._error is not None:
            with self._lock:
                error, self._error = self._error, None
            if error is not None:
                raise error

    def close(self, *, timeout_s: float) -> None:
        """Drop what is not begun and wait for what is; safe to call twice."""
        with self._lock:
            self._urls.clear()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
