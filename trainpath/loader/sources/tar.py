"""WebDataset tars as a map-style data set that the loader plans shard by shard."""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from torch.utils.data import Dataset

from trainpath.cache import open_url
from trainpath.cache.names import local_path
from trainpath.errors import ConfigError, DecodeError, ShardCorruptError, ShardNotFoundError
from trainpath.loader.sources._decode import AutoDecoder
from trainpath.loader.sources._index import SampleEntry, index_tar
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trainpath.cache import ShardCache

__all__ = ["TarDataset"]

_MIN_OPEN_SHARDS: Final = 8


class _Shard(NamedTuple):
    data: mmap.mmap
    entries: list[SampleEntry]


class TarDataset(Dataset[Any]):
    """Samples of WebDataset tar shards, by any path or fsspec URL.

    Under `trainpath.loader.DataLoader` no shard is touched before the plan reaches it: the
    first batch waits for one shard only, later ones are fetched and indexed ahead by the
    workers. `shuffle=True` permutes the shards and the samples inside each window of
    `shuffle_window` shards. The samples are dealt over ranks and workers by the loader:
    no `split_by_node`, no equal numbers of shards per rank.

    Under any other loader it is a plain map-style data set; call `index()` once to know
    all counts, which `len()` and torch's samplers need.

    Args:
        urls: Path or URL with braces (`"s3://b/train-{000..099}.tar"`), or a list of such.
        cache: Where remote shards are kept, shared by all processes of the node. Without
            one each process that needs a remote shard downloads it to an unlinked
            temporary file.
        decode: `"auto"` decodes by extension as webdataset does; None leaves bytes; a
            callable gets the sample with bytes and returns what the loader collates.
        fields: Extensions to read (`"jpg;png"` for the first that exists). The sample is
            then a tuple of them, unless `decode` is a callable.
        image: How `"auto"` decodes images, in webdataset's words (`"pil"`, `"torchrgb8"`).
        allow_pickle: Let `"auto"` unpickle members; only for shards you trust.
        shuffle_window: Shards whose samples are mixed.
        ahead: Windows fetched and indexed ahead of need.
        storage_options: For fsspec, where there is no cache.

    Raises:
        ConfigError: No URL, or an option that makes no sense.
        ShardNotFoundError: A local shard does not exist (remote ones: when reached).

    Cost:
        Per process the maps and indexes of at most `max(8, 2 * shuffle_window + ahead + 2)`
        shards: about 300 bytes per member, no copy of the data but the page cache.

    Guarantee:
        A shard that is missing, cut, compressed or not a tar raises one error that names it.
    """

    def __init__(
        self,
        urls: str | Iterable[str],
        *,
        cache: ShardCache | None = None,
        decode: Callable[[dict[str, Any]], Any] | str | None = "auto",
        fields: Sequence[str] | None = None,
        image: str = "pil",
        allow_pickle: bool = False,
        shuffle_window: int = 1,
        ahead: int = 2,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.urls = _expand(urls)
        self.num_shards = len(self.urls)
        if shuffle_window < 1 or ahead < 0:
            raise ConfigError("shuffle_window must be at least 1 and ahead at least 0")
        self.shuffle_window = shuffle_window
        self.ahead = ahead
        self.cache = cache
        self._fields = None if fields is None else [field.lower().split(";") for field in fields]
        self._decode = _decoder(decode, image=image, allow_pickle=allow_pickle)
        self._as_tuple = fields is not None and not callable(decode)
        self._storage_options = dict(storage_options or {})
        self._counts: dict[int, int] = {}
        self._max_open = max(_MIN_OPEN_SHARDS, 2 * shuffle_window + ahead + 2)
        self._reset()

    def _reset(self) -> None:
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        self._lock = threading.Lock()
        self._opening: dict[int, threading.Lock] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_open", "_lock", "_opening"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def known_count(self, shard: int) -> int | None:
        """Return how many samples a shard holds if that is known, without any work."""
        return self._counts.get(shard)

    def learn(self, shard: int, count: int) -> None:
        """Remember the count that another process found out."""
        self._counts[shard] = count

    def count(self, shard: int) -> int:
        """Return how many samples a shard holds, fetching and indexing it if needed."""
        return len(self._shard(shard).entries)

    def index(self) -> TarDataset:
        """Fetch and index all shards, so that `len()` and integer keys work; return self."""
        for shard in range(self.num_shards):
            if shard not in self._counts:
                self.count(shard)
        return self

    def __len__(self) -> int:
        if len(self._counts) < self.num_shards:
            raise TypeError(
                f"the length is known only when all {self.num_shards} shards are indexed "
                f"({len(self._counts)} are); call index() to do that now"
            )
        return sum(self._counts.values())

    def __getitem__(self, key: int | tuple[int, int]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        """Return the samples of these keys, each an int or a pair (shard, sample in it)."""
        with stage(S.DATA_STORAGE):
            samples = [self._read(*self._locate(key)) for key in keys]
        with stage(S.DATA_DECODE):
            return [self._finish(sample) for sample in samples]

    def _locate(self, key: int | tuple[int, int]) -> tuple[int, int]:
        if isinstance(key, tuple):
            return key
        position = key
        if position < 0:
            position += len(self.index())
        for shard in range(self.num_shards if position >= 0 else 0):
            count = self._counts[shard] if shard in self._counts else self.count(shard)
            if position < count:
                return shard, position
            position -= count
        raise IndexError(f"sample {key} of a data set with {len(self)} samples")

    def _shard(self, shard: int) -> _Shard:
        with self._lock:
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
            opening = self._opening.setdefault(shard, threading.Lock())
        with stage(S.DATA_CACHE):  # another thread of this worker may be fetching it
            opening.acquire()
        try:
            with self._lock:
                if shard in self._open:
                    return self._open[shard]
            opened = self._map(self.urls[shard])
            with self._lock:
                self._open[shard] = opened
                self._counts[shard] = len(opened.entries)
                while len(self._open) > self._max_open:
                    self._open.popitem(last=False)
                self._opening.pop(shard, None)
        finally:
            opening.release()
        return opened

    def _map(self, url: str) -> _Shard:
        with stage(S.DATA_STORAGE):
            opened = open_url(url, cache=self.cache, storage_options=self._storage_options)
        with opened as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ShardCorruptError(f"shard {url} is empty (0 bytes); fetch or write it again")
            with stage(S.DATA_STORAGE):
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                return _Shard(data, index_tar(data, url))

    def _read(self, shard: int, number: int) -> dict[str, Any]:
        data, entries = self._shard(shard)
        if number >= len(entries):
            raise ShardCorruptError(
                f"shard {self.urls[shard]} holds {len(entries)} sample(s), but sample {number} was "
                "planned: it changed since it was indexed; start the job again"
            )
        key, members = entries[number]
        sample: dict[str, Any] = {"__key__": key, "__url__": self.urls[shard]}
        if self._fields is None:
            for extension, offset, size in members:
                sample[extension] = data[offset : offset + size]
            return sample
        by_extension = {member.extension: member for member in members}
        for names in self._fields:
            member = next((by_extension[name] for name in names if name in by_extension), None)
            if member is None:
                raise DecodeError(
                    f"sample {key} of shard {self.urls[shard]} has no field "
                    f"{' or '.join(names)}; it has {', '.join(by_extension)}"
                )
            sample[member.extension] = data[member.offset : member.offset + member.size]
        return sample

    def _finish(self, sample: dict[str, Any]) -> Any:
        if self._decode is not None:
            sample = self._decode(sample)
        if not self._as_tuple:
            return sample
        return tuple(value for name, value in sample.items() if not name.startswith("__"))


def _expand(urls: str | Iterable[str]) -> list[str]:
    from braceexpand import braceexpand  # noqa: PLC0415  (not needed where shards are listed)

    try:
        given = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
        expanded = [url for pattern in given for url in braceexpand(os.fspath(pattern))]
    except (TypeError, ValueError) as error:  # not a path, or braces that do not match
        raise ConfigError(
            f"urls={urls!r}: give a path or URL, braces are fine, or a list of such ({error})"
        ) from error
    if not expanded or not all(expanded):
        raise ConfigError("TarDataset got no shard URL; give at least one path or URL")
    missing = [url for url in expanded if (path := local_path(url)) and not Path(path).is_file()]
    if missing:
        raise ShardNotFoundError(
            f"{len(missing)} of {len(expanded)} shards do not exist, the first is {missing[0]}; "
            "check the path and its brace expansion"
        )
    return expanded


def _decoder(
    decode: Callable[[dict[str, Any]], Any] | str | None, *, image: str, allow_pickle: bool
) -> Callable[[dict[str, Any]], Any] | None:
    if decode is None or callable(decode):
        return decode
    if decode != "auto":
        raise ConfigError(f'decode={decode!r}: give "auto", None or a callable')
    return AutoDecoder(image=image, allow_pickle=allow_pickle)
