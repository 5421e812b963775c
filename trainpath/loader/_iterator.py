"""What `iter(loader)` returns, and what stands where torch has a sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainpath.loader._passes import InlinePass, WorkerPass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainpath.loader.loader import DataLoader
    from trainpath.loader.order import ShardOrder

__all__ = ["LoaderIterator", "RunningPass", "ShardSampler"]

RunningPass = InlinePass | WorkerPass


class ShardSampler:
    """Stands where torch has a sampler when the loader plans the order of shards itself."""

    def __init__(self, order: ShardOrder, set_epoch: Callable[[int], None]) -> None:
        self.order = order
        self.seed = order.seed
        self._set_epoch = set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader, as its own `set_epoch` does."""
        self._set_epoch(epoch)


class LoaderIterator:
    """The batches of one epoch; after a resume at its very end, of the next one.

    Args:
        loader: Whose batches these are.
        running: The pass that makes them.
        goes_on: Whether an empty pass is followed by the next epoch at once.
    """

    def __init__(self, loader: DataLoader, running: RunningPass, *, goes_on: bool) -> None:
        self._loader = loader
        self.running: RunningPass | None = running
        self._goes_on = goes_on

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        running = self.running
        if running is None:
            raise StopIteration
        try:
            batch = running.next()
        except StopIteration:
            if not self._goes_on or running.num_delivered:
                self.running = None
                self._loader.finish(self, running)
                raise
            self._goes_on = False
            self.running = self._loader.go_on(self, running)
            return next(self)
        return self._loader.pinned(batch)
