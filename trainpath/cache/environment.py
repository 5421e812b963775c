"""The cache that `trainpath::` URLs read through, set by environment variables.

`TRAINPATH_CACHE_DIR` and `TRAINPATH_CACHE_MAX_BYTES` say where and how much;
`TRAINPATH_MODE=off` or `observe` turns it off, for the baseline of a comparison.
`TRAINPATH_CACHE_STARTED_NS` is set by the first process of a job for those it starts.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from trainpath.cache.download import private_copy
from trainpath.cache.fetch import store_for
from trainpath.cache.names import local_path, strip_protocol
from trainpath.cache.shard_cache import ShardCache, open_local
from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DIRECTORY_VARIABLE", "MAX_BYTES_VARIABLE", "open_url", "shared_cache"]

DIRECTORY_VARIABLE: Final = "TRAINPATH_CACHE_DIR"
MAX_BYTES_VARIABLE: Final = "TRAINPATH_CACHE_MAX_BYTES"
_MODE_VARIABLE: Final = "TRAINPATH_MODE"
_STARTED_VARIABLE: Final = "TRAINPATH_CACHE_STARTED_NS"
_TIMEOUT_S: Final = 30.0

_caches: dict[str, ShardCache] = {}
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock  # noqa: PLW0603 - another thread may have held it at the fork
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def shared_cache(
    directory: str | os.PathLike[str] | None = None,
    *,
    max_bytes: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ShardCache | None:
    """Return this process's cache for `directory`, the same one for the same arguments.

    Args:
        directory: Where (default: `TRAINPATH_CACHE_DIR`).
        max_bytes: Limit (default: `TRAINPATH_CACHE_MAX_BYTES`; neither: no limit but the
            room to be left on the disk).
        storage_options: For the origin.

    Returns:
        None if no directory is set, or if `TRAINPATH_MODE` is `off` or `observe`.

    Raises:
        CacheWriteError: The directory cannot be made or written.
    """
    where = os.fspath(directory) if directory else os.environ.get(DIRECTORY_VARIABLE)
    if not where or os.environ.get(_MODE_VARIABLE) in {"off", "observe"}:
        return None
    if max_bytes is None:
        max_bytes = _max_bytes_of_environment()
    options = json.dumps(storage_options or {}, sort_keys=True, default=repr)
    key = json.dumps([str(Path(where).absolute()), max_bytes, options])
    with _lock:
        cache = _caches.get(key)
        if cache is None:
            started = os.environ.get(_STARTED_VARIABLE)
            cache = ShardCache(
                where,
                max_bytes=max_bytes,
                storage_options=storage_options,
                job_started_ns=int(started) if started else None,
            )
            # Processes started by this one, however, belong to the same job.
            os.environ.setdefault(_STARTED_VARIABLE, str(cache.job_started_ns))
            _caches[key] = cache
    return cache


def _max_bytes_of_environment() -> int | None:
    text = os.environ.get(MAX_BYTES_VARIABLE)
    if not text:
        return None
    try:
        return int(float(text))
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"{MAX_BYTES_VARIABLE} must be a number of bytes, got {text!r}"
        ) from error


def open_url(
    url: str | os.PathLike[str],
    *,
    cache: ShardCache | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> BinaryIO:
    """Open any URL or path as a real local file, read-only.

    Args:
        url: A path, a URL, or `trainpath::` and a URL.
        cache: Read through this one. Without it, `trainpath::` URLs read through the cache
            of the environment, and all others are downloaded into a file without a name.
        storage_options: For the origin, where `cache` is not given.

    Raises:
        ShardNotFoundError: There is no such object.
        FetchError: The origin did not deliver it.
    """
    text = os.fspath(url)
    if cache is None and text.startswith("trainpath::"):
        cache = shared_cache(storage_options=storage_options)
    if cache is not None:
        return cache.open(text)
    text = strip_protocol(text)
    path = local_path(text)
    if path is not None:
        return open_local(path)
    store = store_for(text, storage_options=storage_options, timeout_s=_TIMEOUT_S)
    try:
        return private_copy(store, text)[0]
    finally:
        store.close()
