"""Making one batch: fetch its samples, collate them, and say which stage that was."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data._utils import collate as torch_collate

from trainpath.loader.transport import INLINE_BYTES
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainpath.loader.order import StreamStart
    from trainpath.loader.transport import SharedBuffers

__all__ = ["END_OF_STREAM", "EndOfStream", "MapFetcher", "StreamFetcher", "collate_into"]


def collate_into(collate_fn: Callable[[Any], Any], shared: SharedBuffers) -> Callable[[Any], Any]:
    """Return `collate_fn`, writing large batches where they can be sent from without a copy.

    Only torch's `default_collate` is rewritten, and only where it puts its result: torch's
    own makes a shared memory file for every tensor, however small.
    """
    if collate_fn is not torch_collate.default_collate:
        return collate_fn

    def stack(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if (
            type(first) is not torch.Tensor
            or first.layout is not torch.strided
            or first.device.type != "cpu"
            or first.requires_grad
            or first.is_nested
        ):
            return torch_collate.collate_tensor_fn(batch, collate_fn_map=collate_fn_map)
        length = len(batch) * first.nbytes
        if length <= INLINE_BYTES:
            return torch.stack(batch, 0)
        memory = torch.frombuffer(shared.allocate(length), dtype=first.dtype)
        return torch.stack(batch, 0, out=memory.view(len(batch), *first.shape))

    functions = {**torch_collate.default_collate_fn_map, torch.Tensor: stack}
    return partial(torch_collate.collate, collate_fn_map=functions)


class EndOfStream:
    """Stands for the batch that an exhausted iterable dataset did not give."""

    def __reduce__(self) -> str:
        return "END_OF_STREAM"


END_OF_STREAM: Final = EndOfStream()


class MapFetcher:
    """Batches of a map-style dataset, fetched exactly as torch's DataLoader does."""

    def __init__(self, dataset: Any, *, batched: bool, collate_fn: Callable[[Any], Any]) -> None:
        self._dataset = dataset
        self._batched = batched
        self._collate_fn = collate_fn
        self._get_items = getattr(dataset, "__getitems__", None)

    def fetch(self, index: Any, switch: Callable[[int], int]) -> Any:
        """Return the batch of `index` (a list of keys, or one key if not batched)."""
        switch(S.DATA_DECODE)
        if not self._batched:
            data = self._dataset[index]
        elif self._get_items:
            data = self._get_items(index)
        else:
            data = [self._dataset[key] for key in index]
        switch(S.DATA_COLLATE)
        return self._collate_fn(data)

    def state(self) -> None:
        """Return nothing: the position of a map-style dataset is kept by the planner."""
        return


class StreamFetcher:
    """Batches of an iterable dataset, in the order of its iterator.

    Args:
        dataset: The iterable dataset (this worker's copy).
        batched: Whether samples are collated to batches.
        collate_fn: Makes the batch.
        drop_last: Whether a short last batch is dropped.
        start: Where to start: a state of the dataset, or samples to read and drop.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batched: bool,
        collate_fn: Callable[[Any], Any],
        drop_last: bool,
        start: StreamStart,
    ) -> None:
        self._dataset = dataset
        self._batched = batched
        self._collate_fn = collate_fn
        self._drop_last = drop_last
        self._ended = False
        state = start.state
        if state is not None and "dataset" in state:
            dataset.load_state_dict(state["dataset"])
        self._iterator: Iterator[Any] = iter(dataset)
        if state is not None and "iterator" in state:
            self._iterator.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        elif state is None:
            self._skip(start.skip_samples)

    def _skip(self, num_samples: int) -> None:
        for _ in range(num_samples):
            try:
                next(self._iterator)
            except StopIteration:
                self._ended = True
                return

    def fetch(self, index: Any, switch: Callable[[int], int]) -> Any:
        """Return the next batch, or `END_OF_STREAM`."""
        if self._ended:
            return END_OF_STREAM
        switch(S.DATA_DECODE)
        if not self._batched:
            try:
                data = next(self._iterator)
            except StopIteration:
                self._ended = True
                return END_OF_STREAM
        else:
            data = []
            for _ in index:
                try:
                    data.append(next(self._iterator))
                except StopIteration:
                    self._ended = True
                    break
            if not data or (self._drop_last and len(data) < len(index)):
                return END_OF_STREAM
        switch(S.DATA_COLLATE)
        return self._collate_fn(data)

    def state(self) -> dict[str, Any] | None:
        """Return the dataset's own state after the last batch, None if it keeps none."""
        if _is_stateful(self._iterator):
            return {"iterator": self._iterator.state_dict()}  # type: ignore[attr-defined]
        if _is_stateful(self._dataset):
            return {"dataset": self._dataset.state_dict()}
        return None


def _is_stateful(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
