"""Getting at the bytes of a shard: as a file that can be mapped, wherever it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from trainpath.cache import open_url
from trainpath.errors import FetchError, ShardNotFoundError, TrainpathError
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import stage

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ShardOpener", "local_path", "open_shard"]


class ShardOpener(Protocol):
    """What `TarDataset` needs of a cache (`trainpath.cache.ShardCache` has it)."""

    def open(self, url: str, /) -> BinaryIO:
        """Return a complete local file with the content of `url`."""
        ...


def local_path(url: str) -> Path | None:
    """Return the path that `url` names in the local file system, None if it is remote."""
    if url.startswith("file://"):
        return Path(url.removeprefix("file://"))
    return None if "://" in url or "::" in url else Path(url)


def open_shard(url: str, cache: ShardOpener | None, storage_options: Mapping[str, Any]) -> BinaryIO:
    """Open a shard as a local file: in place, through the cache, or as an unlinked copy.

    Raises:
        ShardNotFoundError: There is no such shard.
        FetchError: It cannot be read.
    """
    path = local_path(url)
    try:
        with stage(S.DATA_STORAGE):
            if path is not None:
                return path.open("rb")
            if cache is not None:
                return cache.open(url)
            return open_url(url, storage_options=storage_options)
    except TrainpathError:
        raise
    except FileNotFoundError as error:
        raise ShardNotFoundError(
            f"shard {url} does not exist; check the URL and its brace expansion"
        ) from error
    except OSError as error:
        raise FetchError(f"shard {url} cannot be read: {type(error).__name__}: {error}") from error
