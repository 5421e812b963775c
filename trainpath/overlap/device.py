"""Copies batches to the device while the step before computes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from trainpath.errors import ConfigError
from trainpath.metrics import NULL_CLOCK
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainpath.metrics import StepClock

__all__ = ["DevicePrefetcher"]


class DevicePrefetcher:
    """Yields the batches of `source` on `device`, copied ahead on a side stream.

    On a CPU device it yields the batches of `source` untouched. On CUDA each batch is
    pinned (unless it is already) and copied on a stream of its own; the consumer's stream
    waits for the copy's event, the host does not. The CUDA path has not yet been run on
    a GPU in this project's continuous integration.

    Args:
        source: Any iterable of (nested) tensors. If it is stateful, so is the prefetcher:
            the state is that of the last batch delivered, not of the last one copied.
        device: Where the batches go.
        depth: How many batches may be on the device ahead of the consumer.
        clock: Charged `h2d` for the time the step thread spends on copies.

    Cost:
        At most `depth` batches of device memory, and as much pinned host memory.

    Guarantee:
        Same batches, same order. A batch is never reused while the consumer's stream may
        still read it (`record_stream`).
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
        self.source = source
        self.device = torch.device(device)
        self.clock = clock or NULL_CLOCK
        self._depth = depth
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self.device.type != "cuda":
            return iter(self.source)
        return self._iterate_cuda()

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def _iterate_cuda(self) -> Iterator[Any]:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        ahead: deque[tuple[Any, torch.cuda.Event, dict[str, Any] | None]] = deque()
        source = iter(self.source)
        try:
            exhausted = False
            while True:
                while not exhausted and len(ahead) < self._depth:
                    try:
                        batch = next(source)
                    except StopIteration:
                        exhausted = True
                        break
                    ahead.append(self._copy(batch, stream))
                if not ahead:
                    return
                batch, copied, self._state = ahead.popleft()
                previous = self.clock.switch(S.H2D)
                consumer = torch.cuda.current_stream(self.device)
                consumer.wait_event(copied)
                for tensor in tree_leaves(batch):
                    if isinstance(tensor, torch.Tensor):
                        tensor.record_stream(consumer)
                self.clock.switch(previous)
                yield batch
        finally:
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
        return moved, copied, self._source_state()

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def _source_state(self) -> dict[str, Any] | None:
        take = getattr(self.source, "state_dict", None)
        return None if take is None else take()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the source as of the last batch delivered."""
        if self._state is not None:
            return self._state
        state = self._source_state()
        if state is None:
            raise ConfigError(f"{type(self.source).__name__} has no state_dict(), so nor has this")
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue from `state_dict`."""
        load = getattr(self.source, "load_state_dict", None)
        if load is None:
            raise ConfigError(f"{type(self.source).__name__} has no load_state_dict()")
        self._state = None
        load(state_dict)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the source, if it wants one."""
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def close(self) -> None:
        """Close the source, if it can be closed."""
        close = getattr(self.source, "close", None)
        if close is not None:
            close()
