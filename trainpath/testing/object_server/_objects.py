"""Where the objects of the server are kept: in memory or in a directory."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

__all__ = ["DirectoryObjects", "MemoryObjects", "Object", "Objects", "PreconditionError"]

_TEMPORARY: Final = ".trainpath-put-"


class PreconditionError(Exception):
    """The object is not, or no longer, what the writer expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """One version of one object, open for reading; later writes do not touch it."""

    size: int
    etag: str
    modified_s: float
    body: bytes | BinaryIO

    def send(self, destination: socket.socket, offset: int, count: int) -> int:
        """Send part of the bytes without holding the interpreter lock; return how many."""
        if isinstance(self.body, bytes):
            part = memoryview(self.body)[offset : offset + count]
            destination.sendall(part)
            return len(part)
        return destination.sendfile(self.body, offset, count)

    def read(self) -> bytes:
        """Return all bytes."""
        return self.body if isinstance(self.body, bytes) else self.body.read()

    def close(self) -> None:
        """Close the file behind it."""
        if not isinstance(self.body, bytes):
            self.body.close()


class Objects(Protocol):
    """A place that keeps objects by name."""

    def get(self, name: str) -> Object | None:
        """Open the current version of an object."""
        ...

    def put(self, name: str, data: BinaryIO, *, check: Callable[[Object | None], None]) -> str:
        """Replace an object atomically if `check` of the old one passes; return the ETag."""
        ...

    def delete(self, name: str) -> bool:
        """Remove an object; tell whether it was there."""
        ...

    def names(self) -> dict[str, tuple[int, float]]:
        """Return size and modification time of every object, by name, sorted."""
        ...


def _etag(data: BinaryIO) -> str:
    """Return a strong ETag: a hash of the content alone."""
    digest = hashlib.blake2b(digest_size=16)
    data.seek(0)
    while chunk := data.read(1 << 20):
        digest.update(chunk)
    return f'"{digest.hexdigest()}"'


def _version(status: os.stat_result) -> tuple[int, int, int, int]:
    """Return what changes whenever the content of a file does."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class MemoryObjects:
    """Objects in a dict."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, str, float]] = {}

    def get(self, name: str) -> Object | None:
        """Open the current version of an object."""
        with self._lock:
            return self._get(name)

    def put(self, name: str, data: BinaryIO, *, check: Callable[[Object | None], None]) -> str:
        """Replace an object atomically if `check` of the old one passes; return the ETag."""
        etag = _etag(data)
        data.seek(0)
        content = data.read()
        with self._lock:
            check(self._get(name))
            self._objects[name] = (content, etag, time.time())
        return etag

    def delete(self, name: str) -> bool:
        """Remove an object; tell whether it was there."""
        with self._lock:
            return self._objects.pop(name, None) is not None

    def names(self) -> dict[str, tuple[int, float]]:
        """Return size and modification time of every object, by name, sorted."""
        with self._lock:
            return {
                name: (len(content), modified_s)
                for name, (content, _, modified_s) in sorted(self._objects.items())
            }

    def _get(self, name: str) -> Object | None:
        if name not in self._objects:
            return None
        content, etag, modified_s = self._objects[name]
        return Object(size=len(content), etag=etag, modified_s=modified_s, body=content)


class DirectoryObjects:
    """Objects as the files below a directory; files that others put there count, too."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise ConfigError(f"{root} is not a directory; create it before serving it")
        self._root = root.resolve()
        self._write_lock = threading.Lock()
        self._etags: dict[tuple[int, int, int, int], str] = {}

    def get(self, name: str) -> Object | None:
        """Open the current version of an object."""
        path = self._path(name)
        if path is None or not path.is_file():  # opening a pipe would wait for a writer
            return None
        try:
            body = path.open("rb")
        except (FileNotFoundError, PermissionError):
            return None
        status = os.fstat(body.fileno())
        etag = self._etags.get(_version(status))
        if etag is None:
            etag = self._etags[_version(status)] = _etag(body)
            body.seek(0)
        return Object(size=status.st_size, etag=etag, modified_s=status.st_mtime, body=body)

    def put(self, name: str, data: BinaryIO, *, check: Callable[[Object | None], None]) -> str:
        """Replace an object atomically if `check` of the old one passes; return the ETag."""
        path = self._path(name)
        if path is None:
            raise PreconditionError(f"{name} leaves the served directory by a symbolic link")
        path.parent.mkdir(parents=True, exist_ok=True)
        etag = _etag(data)
        data.seek(0)
        with tempfile.NamedTemporaryFile(
            dir=self._root, prefix=_TEMPORARY, delete=False
        ) as temporary:
            try:
                while chunk := data.read(1 << 20):
                    temporary.write(chunk)
                temporary.flush()
                self._etags[_version(os.fstat(temporary.fileno()))] = etag
                with self._write_lock:
                    old = self.get(name)
                    try:
                        check(old)
                    finally:
                        if old is not None:
                            old.close()
                    Path(temporary.name).replace(path)
            except BaseException:
                Path(temporary.name).unlink(missing_ok=True)
                raise
        return etag

    def delete(self, name: str) -> bool:
        """Remove an object; tell whether it was there."""
        path = self._path(name)
        with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            if path is not None:
                path.unlink()
                return True
        return False

    def names(self) -> dict[str, tuple[int, float]]:
        """Return size and modification time of every object, by name, sorted."""
        found: dict[str, tuple[int, float]] = {}
        for directory, _, files in os.walk(self._root):
            for file in files:
                path = Path(directory, file)
                name = path.relative_to(self._root).as_posix()
                if path.is_file() and self._path(name) is not None:
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        found[name] = (status.st_size, status.st_mtime)
        return dict(sorted(found.items()))

    def _path(self, name: str) -> Path | None:
        """Return the path of an object, or None if it would be outside of the directory."""
        path = self._root / name
        if path.name.startswith(_TEMPORARY):
            return None
        return path if path.resolve().is_relative_to(self._root) else None
