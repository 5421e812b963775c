"""Bytes from an origin into a file: counted, limited and digested as they pass."""

from __future__ import annotations

import io
import os
import tempfile
import time
import zlib
from typing import TYPE_CHECKING, Final

from trainpath.cache.names import redact
from trainpath.errors import FetchError, ShardNotFoundError, TrainpathError
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import stage

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from trainpath.types import Store

__all__ = [
    "TRIES_IF_CHANGED",
    "DiskError",
    "DownloadFile",
    "ObjectChangedError",
    "crc_of",
    "fetch",
    "private_copy",
    "size_of",
]

TRIES_IF_CHANGED: Final = 3
_TRIES_IF_SHORT: Final = 3
_CHUNK: Final = 1 << 20


class DiskError(Exception):
    """The local disk refused a write; the origin is not to blame."""


class ObjectChangedError(FetchError):
    """The object at the origin is no longer the version that was asked for."""


class DownloadFile(io.RawIOBase):
    """The destination of one download.

    Args:
        fd: Open for writing; stays the caller's.
        url: For messages.
        max_bytes: More than this is an error of the origin (None: unlimited).
        beat: Called at most once a second while bytes arrive; raises to stop the download.
    """

    def __init__(
        self,
        fd: int,
        url: str,
        *,
        max_bytes: int | None = None,
        beat: Callable[[], None] | None = None,
    ) -> None:
        self._fd = fd
        self._url = url
        self._max_bytes = max_bytes
        self._beat = beat
        self._next_beat = 0.0
        self.num_bytes = 0
        self.crc = 0

    def writable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: to the start, to begin again."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self.num_bytes

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Begin again (`seek(0)`), or stay (any other position is refused)."""
        if whence == os.SEEK_SET and offset == 0:
            self.num_bytes = 0
            self.crc = 0
        elif (whence, offset) not in {(os.SEEK_SET, self.num_bytes), (os.SEEK_CUR, 0)}:
            raise io.UnsupportedOperation("a download can only go on or begin again")
        return self.num_bytes

    def truncate(self, size: int | None = None, /) -> int:
        """Do nothing: what lies beyond is overwritten, or the download fails."""
        return self.num_bytes if size is None else size

    def write(self, data: memoryview | bytes, /) -> int:  # type: ignore[override]
        """Append all of `data`."""
        view = memoryview(data).cast("B")
        if self._max_bytes is not None and self.num_bytes + len(view) > self._max_bytes:
            raise FetchError(
                f"{redact(self._url)}: the origin sends more than the {self._max_bytes} bytes "
                "that it announced"
            )
        self.crc = zlib.crc32(view, self.crc)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], self.num_bytes + done)
            except OSError as error:
                raise DiskError(f"{error.strerror or error}") from error
        self.num_bytes += done
        if self._beat is not None and time.monotonic() >= self._next_beat:
            self._beat()
            self._next_beat = time.monotonic() + 1.0
        return done


def size_of(store: Store, url: str) -> tuple[int, str | None]:
    """Ask the origin for length and version; every failure is a `TrainpathError`."""
    with stage(S.DATA_STORAGE):
        try:
            return store.size(url)
        except TrainpathError:
            raise
        except FileNotFoundError as error:
            raise ShardNotFoundError(f"{redact(url)} does not exist") from error
        except OSError as error:
            raise FetchError(f"{redact(url)}: {type(error).__name__} from the origin") from error


def fetch(
    store: Store, url: str, destination: DownloadFile, version: tuple[int, str | None]
) -> None:
    """Download `url` in the given (length, ETag); every failure is a `TrainpathError`.

    Raises:
        DiskError: The destination could not be written.
    """
    num_bytes, etag = version
    left = _TRIES_IF_SHORT
    while True:
        with stage(S.DATA_NETWORK):
            try:
                store.fetch(url, destination, etag=etag)  # type: ignore[arg-type]
            except (TrainpathError, DiskError):
                raise
            except FileNotFoundError as error:
                raise ShardNotFoundError(f"{redact(url)} does not exist") from error
            except OSError as error:
                raise FetchError(
                    f"{redact(url)}: {type(error).__name__} from the origin"
                ) from error
        if destination.num_bytes == num_bytes:
            return
        left -= 1
        if not left:
            raise FetchError(
                f"{redact(url)}: the origin sent {destination.num_bytes} bytes instead of the "
                f"{num_bytes} that it announced; is the object being written?"
            )
        destination.seek(0)


def private_copy(
    store: Store, url: str, version: tuple[int, str | None] | None = None
) -> tuple[BinaryIO, int]:
    """Download past the cache into a file without a name, gone when it is closed.

    It lies in the temporary directory (`TMPDIR`) or, if that is full, in memory.

    Returns:
        The file, opened read-only, and its length.
    """
    for left in reversed(range(TRIES_IF_CHANGED)):
        version = version or size_of(store, url)
        try:
            try:
                return _download(_file_on_disk(), store, url, version), version[0]
            except DiskError:
                return _download(_file_in_memory(), store, url, version), version[0]
        except ObjectChangedError:
            version = None
            if not left:
                raise
    raise FetchError(f"{redact(url)} changed at each of {TRIES_IF_CHANGED} downloads")


def _file_on_disk() -> int:
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise DiskError(f"no temporary file: {error}") from error


def _file_in_memory() -> int:
    return os.memfd_create("trainpath-shard")


def _download(fd: int, store: Store, url: str, version: tuple[int, str | None]) -> BinaryIO:
    try:
        fetch(store, url, DownloadFile(fd, url, max_bytes=version[0]), version)
        return os.fdopen(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC), "rb")
    finally:
        os.close(fd)


def crc_of(file: BinaryIO) -> int:
    """Return the CRC-32 of a whole file."""
    crc = 0
    buffer = memoryview(bytearray(_CHUNK))
    file.seek(0)
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        crc = zlib.crc32(buffer[:count], crc)
    file.seek(0)
    return crc
