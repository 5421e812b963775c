"""Which store serves a URL: plain HTTP(S) by ourselves, everything else by fsspec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import fsspec

from trainpath.cache.download import ObjectChangedError
from trainpath.cache.http_store import HttpStore
from trainpath.cache.names import redact
from trainpath.errors import ConfigError, FetchError, MissingDependencyError, ShardNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

__all__ = ["FsspecStore", "store_for"]

_CHUNK: Final = 8 << 20
_TRIES: Final = 3
_VERSIONS: Final = ("ETag", "etag", "md5", "checksum", "version_id", "mtime", "LastModified")
_DATES: Final = ("last_modified", "created", "updated")
_EXTRAS: Final = {"s3": "s3", "s3a": "s3"}


def store_for(
    url: str, *, storage_options: Mapping[str, Any] | None, timeout_s: float
) -> HttpStore | FsspecStore:
    """Return the store for `url`; HTTP options other than `headers` need fsspec's client."""
    options = dict(storage_options or {})
    if url.lower().startswith(("http://", "https://")) and options.keys() <= {"headers"}:
        return HttpStore(timeout_s=timeout_s, headers=options.get("headers"))
    return FsspecStore(options)


class FsspecStore:
    """Objects at any URL that fsspec can open.

    Args:
        storage_options: For the file system, as pandas and fsspec call them.

    Cost:
        What the file system costs; one 8 MiB block per running download. Time-outs are
        those of the file system.

    Guarantee:
        The version is looked up again after the last byte; a change is an error.
    """

    def __init__(self, storage_options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(storage_options or {})

    def size(self, url: str) -> tuple[int, str | None]:
        """Return length and version, as far as the file system tells one."""
        info: dict[str, Any] = self._trying(url, lambda fs, path: fs.info(path))
        if info.get("type") == "directory":
            raise ShardNotFoundError(f"{redact(url)} is a directory, not an object")
        if info.get("size") is None:
            raise FetchError(f"{redact(url)}: the origin does not say how long the object is")
        found = [info[name] for name in (*_VERSIONS, *_DATES) if info.get(name)]
        return int(info["size"]), str(found[0]) if found else None

    def fetch(self, url: str, destination: BinaryIO, *, etag: str | None) -> int:
        """Write the object to `destination`; return its length."""

        def copy(fs: Any, path: str) -> None:
            destination.seek(0)
            with fs.open(path, "rb", block_size=_CHUNK) as file:
                while data := file.read(_CHUNK):
                    destination.write(data)

        self._trying(url, copy)
        if etag is not None and self.size(url)[1] != etag:
            raise ObjectChangedError(f"{redact(url)} changed while it was being downloaded")
        return destination.tell()

    def close(self) -> None:
        """Do nothing: fsspec keeps its own file systems."""

    def _trying(self, url: str, call: Any) -> Any:
        for left in reversed(range(_TRIES)):
            try:
                return call(*fsspec.core.url_to_fs(url, **self._options))
            except FileNotFoundError as error:
                raise ShardNotFoundError(f"{redact(url)} does not exist") from error
            except ImportError as error:
                scheme = url.partition(":")[0]
                extra = _EXTRAS.get(scheme)
                hint = f"pip install 'trainpath[{extra}]'" if extra else str(error)
                raise MissingDependencyError(f"{scheme} URLs need a package: {hint}") from error
            except ValueError as error:
                raise ConfigError(f"{redact(url)} cannot be opened by fsspec: {error}") from error
            except FetchError:
                raise
            except OSError as error:
                if not left or isinstance(error, PermissionError):
                    raise FetchError(
                        f"{redact(url)}: {type(error).__name__} from the origin"
                    ) from error
        raise FetchError(f"{redact(url)}: no answer")
