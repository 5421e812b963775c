"""The protocols that trainpath accepts from users and between its own parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Sink", "Stateful", "Store", "Tier"]


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be checkpointed: the contract of loader, cache, reducer and checkpoint.

    The same two methods as `torch.distributed.checkpoint.stateful.Stateful`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state; taking it must not change what happens next."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Continue from `state_dict` as if never interrupted."""
        ...


@runtime_checkable
class Sink(Protocol):
    """A destination for per-step metrics (JSONL, TensorBoard, W&B, ...)."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of one step; must not block the caller for I/O."""
        ...

    def close(self) -> None:
        """Flush and release; safe to call twice."""
        ...


class Store(Protocol):
    """A read-only object store: where shards come from."""

    def size(self, url: str) -> tuple[int, str | None]:
        """Return the length in bytes and the version tag (ETag) of an object.

        Raises:
            ShardNotFoundError: There is no such object.
            FetchError: The origin did not answer properly after all retries.
        """
        ...

    def fetch(self, url: str, destination: BinaryIO, *, etag: str | None) -> int:
        """Write the whole object to `destination` and return its length in bytes."""
        ...


class Tier(Protocol):
    """One level of the cache hierarchy: keeps immutable objects by key."""

    def open(self, key: str) -> BinaryIO | None:
        """Return the object opened for reading, or None if this tier does not hold it."""
        ...
