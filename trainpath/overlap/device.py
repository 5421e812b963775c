"""Copies batches to the device while the step before computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from trainpath.errors import ConfigError
from trainpath.metrics import NULL_CLOCK
from trainpath.metrics import segments as S
from trainpath.overlap.ahead import ReadAhead, read_ahead, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainpath.metrics import StepClock

__all__ = ["DevicePrefetcher"]


class DevicePrefetcher(ReadAhead):
    """Yields the batches of `source` on `device`, copied ahead on a side stream.

    On a CPU device it yields the batches of `source` untouched. On CUDA each batch is
    pinned (unless it is already) and copied on a stream of its own; the consumer's stream
    waits for the copy's event, the host does not. The CUDA path is written but has not
    been run on a GPU yet.

    Args:
        source: Any iterable of (nested) tensors. If it is stateful, so is the prefetcher:
            the state is that of the last batch delivered, not of the last one copied.
        device: Where the batches go.
        depth: How many batches may be on the device ahead of the consumer.
        clock: Charged `h2d` for the time the step thread spends on copies.

    Cost:
        Device memory for `depth` batches besides those the consumer holds, and as much
        pinned host memory.

    Guarantee:
        Same batches, same order; an error of the source is raised at its position. A batch
        is never reused while the consumer's stream may still read it (`record_stream`).
    """

    def __init__(
        self,
        source: Iterable[Any],
        device: torch.device | str,
        *,
        depth: int = 2,
        clock: StepClock | None = None,
    ) -> None:
        if depth < 1:
            raise ConfigError(f"depth must be at least 1, got {depth}")
        super().__init__(source)
        self.device = torch.device(device)
        self.clock = clock or NULL_CLOCK
        self._depth = depth

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            return iter(self.source)
        return self._iterate_cuda()

    def _iterate_cuda(self) -> Iterator[Any]:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._state = state_of(self.source)
        copies = read_ahead(self.source, self._depth, lambda batch: self._copy(batch, stream))
        for batch, copied, self._state in copies:
            previous = self.clock.switch(S.H2D)
            consumer = torch.cuda.current_stream(self.device)
            consumer.wait_event(copied)
            for tensor in tree_leaves(batch):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(consumer)
            self.clock.switch(previous)
            yield batch
        self._state = None

    def _copy(
        self, batch: Any, stream: torch.cuda.Stream
    ) -> tuple[Any, torch.cuda.Event, dict[str, Any] | None]:
        previous = self.clock.switch(S.H2D)
        with torch.cuda.stream(stream):
            moved = tree_map_only(torch.Tensor, self._to_device, batch)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(stream)
        self.clock.switch(previous)
        return moved, copied, state_of(self.source)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)
