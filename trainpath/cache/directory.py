"""The cache directory on disk: layout, budget, publication, eviction, cleaning up.

    v1/objects/<hex digit>/<name>   immutable objects; the name says all (`ObjectName`)
    v1/downloads/<token>-<bytes>          downloads, each under the flock of its process
    v1/sessions/<token>             one per process that has the cache open, under its flock
    v1/locks/<number>, v1/index     empty lock files

There is no other index, so none can be corrupt or out of step. Whatever is in `downloads` or
`sessions` without a lock was left by a dead process; the next one to take the index lock
removes it. Object and reservation sizes are in the names: the budget is a sum over a listing,
made under the index lock before a download starts.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainpath.cache.eviction import Resident
from trainpath.cache.locks import close_lock, file_lock, locks_work, open_locked, try_lock
from trainpath.cache.names import ObjectName

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from trainpath.cache.eviction import EvictionPolicy

__all__ = ["CacheDirectory", "Evicted", "Reservation", "Session"]

_BUCKETS: Final = "0123456789abcdef"
_STRIPES: Final = 1024
_ORPHAN_AGE_S: Final = 3600.0  # only where locks do not work


@dataclass(slots=True)
class Reservation:
    """Room for one download: a private file of the full length, locked by this process."""

    path: str
    fd: int
    num_bytes: int


@dataclass(slots=True)
class Session:
    """The registration of one process; dropped by the kernel if the process dies.

    Attributes:
        path: Its file.
        fd: Holds the lock on it.
        started_ns: When the job began to use the cache.
        pid: The process; its forked children have no part in it.
    """

    path: str
    fd: int
    started_ns: int
    pid: int

    def close(self) -> None:
        """Leave; safe to call twice."""
        if self.fd >= 0 and self.pid == os.getpid():
            with suppress(OSError):
                Path(self.path).unlink()
            close_lock(self.fd)
        self.fd = -1


@dataclass(slots=True)
class Evicted:
    """What was removed to make room."""

    num_objects: int = 0
    num_bytes: int = 0


class CacheDirectory:
    """The files under one cache directory, shared by any number of processes.

    Args:
        root: The directory.
        max_bytes: Limit on objects and downloads together (None: only `min_free_bytes`).
        min_free_bytes: What to leave free on the disk (None: 5 %, at most 1 GiB).
        timeout_s: How long to wait for a lock whose holder makes no progress.
        policy: Chooses victims.
    """

    def __init__(
        self,
        root: str,
        *,
        max_bytes: int | None,
        min_free_bytes: int | None,
        timeout_s: float,
        policy: EvictionPolicy,
    ) -> None:
        self._root = f"{root}/v1"
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._timeout_s = timeout_s
        self._policy = policy
        self._index_path = f"{self._root}/index"
        self._locks_work = True

    def create(self) -> None:
        """Make the folders that are missing."""
        root = Path(self._root)
        root.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("downloads", "sessions", "locks", *(f"objects/{digit}" for digit in _BUCKETS)):
            (root / name).mkdir(parents=True, exist_ok=True)

    @property
    def locks_work(self) -> bool:
        """False on file systems where flock succeeds for everyone."""
        return self._locks_work

    def open_session(self, started_ns: int | None) -> Session:
        """Register this process; also try the locks and remove what dead processes left.

        Args:
            started_ns: When the job began to use the cache (None: now).
        """
        path = f"{self._root}/sessions/{secrets.token_hex(8)}"
        self._locks_work = locks_work(self._index_path)
        with self._index():
            self._live_reservations()
            self._in_use_since_ns()
            fd = open_locked(path, os.O_CREAT)
            if fd is None:  # impossible under the index lock
                raise OSError(f"{path} is locked")
            if started_ns is not None:
                os.utime(fd, ns=(started_ns, started_ns))
            return Session(path, fd, os.fstat(fd).st_mtime_ns, os.getpid())

    def lock_key(self, key: str) -> str:
        """Return the path of the lock file that makes downloads of `key` exclusive."""
        return f"{self._root}/locks/{int(key[:8], 16) % _STRIPES}"

    def lookup(self, key: str) -> list[ObjectName]:
        """Return every version of `key` that is here (nearly always none or one)."""
        entries = _list(f"{self._root}/objects/{key[0]}")
        names = (ObjectName.parse(entry) for entry in entries if entry.startswith(key))
        return [name for name in names if name is not None]

    def open(self, name: ObjectName) -> BinaryIO | None:
        """Open an object and pin it while the file, or a map of it, is open.

        Returns:
            None if it is gone or does not have its length.
        """
        try:
            file = io.FileIO(self._path(name), "rb")
        except FileNotFoundError:
            return None
        for _ in range(50):
            if try_lock(file.fileno(), shared=True):
                break
            time.sleep(0.0005)  # somebody is deciding whether to evict it
        status = os.fstat(file.fileno())
        if status.st_nlink == 0 or status.st_size != name.num_bytes:
            file.close()
            return None
        return io.BufferedReader(file)

    def reserve(self, key: str, num_bytes: int, evicted: Evicted) -> Reservation | None:
        """Take room for a download before it starts, evicting if the policy says so.

        Returns:
            None if there is no room within the budget.

        Raises:
            OSError: The disk is full all the same, or cannot be written.
        """
        if self._max_bytes is not None and num_bytes > self._max_bytes:
            return None
        with self._index():
            missing = self._missing(num_bytes)
            if missing > 0 and not self._make_room(key, missing, evicted):
                return None
            path = f"{self._root}/downloads/{secrets.token_hex(8)}-{num_bytes}"
            fd = open_locked(path, os.O_CREAT | os.O_RDWR)
            if fd is None:  # impossible under the index lock
                raise OSError(f"{path} is locked")
            reservation = Reservation(path, fd, num_bytes)
            try:
                _allocate(fd, num_bytes)
            except BaseException:
                self.release(reservation)
                raise
            return reservation

    def release(self, reservation: Reservation) -> None:
        """Give the room back; does nothing after `publish`."""
        if reservation.path:
            with suppress(OSError):
                Path(reservation.path).unlink()
            reservation.path = ""
        close_lock(reservation.fd)
        reservation.fd = -1

    def publish(self, reservation: Reservation, name: ObjectName) -> BinaryIO:
        """Give a finished download its final name and open it."""
        os.fchmod(reservation.fd, 0o444)
        with self._index():
            Path(reservation.path).rename(self._path(name))
            reservation.path = ""
            # From here on readers may share it; nobody evicts without the index lock.
            close_lock(reservation.fd)
            reservation.fd = -1
            file = self.open(name)
            for other in self.lookup(name.key):
                if other != name:
                    self._unlink_unless_open(other)
        if file is None:
            raise OSError(f"{self._path(name)} vanished as it was published")
        return file

    def touch(self, file: BinaryIO) -> None:
        """Note that a running job uses this object and has checked its version."""
        with suppress(OSError):  # a read-only disk, or another user's file
            os.utime(file.fileno())

    def confirm(self, name: ObjectName, boot: str) -> ObjectName:
        """Note that the bytes of `name` are right under `boot`."""
        proven = name.under(boot)
        try:
            with self._index():
                Path(self._path(name)).rename(self._path(proven))
        except OSError:  # a read-only disk: it will be checked again
            return name
        return proven

    def discard(self, name: ObjectName) -> None:
        """Remove a damaged object, even if somebody reads it."""
        with self._index(), suppress(FileNotFoundError):
            Path(self._path(name)).unlink()

    def residents(self) -> list[ObjectName]:
        """Return all objects."""
        found = []
        for digit in _BUCKETS:
            entries = _list(f"{self._root}/objects/{digit}")
            found += [name for name in map(ObjectName.parse, entries) if name is not None]
        return found

    def used_bytes(self) -> int:
        """Return the bytes of all objects."""
        total = 0
        for digit in _BUCKETS:
            for entry in _list(f"{self._root}/objects/{digit}"):
                try:
                    total += int(entry.split("-", 3)[2])
                except (IndexError, ValueError):  # not a file of ours
                    continue
        return total

    def reserved_bytes(self) -> int:
        """Return the bytes held by running downloads of all processes."""
        with self._index():
            return self._live_reservations()

    @contextmanager
    def _index(self) -> Iterator[None]:
        with file_lock(self._index_path, timeout_s=self._timeout_s):
            yield

    def _path(self, name: ObjectName) -> str:
        return f"{self._root}/objects/{name.key[0]}/{name}"

    def _missing(self, num_bytes: int) -> int:
        """Return how many bytes must go before `num_bytes` more fit."""
        reserved = self._live_reservations()
        over_budget = 0
        if self._max_bytes is not None:
            over_budget = self.used_bytes() + reserved + num_bytes - self._max_bytes
        disk = os.statvfs(self._root)
        keep = self._min_free_bytes
        if keep is None:
            keep = min(1 << 30, disk.f_blocks * disk.f_frsize // 20)
        # Running downloads are allocated in full, so the disk has accounted for them.
        return max(over_budget, num_bytes + keep - disk.f_bavail * disk.f_frsize)

    def _live_reservations(self) -> int:
        total = 0
        for path in self._live("downloads"):
            with suppress(ValueError):
                total += int(path.rpartition("-")[2])
        return total

    def _in_use_since_ns(self) -> int:
        since = time.time_ns()
        for path in self._live("sessions"):
            with suppress(FileNotFoundError):
                since = min(since, Path(path).stat().st_mtime_ns)
        return since

    def _live(self, folder: str) -> Iterator[str]:
        """Yield the files of living processes in `folder`; remove those of dead ones."""
        for entry in _list(f"{self._root}/{folder}"):
            path = f"{self._root}/{folder}/{entry}"
            try:
                fd = open_locked(path)
            except FileNotFoundError:
                continue
            if fd is None:
                yield path
                continue
            try:
                if self._locks_work or time.time() - os.fstat(fd).st_mtime > _ORPHAN_AGE_S:
                    Path(path).unlink(missing_ok=True)  # its owner may be leaving just now
                else:
                    yield path
            finally:
                close_lock(fd)

    def _make_room(self, key: str, missing: int, evicted: Evicted) -> bool:
        residents = []
        for name in self.residents():
            with suppress(FileNotFoundError):
                residents.append(Resident(name, Path(self._path(name)).stat().st_mtime_ns))
        victims = self._policy.victims(key, residents, in_use_since_ns=self._in_use_since_ns())
        chosen: dict[str, int] = {}
        freed = 0
        try:
            for victim in victims:
                if freed >= missing:
                    break
                path = self._path(victim.name)
                with suppress(OSError):
                    fd = open_locked(path)
                    if fd is not None:
                        chosen[path] = fd
                        freed += victim.name.num_bytes
            if freed < missing:
                return False
            for path in chosen:
                Path(path).unlink(missing_ok=True)
            evicted.num_objects += len(chosen)
            evicted.num_bytes += freed
            return True
        finally:
            for fd in chosen.values():
                close_lock(fd)

    def _unlink_unless_open(self, name: ObjectName) -> None:
        path = self._path(name)
        with suppress(FileNotFoundError):
            fd = open_locked(path)
            if fd is None:
                return
            try:
                Path(path).unlink()
            finally:
                close_lock(fd)


def _allocate(fd: int, num_bytes: int) -> None:
    """Take the room on the disk, so that it is full now or not at all."""
    try:
        if num_bytes:
            os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}:
            raise  # those three: this file system cannot allocate in advance


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names only, thousands of them
    except FileNotFoundError:
        return []
