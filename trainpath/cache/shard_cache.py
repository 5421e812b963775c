"""The node-local shard cache: each remote object is downloaded once per node."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, get_args

from trainpath.cache.directory import CacheDirectory
from trainpath.cache.download import DiskError, crc_of, private_copy
from trainpath.cache.eviction import KeepUntilFull
from trainpath.cache.fetch import store_for
from trainpath.cache.names import canonical_url, digest, local_path, redact, strip_protocol
from trainpath.cache.opener import Opener, Revalidate
from trainpath.cache.prefetch import Prefetcher
from trainpath.cache.stats import Counters, VerifyReport
from trainpath.errors import (
    CacheWriteError,
    ClosedError,
    ConfigError,
    DeadlineError,
    FetchError,
    ShardNotFoundError,
    TrainpathError,
)
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Self

    from trainpath.cache.directory import Session
    from trainpath.cache.eviction import EvictionPolicy
    from trainpath.cache.stats import CacheStats
    from trainpath.types import Store

__all__ = ["ShardCache", "open_local"]

_log = logging.getLogger("trainpath.cache")

_PROBE_AGAIN_S: Final = 30.0
_PICKLED: Final = (
    *("directory", "max_bytes", "min_free_bytes", "timeout_s", "revalidate"),
    *("storage_options", "given_store", "policy", "started_ns"),
)


class ShardCache:
    """One directory of immutable shard files, shared by all processes and jobs of a node.

    Args:
        directory: Where the files go; made if missing. Must be on a local disk.
        max_bytes: Limit on everything in it, running downloads included (None: only
            `min_free_bytes`). All processes should give the same one.
        min_free_bytes: What to leave free on its disk (None: 5 % of it, at most 1 GiB).
        timeout_s: Longest silence of a socket, after which the request is retried. Four
            times as long without progress of another process's download, and this process
            stops waiting and passes through.
        revalidate: When the origin is asked whether an object in the directory is still
            the current version: "start", once after this job began to use the cache
            (pickled copies and forked children belong to the job); "open", at each open;
            "never", whatever is there is right.
        storage_options: For the origin: `{"headers": ...}` for HTTP(S), else for fsspec.
        store: Where objects come from instead; must be picklable if the cache is pickled.
        policy: Chooses what is evicted (default: `KeepUntilFull`).
        job_started_ns: When this job began to use the cache, `time.time_ns()` (default: now).

    Cost:
        A hit is one open, one lock, one stat. A miss adds one HEAD, a CRC-32 of the bytes as
        they pass, and a listing of the directory. No process, no thread until `prefetch`.

    Guarantee:
        The directory never holds more than `max_bytes`, not even for an instant. A file
        that was handed out stays readable whatever happens to the cache. After kill -9 of
        any process, others go on at once, no partial object is ever served, and the next
        process removes what is left; after a power loss, objects are checked against their
        digest before they are used. Objects that do not fit, and all misses while the disk
        is full or read-only, pass through a file without a name in `TMPDIR`, which is
        outside the budget. Where the file system has no working locks, bytes are still
        right, but downloads may be repeated and the budget is not kept.

    Raises:
        CacheWriteError: The directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        min_free_bytes: int | None = None,
        timeout_s: float = 30.0,
        revalidate: Revalidate = "start",
        storage_options: Mapping[str, Any] | None = None,
        store: Store | None = None,
        policy: EvictionPolicy | None = None,
        job_started_ns: int | None = None,
    ) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ConfigError(f"max_bytes must be positive, got {max_bytes}")
        if timeout_s <= 0:
            raise ConfigError(f"timeout_s must be positive, got {timeout_s}")
        if revalidate not in get_args(Revalidate):
            raise ConfigError(
                f"revalidate must be one of {', '.join(get_args(Revalidate))}, got {revalidate!r}"
            )
        self._directory = str(Path(directory).absolute())
        self._max_bytes = max_bytes
        self._min_free_bytes = min_free_bytes
        self._timeout_s = timeout_s
        self._revalidate = revalidate
        self._storage_options = storage_options
        self._given_store = store
        self._policy = policy or KeepUntilFull()
        self._started_ns = job_started_ns
        self._prepare()
        try:
            self._disk.create()
            self._register()
        except OSError as error:
            raise CacheWriteError(
                f"the cache directory {self._directory} cannot be used: {error}; "
                "choose a writable directory on a local disk, or none"
            ) from error
        if not self._disk.locks_work:
            _log.warning(
                "file locks do not work in %s: downloads may be repeated and the budget is not "
                "kept; use a directory on a local disk",
                self._directory,
            )

    def _prepare(self) -> None:
        """Set what belongs to this process alone."""
        self._disk = CacheDirectory(
            self._directory,
            max_bytes=self._max_bytes,
            min_free_bytes=self._min_free_bytes,
            timeout_s=max(self._timeout_s, 10.0),
            policy=self._policy,
        )
        self._stores: dict[str, Store] = {}
        self._closed = False
        self._keys: dict[str, str] = {}
        self._warned: set[str] = set()
        self._opener = Opener(
            self._disk,
            self._store,
            revalidate=self._revalidate,
            timeout_s=self._timeout_s,
            started_ns=self._started_ns,
        )
        self._reset()

    def _reset(self) -> None:
        """Forget what a fork does not carry over: threads, locks held, counters."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._opener.counters = Counters()
        self._session: Session | None = None
        self._retry_at = 0.0
        self._prefetcher: Prefetcher | None = None

    def _register(self) -> None:
        with self._lock:
            if self._session is not None:
                return
            try:
                self._session = self._disk.open_session(self._started_ns)
            except FileNotFoundError:  # unpickled on another node, or somebody removed it
                self._disk.create()
                self._session = self._disk.open_session(self._started_ns)
            self._started_ns = self._opener.started_ns = self._session.started_ns
            weakref.finalize(self, self._session.close)  # a cache that nobody closed

    def _leave(self) -> None:
        with self._lock:
            session, self._session = self._session, None
        if session is not None:
            session.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, f"_{name}") for name in _PICKLED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, f"_{name}", value)
        self._prepare()

    def __repr__(self) -> str:
        return f"ShardCache({self._directory!r}, max_bytes={self._max_bytes})"

    @property
    def directory(self) -> str:
        """The directory given, as an absolute path."""
        return self._directory

    @property
    def job_started_ns(self) -> int | None:
        """When this job began to use the cache; what `revalidate="start"` compares with."""
        return self._started_ns

    @property
    def max_bytes(self) -> int | None:
        """The limit given."""
        return self._max_bytes

    def open(self, url: str | os.PathLike[str]) -> BinaryIO:
        """Open an object for reading, downloading it first if it is not here.

        The file is a real one: it can be mapped, and its descriptor passed on. While it or a
        map of it is open, the object is not evicted. A local path or `file://` URL is opened
        where it is, never copied.

        Raises:
            ShardNotFoundError: There is no such object.
            FetchError: The origin did not deliver one complete version after all retries.
            ClosedError: After `close()`.
        """
        self._enter()
        text = strip_protocol(url)
        path = local_path(text)
        if path is not None:
            return open_local(path)
        with stage(S.DATA_CACHE):
            key = self._key(text)
            file, version = self._open_cached(key, text)
            if file is not None:
                return file
            file, num_bytes = private_copy(self._store(text), text, version)
            self._opener.counters.add(num_bypassed=1, bytes_bypassed=num_bytes)
            if version is not None:
                self._warn_once(
                    "no room in %s for %s (%d bytes): what does not fit passes through each time",
                    *(self._directory, redact(text), num_bytes),
                )
            return file

    def contains(self, url: str | os.PathLike[str]) -> bool:
        """Say whether `url` is in the directory (any version; local files: exist)."""
        self._enter()
        text = strip_protocol(url)
        path = local_path(text)
        if path is not None:
            return Path(path).exists()
        return bool(self._disk.lookup(self._key(text)))

    def prefetch(self, urls: Iterable[str | os.PathLike[str]]) -> None:
        """Download in the background, in this order, what is not here and fits.

        Two threads at most; returns at once. An error is raised by the next call into the
        cache. What does not fit is skipped.
        """
        self._enter()
        texts = [strip_protocol(url) for url in urls]
        remote = [text for text in texts if local_path(text) is None]
        with self._lock:
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._prefetch_one)
            self._prefetcher.add(remote)

    def stats(self) -> CacheStats:
        """Return the counters of this process and the state of the directory."""
        self._enter()
        try:
            reserved = self._disk.reserved_bytes()
        except OSError:
            reserved = 0
        return self._opener.counters.stats(
            bytes_used=self._disk.used_bytes(),
            bytes_reserved=reserved,
            degraded=self._is_degraded(),
        )

    def verify(self) -> VerifyReport:
        """Read every object and remove those whose bytes do not match their digest.

        Raises:
            CacheWriteError: A damaged object cannot be removed.
        """
        self._enter()
        checked = num_bytes = 0
        removed = []
        for name in self._disk.residents():
            file = self._disk.open(name)
            if file is not None:
                with file:
                    good = crc_of(file) == name.crc
            elif name in self._disk.lookup(name.key):
                good = False
            else:
                continue  # evicted meanwhile
            checked += 1
            num_bytes += name.num_bytes
            if not good:
                try:
                    self._opener.discard(name)
                except OSError as error:
                    raise CacheWriteError(
                        f"{self._directory} holds a damaged object, {name}, that cannot be "
                        f"removed: {error}"
                    ) from error
                removed.append(str(name))
        return VerifyReport(num_objects=checked, num_bytes=num_bytes, removed=tuple(removed))

    def close(self) -> None:
        """Stop prefetching and leave; safe to call twice. Files handed out stay open.

        Raises:
            TrainpathError: A prefetch failed and no call has said so yet.
        """
        if self._closed:
            return
        self._closed = self._opener.closed = True
        prefetcher, self._prefetcher = self._prefetcher, None
        if self._pid == os.getpid():
            if prefetcher is not None:
                prefetcher.close(timeout_s=2 * self._timeout_s)
            self._leave()
        for store in self._stores.values():
            close = getattr(store, "close", None)
            if close is not None and store is not self._given_store:
                close()
        if prefetcher is not None and self._pid == os.getpid():
            prefetcher.raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _enter(self) -> None:
        if self._closed:
            raise ClosedError(f"the cache in {self._directory} is closed")
        if self._pid != os.getpid():
            self._reset()
        if self._prefetcher is not None:
            self._prefetcher.raise_error()

    def _key(self, url: str) -> str:
        key = self._keys.get(url)
        if key is None:
            key = self._keys[url] = self._new_key(url)
        return key

    def _new_key(self, url: str) -> str:
        options = self._storage_options or {}
        client = options.get("client_kwargs") or {}
        endpoint = options.get("endpoint_url") or client.get("endpoint_url") or ""
        return digest(f"{endpoint}\n{canonical_url(url)}")

    def _store(self, url: str) -> Store:
        if self._given_store is not None:
            return self._given_store
        scheme = url.partition(":")[0].lower()
        if scheme not in self._stores:
            self._stores[scheme] = store_for(
                url, storage_options=self._storage_options, timeout_s=self._timeout_s
            )
        return self._stores[scheme]

    def _open_cached(
        self, key: str, url: str
    ) -> tuple[BinaryIO | None, tuple[int, str | None] | None]:
        """Open an object in the directory, getting it there first.

        Returns:
            The open file, or None if it must pass through, then with its version if known.
        """
        try:
            file = self._opener.hit(key)
            if file is not None or self._is_degraded():
                return file, None
            self._register()
            return self._opener.fill(key, url)
        except DeadlineError as error:
            _log.warning("%s; downloading %s past the cache", error, redact(url))
        except TrainpathError:
            raise
        except (OSError, DiskError) as error:
            self._degrade(error)
        return None, None

    def _prefetch_one(self, url: str) -> None:
        key = self._key(url)
        if self._disk.lookup(key) and self._revalidate != "open":
            return  # its version is checked when it is opened
        try:
            file, _ = self._open_cached(key, url)
        except ClosedError:
            return
        if file is not None:
            file.close()

    def _is_degraded(self) -> bool:
        return time.monotonic() < self._retry_at

    def _degrade(self, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):  # somebody removed the directory: make it again
            self._leave()
            return
        self._retry_at = time.monotonic() + _PROBE_AGAIN_S
        self._warn_once(
            "the cache in %s cannot be written (%s): what is not in it passes through until it can",
            *(self._directory, error),
        )

    def _warn_once(self, message: str, *arguments: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message, *arguments)


def open_local(path: str) -> BinaryIO:
    """Open a local file where it is."""
    try:
        return Path(path).open("rb")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ShardNotFoundError(f"{path} does not exist") from error
    except OSError as error:
        raise FetchError(f"{path} cannot be read: {error.strerror}") from error
