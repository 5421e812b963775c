"""The node-local shard cache: each remote shard crosses the network once per node.

Use it directly, or by the prefix `trainpath::` where `TRAINPATH_CACHE_DIR` is set::

    with ShardCache("/local/ssd/shards", max_bytes=200 << 30) as cache:
        with cache.open("https://store/corpus-0000.tar") as file:
            header = file.read(512)

    with fsspec.open("trainpath::https://store/corpus-0000.tar") as file:
        header = file.read(512)
"""

from __future__ import annotations

import fsspec as _fsspec

from trainpath.cache.environment import open_url, shared_cache
from trainpath.cache.eviction import EvictionPolicy, KeepUntilFull, Resident
from trainpath.cache.fetch import FsspecStore
from trainpath.cache.filesystem import TrainpathFileSystem
from trainpath.cache.http_store import HttpStore
from trainpath.cache.shard_cache import ShardCache
from trainpath.cache.stats import CacheStats, VerifyReport
from trainpath.cache.webdataset_opener import register_webdataset

__all__ = [
    "CacheStats",
    "EvictionPolicy",
    "FsspecStore",
    "HttpStore",
    "KeepUntilFull",
    "Resident",
    "ShardCache",
    "TrainpathFileSystem",
    "VerifyReport",
    "open_url",
    "register_webdataset",
    "shared_cache",
]

_fsspec.register_implementation("trainpath", TrainpathFileSystem, clobber=True)
