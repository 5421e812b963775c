"""One run at a time in a checkpoint directory, held by a lock that dies with its holders."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from typing import TYPE_CHECKING

from trainpath.errors import CheckpointWriteError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Lease"]

_log = logging.getLogger("trainpath.checkpoint")

_POLL_S = 0.02
# Patience with a holder that the kernel does not name (other host, stacked file system).
_UNKNOWN_S = 30.0


class Lease:
    """An exclusive `flock` on the directory itself: no lock file, nothing to clean up.

    The writer process shares it, so that a new run waits for a writer that outlived its
    trainer, and refuses at once if the trainer still lives.

    Args:
        directory: The directory of checkpoints.
        timeout_s: How long to wait for the writer of a dead run.

    Attributes:
        fd: The descriptor to hand to the writer.
        held: False where the file system cannot lock; saves still never mix.

    Raises:
        CheckpointWriteError: Another run is using the directory.
    """

    def __init__(self, directory: Path, *, timeout_s: float) -> None:
        self.fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.held = False
        self._open = True
        try:
            self._take(directory, time.monotonic() + timeout_s)
        except BaseException:
            os.close(self.fd)
            self._open = False
            raise

    def _take(self, directory: Path, deadline: float) -> None:
        unknown = min(deadline, time.monotonic() + _UNKNOWN_S)
        while not self._try():
            holder = self._holder()
            patience = unknown if holder is None else deadline
            if (holder is not None and _lives(holder)) or time.monotonic() > patience:
                raise CheckpointWriteError(
                    f"{directory} is in use by another CheckpointManager "
                    f"(process {holder or 'unknown'}); close it, or use another directory"
                )
            time.sleep(_POLL_S)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.EINVAL}:
                raise
            _log.warning("the checkpoint directory cannot be locked (%s)", error)
            return True
        self.held = True
        return True

    def _holder(self) -> int | None:
        """Return the process that took the lock, as the kernel tells."""
        status = os.fstat(self.fd)
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        try:
            with open("/proc/locks", encoding="ascii") as file:  # noqa: PTH123 - a kernel table
                rows = [line.split() for line in file]
        except OSError:
            return None
        for row in rows:
            if row[1] == "FLOCK" and row[5] == place:
                return int(row[4])
        return None

    def close(self) -> None:
        """Give the directory back; safe to call twice."""
        if self._open:
            self._open = False
            if self.held:
                # Forked children hold copies of the descriptor: closing ours would not do.
                fcntl.flock(self.fd, fcntl.LOCK_UN)
            os.close(self.fd)


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False
