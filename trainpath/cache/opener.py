"""How one object is opened: a hit, or wait, ask for its version, check, download."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, BinaryIO, Literal

from trainpath.cache.directory import Evicted
from trainpath.cache.download import (
    TRIES_IF_CHANGED,
    DownloadFile,
    ObjectChangedError,
    crc_of,
    fetch,
    size_of,
)
from trainpath.cache.locks import file_lock
from trainpath.cache.names import ObjectName, boot_tag, tag_of
from trainpath.cache.stats import Counters
from trainpath.errors import ClosedError, FetchError, ShardNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainpath.cache.directory import CacheDirectory
    from trainpath.types import Store

__all__ = ["Opener", "Revalidate", "Version"]

Revalidate = Literal["start", "open", "never"]
Version = tuple[int, "str | None"]
"""Length in bytes and version tag (ETag) of an object at its origin."""

_log = logging.getLogger("trainpath.cache")


class Opener:
    """Opens objects of one cache directory for one process.

    Args:
        disk: The directory.
        store_of: Returns the origin of a URL.
        revalidate: When the origin is asked for the current version, see `ShardCache`.
        timeout_s: A quarter of the time to wait for a download without progress.
        started_ns: When the job began to use the directory.

    Attributes:
        counters: What was done.
        started_ns: As given; set again when the process registers.
        closed: Set to end running downloads at their next sign of progress.
    """

    def __init__(
        self,
        disk: CacheDirectory,
        store_of: Callable[[str], Store],
        *,
        revalidate: Revalidate,
        timeout_s: float,
        started_ns: int | None,
    ) -> None:
        self._disk = disk
        self._store_of = store_of
        self._revalidate = revalidate
        self._timeout_s = timeout_s
        self._boot = boot_tag()
        self._pinned: dict[str, ObjectName] = {}
        self.counters = Counters()
        self.started_ns = started_ns
        self.closed = False

    def hit(self, key: str, *, waited: bool = False) -> BinaryIO | None:
        """Open what needs no question: here, proven under this boot, current for this job."""
        if self._revalidate == "open":
            return None
        name = self._pinned.get(key)
        file = None if name is None else self._disk.open(name)
        if name is None or file is None:
            found = self._disk.lookup(key)
            if len(found) != 1 or found[0].boot != self._boot:
                return None
            name = found[0]
            file = self._disk.open(name)
            if file is None:
                return None
            if self._is_before_start(file):
                if self._revalidate == "start":
                    file.close()
                    return None
                self._disk.touch(file)
            self._pinned[key] = name
        if waited:
            self.counters.add(num_waits=1, bytes_hit=name.num_bytes)
        else:
            self.counters.add(num_hits=1, bytes_hit=name.num_bytes)
        return file

    def fill(self, key: str, url: str) -> tuple[BinaryIO | None, Version | None]:
        """Open what is not a hit, after waiting for whoever is downloading it.

        Returns:
            The open file, or None if there is no room for it, then with its version.

        Raises:
            DeadlineError: Another process held the object without any progress.
            OSError, DiskError: The disk makes trouble (every `TrainpathError`: the origin).
        """
        with file_lock(self._disk.lock_key(key), timeout_s=4 * self._timeout_s) as (fd, waited):
            if waited:
                file = self.hit(key, waited=True)
                if file is not None:
                    return file, None
            left = TRIES_IF_CHANGED
            while True:
                version, file = self._current(key, url)
                if file is not None:
                    return file, version
                left -= 1
                try:
                    return self._download(key, url, version, fd), version
                except ObjectChangedError:
                    if not left:
                        raise

    def discard(self, name: ObjectName) -> None:
        """Remove a damaged object."""
        self._disk.discard(name)
        self.counters.add(num_corrupt=1)
        _log.warning("removed a damaged object: %s", name)

    def _is_before_start(self, file: BinaryIO) -> bool:
        return os.fstat(file.fileno()).st_mtime_ns < (self.started_ns or 0)

    def _current(self, key: str, url: str) -> tuple[Version, BinaryIO | None]:
        """Ask the origin for the current version, and open it if it is here and sound."""
        found = self._disk.lookup(key)
        if self._revalidate == "never" and len(found) == 1:
            file = self._checked(found[0])
            if file is not None:
                return (found[0].num_bytes, None), file
            found = []
        try:
            version = size_of(self._store_of(url), url)
        except ShardNotFoundError:
            raise
        except FetchError as error:
            if len(found) == 1 and (file := self._checked(found[0])) is not None:
                _log.warning("%s; using the copy that is here as it is", error)
                return (found[0].num_bytes, None), file
            raise
        if found:
            self.counters.add(num_revalidated=1)
        for name in found:
            if (name.num_bytes, name.tag) == (version[0], tag_of(version[1])):
                return version, self._checked(name)
        return version, None

    def _checked(self, name: ObjectName) -> BinaryIO | None:
        """Open an object, after reading it once if another boot published it."""
        file = self._disk.open(name)
        good = file is not None
        if file is not None and name.boot != self._boot:
            good = crc_of(file) == name.crc
            if good:
                name = self._disk.confirm(name, self._boot)
            else:
                file.close()
        if not good or file is None:
            if name in self._disk.lookup(name.key):
                self.discard(name)
            return None
        self._disk.touch(file)
        self._pinned[name.key] = name
        self.counters.add(num_hits=1, bytes_hit=name.num_bytes)
        return file

    def _download(self, key: str, url: str, version: Version, lock_fd: int) -> BinaryIO | None:
        evicted = Evicted()
        num_bytes, etag = version
        reservation = self._disk.reserve(key, num_bytes, evicted)
        self.counters.add(num_evicted=evicted.num_objects, bytes_evicted=evicted.num_bytes)
        if reservation is None:
            return None
        try:
            destination = DownloadFile(
                reservation.fd, url, max_bytes=num_bytes, beat=lambda: self._beat(lock_fd)
            )
            fetch(self._store_of(url), url, destination, version)
            name = ObjectName(key, tag_of(etag), num_bytes, destination.crc, self._boot)
            file = self._disk.publish(reservation, name)
        finally:
            self._disk.release(reservation)
        self._pinned[key] = name
        self.counters.add(num_misses=1, bytes_fetched=num_bytes)
        return file

    def _beat(self, lock_fd: int) -> None:
        """Show those who wait for this download that it makes progress."""
        if self.closed:
            raise ClosedError("the cache was closed during a download")
        os.utime(lock_fd)
