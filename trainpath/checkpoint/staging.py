"""The image of this rank's data file in memory, filled while the model computes."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import torch

from trainpath.checkpoint.layout import anonymous_file

if TYPE_CHECKING:
    from trainpath.checkpoint.layout import Plan

__all__ = ["Image", "copy_into"]


class Image:
    """One data file, complete but for its payloads and their checksums.

    The memory belongs to a nameless file, so that the writer process maps the same pages;
    it is reused by every save of the same plan.

    Attributes:
        fd: The descriptor to hand to the writer.
        size: Length of the file in bytes.
        payloads: (offset, length, positions of the CRC) of each payload, in file order.
        views: For each slot of this rank, the tensor to copy into.

    Cost:
        As many bytes as this rank writes, allocated at the first save.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        slots = plan.slots[rank]
        self.size = plan.sizes[rank]
        self.fd = anonymous_file()
        self.views: list[torch.Tensor] = []
        self.payloads = [
            (slot.payload_at, slot.frame.num_bytes, [slot.offset + at for at in slot.frame.crc_at])
            for slot in slots
        ]
        self._slots = slots
        self._open = True
        if self.size:
            os.ftruncate(self.fd, self.size)
            self._map(plan)

    def _map(self, plan: Plan) -> None:
        memory = mmap.mmap(self.fd, self.size)
        flat = torch.frombuffer(memory, dtype=torch.uint8)
        for slot in self._slots:
            frame = slot.frame
            end = slot.payload_at + frame.num_bytes
            memory[slot.offset : slot.payload_at] = frame.head
            memory[end : end + len(frame.tail)] = frame.tail
            dtype, shape = plan.kinds[slot.leaf]
            payload = flat[slot.payload_at : end]
            view = payload.view(dtype) if frame.num_bytes else torch.empty(0, dtype=dtype)
            self.views.append(view.view(shape))

    def close(self) -> None:
        """Let the memory go (the writer keeps its own hold); safe to call twice."""
        if self._open:
            self._open = False
            self.views.clear()
            os.close(self.fd)


def copy_into(view: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy `tensor` into `view`, without the GIL and without more threads where possible.

    On CPU, `Tensor.copy_` from a second thread would start a second OpenMP team beside the
    one that computes.
    """
    source = tensor.detach()
    num_bytes = view.numel() * view.element_size()
    if not num_bytes:
        return
    if source.device.type == "cpu" and source.is_contiguous() and not source.is_neg():
        if source.is_conj():
            source = source.resolve_conj()
        ctypes.memmove(view.data_ptr(), source.data_ptr(), num_bytes)
        return
    with torch.no_grad():
        view.copy_(source)
