"""Flat buckets: which gradients travel together, and the memory they travel in."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Bucket", "Verdict", "assign"]

# How many ranks' backward failed, and the sum of their numbers in two digits: bfloat16, which
# a bucket may be in, holds whole numbers up to 256 only.
_TRAILER = 3
_DIGIT = 128


def assign(
    order: Sequence[int], parameters: Sequence[Tensor], *, first_cap_bytes: int, cap_bytes: int
) -> list[list[int]]:
    """Cut `order` into buckets of one dtype and device each.

    Args:
        order: Indices of parameters, in the order in which their gradients become ready.
        parameters: All parameters.
        first_cap_bytes: A bucket closes when it holds at least this much: the first one ...
        cap_bytes: ... and all others. No gradient is split.

    Returns:
        Indices per bucket, in the order of launch: that in which the buckets become full.
        There is at least one bucket, possibly empty.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    closed: list[list[int]] = []
    for index in order:
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        open_buckets.setdefault(key, []).append(index)
        sizes[key] = sizes.get(key, 0) + parameter.numel() * parameter.element_size()
        if sizes[key] >= (cap_bytes if closed else first_cap_bytes):
            closed.append(open_buckets.pop(key))
            del sizes[key]
    position = {index: place for place, index in enumerate(order)}
    closed += open_buckets.values()
    closed.sort(key=lambda members: position[members[-1]])
    return closed or [[]]


class Verdict:
    """Whether the backward of any rank failed; on CUDA known a moment later.

    Args:
        numbers: How many ranks failed, and the sums of the two digits of their numbers.
        event: When `numbers` are there; None: they are.
    """

    __slots__ = ("_event", "_numbers")

    def __init__(self, numbers: Tensor | None, event: torch.cuda.Event | None) -> None:
        self._numbers = numbers
        self._event = event

    @classmethod
    def good(cls) -> Verdict:
        """Return the verdict that nothing failed."""
        return cls(None, None)

    def is_known(self) -> bool:
        """Whether `failure()` returns without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def failure(self) -> str | None:
        """Return who failed, or None; waits for the copy from the device."""
        if self._numbers is None:
            return None
        if self._event is not None:
            self._event.synchronize()
        count, high, low = (round(number) for number in self._numbers.tolist())
        if not count:
            return None
        return f"rank {_DIGIT * high + low}" if count == 1 else f"{count} ranks"


class Bucket:
    """The gradients of some parameters in one flat tensor.

    Behind the gradients it carries one element for each of them (how many ranks have used
    the parameter) and three for failures, so that neither needs a collective of its own.

    Args:
        members: Indices of its parameters.
        parameters: All parameters.
        device: Where an empty bucket lives.

    Cost:
        One copy of the gradients' memory.
    """

    __slots__ = ("_failed", "_used", "device", "flat", "members", "views")

    def __init__(
        self, members: Sequence[int], parameters: Sequence[Tensor], *, device: torch.device
    ) -> None:
        self.members = tuple(members)
        mine = [parameters[index] for index in members]
        self.device = mine[0].device if mine else device
        numel = sum(parameter.numel() for parameter in mine)
        dtype = mine[0].dtype if mine else torch.float32
        self.flat = torch.zeros(numel + len(mine) + _TRAILER, dtype=dtype, device=self.device)
        self.views: list[Tensor] = []
        offset = 0
        for parameter in mine:
            self.views.append(
                self.flat.as_strided(parameter.shape, _dense_stride(parameter), offset)
            )
            offset += parameter.numel()
        self._used = self.flat[offset : offset + len(mine)]
        self._failed = self.flat[offset + len(mine) :]

    @property
    def num_bytes(self) -> int:
        """Length in bytes."""
        return self.flat.numel() * self.flat.element_size()

    @torch.no_grad()
    def load(
        self, parameters: Sequence[Tensor], names: Sequence[str], used: bytearray, *, scale: float
    ) -> None:
        """Copy in the gradients, multiplied by `scale` (as DDP does, for equal bits)."""
        views: list[Tensor] = []
        gradients: list[Tensor] = []
        for index, view in zip(self.members, self.views, strict=True):
            gradient = parameters[index].grad
            if gradient is None:
                view.zero_()
                continue
            if gradient.layout is not torch.strided:
                raise ConfigError(
                    f"the gradient of {names[index]!r} is sparse, which is not supported; build "
                    "the embedding with sparse=False"
                )
            views.append(view)
            gradients.append(gradient)
        if self.device.type == "cpu":
            # One pass over the memory; on an accelerator one launch matters more.
            for view, gradient in zip(views, gradients, strict=True):
                torch.mul(gradient, scale, out=view)
        elif views:
            torch._foreach_copy_(views, gradients)
            self.flat.mul_(scale)
        flags = [used[index] for index in self.members]
        if all(flags):
            self._used.fill_(1)
        else:
            self._used.copy_(torch.tensor(flags, dtype=torch.float32))
        self._failed.zero_()

    @torch.no_grad()
    def load_failure(self, rank: int) -> None:
        """Fill the bucket with the news that the backward of `rank` failed."""
        self.flat.zero_()
        self._failed.copy_(torch.tensor([1, *divmod(rank, _DIGIT)]))

    def verdict(self) -> Verdict:
        """Return what the reduced bucket says about failures, without waiting for the device."""
        failed = self._failed.real if self._failed.is_complex() else self._failed
        if self.device.type != "cuda":
            return Verdict(failed.cpu(), None)
        host = torch.empty(_TRAILER, dtype=failed.dtype, pin_memory=True)
        host.copy_(failed, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Verdict(host, event)

    @torch.no_grad()
    def store(self, parameters: Sequence[Tensor], used: bytearray) -> None:
        """Write the reduced gradients back; where no rank used a parameter nothing changes."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for place, (index, view) in enumerate(zip(self.members, self.views, strict=True)):
            parameter = parameters[index]
            if not used[index] and self._used[place] == 0:
                continue
            if parameter.grad is None:
                parameter.grad = view.clone()
            else:
                targets.append(parameter.grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of `parameter` without gaps, so that copying is sequential."""
    strides = parameter.stride()
    by_stride = sorted(range(parameter.dim()), key=lambda dim: (-strides[dim], dim))
    stride = [1] * parameter.dim()
    for place, dim in enumerate(by_stride):
        inner = by_stride[place + 1 :]
        stride[dim] = math.prod(parameter.shape[other] for other in inner)
    return tuple(stride)
