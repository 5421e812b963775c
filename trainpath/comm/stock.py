"""Torch DDP's own reducer on a model that stays unwrapped: the baseline of `observe`."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from trainpath._inert_hook import InertHook

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist
    from torch import nn

__all__ = ["StockReducer"]


class StockReducer:
    """Reduces the gradients of `model` by an ordinary `DistributedDataParallel`.

    The DDP object stays inside; hooks on the model run what its `forward` would run around
    the module. The arithmetic, the buckets and the communication are torch's.

    Args:
        model: The model, on its device; not wrapped.
        process_group: As for DDP.

    Guarantee:
        Gradients equal those of `DistributedDataParallel(model)` to the bit, and the
        model's `state_dict` keys stay as they are.
    """

    def __init__(self, model: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        self.ddp = DistributedDataParallel(model, process_group=process_group)
        self._handles = [
            model.register_forward_pre_hook(InertHook(self._before), with_kwargs=True),
            model.register_forward_hook(InertHook(self._after)),
        ]

    def _before(self, _model: nn.Module, args: Any, kwargs: Any) -> Any:
        return self.ddp._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]  # noqa: SLF001

    def _after(self, _model: nn.Module, _args: Any, output: Any) -> Any:
        return self.ddp._post_forward(output)  # type: ignore[no-untyped-call]  # noqa: SLF001

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally in the enclosed forward and backward passes."""
        with self.ddp.no_sync():
            yield

    def close(self) -> None:
        """Remove the hooks; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
