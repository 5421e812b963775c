"""File locks with deadlines, dropped by the kernel when their holder dies.

Plain `flock`: a wake-up costs one poll of at most 10 ms, kill -9 of the holder frees it at
once, and nothing has to be cleaned. A forked child would keep its parent's locks alive, so
it closes the descriptors first thing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from trainpath.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["close_lock", "file_lock", "locks_work", "open_locked", "try_lock"]

_FIRST_PAUSE_S: Final = 0.0005
_LAST_PAUSE_S: Final = 0.01

_held: set[int] = set()


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock the open file `fd` if nobody holds it; say whether that worked."""
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
            return False
        if error.errno in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}:
            return True  # this file system has no locks: correctness does not need them
        raise
    return True


def open_locked(path: str, flags: int = os.O_RDONLY) -> int | None:
    """Open `path` and lock it at once; None if somebody else holds it."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _held.add(fd)
    is_ours = False
    try:
        is_ours = try_lock(fd)
    finally:
        if not is_ours:
            close_lock(fd)
    return fd if is_ours else None


def close_lock(fd: int) -> None:
    """Close a descriptor of `open_locked`, and with it the lock."""
    if fd in _held:
        _held.discard(fd)
        os.close(fd)


@contextmanager
def file_lock(path: str, *, timeout_s: float) -> Iterator[tuple[int, bool]]:
    """Hold the lock file `path`; yields its descriptor and whether there was a wait.

    The deadline counts from the last sign of life of the holder: it touches the lock file
    while it makes progress.

    Raises:
        DeadlineError: Somebody held the lock without any progress for `timeout_s`.
        OSError: The lock file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o666)
    _held.add(fd)
    try:
        waited = not try_lock(fd)
        if waited:
            _wait(fd, path, timeout_s)
        yield fd, waited
    finally:
        close_lock(fd)


def _wait(fd: int, path: str, timeout_s: float) -> None:
    pause = _FIRST_PAUSE_S
    seen = 0
    deadline = 0.0
    while not try_lock(fd):
        now = time.monotonic()
        touched = os.fstat(fd).st_mtime_ns
        if touched != seen:
            seen = touched
            deadline = now + timeout_s
        if now > deadline:
            raise DeadlineError(
                f"another process held {path} for {timeout_s:.0f} s without any progress"
            )
        time.sleep(pause)
        pause = min(2 * pause, _LAST_PAUSE_S)


def locks_work(path: str) -> bool:
    """Say whether a second lock of `path` is refused, as it must be."""
    first = open_locked(path, os.O_CREAT)
    if first is None:
        return True
    try:
        second = open_locked(path)
        if second is not None:
            close_lock(second)
        return second is None
    finally:
        close_lock(first)


def _forget_in_child() -> None:
    for fd in tuple(_held):
        with suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
