"""What a sharded data set offers so that the loader can plan its order itself."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["ShardedSource"]


@runtime_checkable
class ShardedSource(Protocol):
    """A map-style data set over shards whose sizes are found out as they are reached.

    Its keys are pairs (shard, sample in it). The loader deals them over ranks and workers;
    the data set never looks at ranks.

    Attributes:
        num_shards: How many shards there are.
        shuffle_window: Shards whose samples are mixed when shuffling.
        ahead: Windows to fetch and index ahead of need.
    """

    num_shards: int
    shuffle_window: int
    ahead: int

    def known_count(self, shard: int) -> int | None:
        """Return how many samples a shard holds if that is known, without any work."""
        ...

    def count(self, shard: int) -> int:
        """Return how many samples a shard holds, fetching and indexing it if needed."""
        ...

    def learn(self, shard: int, count: int) -> None:
        """Remember the count that another process found out."""
        ...

    def __getitems__(self, keys: list[Any], /) -> list[Any]:
        """Return the samples of these keys."""
        ...
