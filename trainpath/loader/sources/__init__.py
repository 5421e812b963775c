"""Where samples come from."""

from trainpath.loader.sources.sharded import ShardedSource
from trainpath.loader.sources.tar import TarDataset

__all__ = ["ShardedSource", "TarDataset"]
