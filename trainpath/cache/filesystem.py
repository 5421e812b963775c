"""fsspec front: `trainpath::http://host/shard.tar` reads through the shard cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
from fsspec.spec import AbstractFileSystem

from trainpath.cache.environment import shared_cache

if TYPE_CHECKING:
    from typing import BinaryIO

try:
    from fsspec.implementations.chained import ChainedFileSystem
except ImportError:  # fsspec before 2025.10: chaining is by the arguments alone
    ChainedFileSystem = AbstractFileSystem

__all__ = ["TrainpathFileSystem"]


class TrainpathFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """Reads through a `ShardCache`; everything else is the file system behind.

    `fsspec.open("trainpath::s3://bucket/key", s3={...}, trainpath={"directory": ...})`.
    Without a directory (and without `TRAINPATH_CACHE_DIR`), or with `TRAINPATH_MODE` set to
    `off` or `observe`, files are opened by the file system behind, as if `trainpath::` were
    not there.

    Args:
        target_protocol: The protocol behind, set by the URL.
        target_options: Its options, set by fsspec, as is the path behind (the third one).
        fs: The file system behind, instead of `target_protocol`.
        directory: Of the cache (default: `TRAINPATH_CACHE_DIR`).
        max_bytes: Its limit (default: `TRAINPATH_CACHE_MAX_BYTES`).

    Cost:
        Whole objects are cached: made for shards that are read in full.

    Guarantee:
        Read-only. As `ShardCache`.
    """

    protocol: ClassVar[str] = "trainpath"
    async_impl = False

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: dict[str, Any] | None = None,
        fo: str | None = None,  # codespell:ignore fo
        *,
        fs: AbstractFileSystem | None = None,
        directory: str | None = None,
        max_bytes: int | None = None,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        self._options = dict(target_options or {})
        self._behind = fo or ""  # codespell:ignore fo
        # An archive in the chain has no URL of its own: it is read by fsspec, not cached.
        self._nested = "target_protocol" in self._options
        self.fs = fs or fsspec.filesystem(target_protocol or "file", **self._options)
        protocols = self.fs.protocol
        self._target = target_protocol or (
            protocols if isinstance(protocols, str) else protocols[0]
        )
        self._directory = directory
        self._max_bytes = max_bytes
        # Which prefix to strip depends on the file system behind.
        self._strip_protocol = self._strip

    def _strip(self, path: str | list[str]) -> str | list[str]:
        if isinstance(path, list):
            return [str(self._strip(item)) for item in path]
        for prefix in ("trainpath::", "trainpath://"):
            path = path.removeprefix(prefix)
        return str(self.fs._strip_protocol(path or self._behind))  # noqa: SLF001

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,  # noqa: ARG002
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> BinaryIO:
        if mode != "rb":
            raise NotImplementedError(f"trainpath:: URLs are read-only, {mode!r} is not possible")
        cache = None
        if not self._nested:
            cache = shared_cache(
                self._directory, max_bytes=self._max_bytes, storage_options=self._options
            )
        if cache is not None:
            return cache.open(str(self.fs.unstrip_protocol(path)))
        file: BinaryIO = self.fs.open(
            path, mode, block_size=block_size, cache_options=cache_options, **kwargs
        )
        return file

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return what the file system behind says of `path`."""
        info: dict[str, Any] = self.fs.info(self._strip_protocol(path), **kwargs)
        return info

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List `path` in the file system behind."""
        entries: list[Any] = self.fs.ls(self._strip_protocol(path), detail=detail, **kwargs)
        return entries

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Say whether `path` exists in the file system behind."""
        return bool(self.fs.exists(self._strip_protocol(path), **kwargs))

    def isdir(self, path: str) -> bool:
        """Say whether `path` is a directory in the file system behind."""
        return bool(self.fs.isdir(self._strip_protocol(path)))

    def isfile(self, path: str) -> bool:
        """Say whether `path` is a file in the file system behind."""
        return bool(self.fs.isfile(self._strip_protocol(path)))

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """Expand `path` in the file system behind."""
        return self.fs.glob(self._strip_protocol(path), maxdepth=maxdepth, **kwargs)

    def ukey(self, path: str) -> str:
        """Return the version of `path` in the file system behind."""
        return str(self.fs.ukey(self._strip_protocol(path)))
