"""One save on its way: what was captured, how it is staged and what the writer is told."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from trainpath.checkpoint.capture import digest
from trainpath.checkpoint.layout import record_bytes
from trainpath.checkpoint.metadata import index_piece, tensor_piece
from trainpath.checkpoint.staging import Image, copy_into

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainpath.checkpoint.capture import Part, Path
    from trainpath.checkpoint.handle import SaveHandle
    from trainpath.errors import CheckpointWriteError

__all__ = ["Generation", "Values", "pack_values"]


class Values:
    """The small values of one part, copied at the moment of `save()`.

    Args:
        part: Where they come from; tensors of modules and optimizers are not among them.
        num_ranks: With one rank there is nothing to compare, hence nothing to hash.
    """

    def __init__(self, part: Part, num_ranks: int) -> None:
        self.name = part.name
        if part.kind != "value":
            self.share = "first"
        else:
            self.share = "local" if part.rank_local else "auto"
        self._hashing = self.share == "auto" and num_ranks > 1
        self._hash = hashlib.sha256()
        self.items: list[tuple[Path, bytes | torch.Tensor]] = []
        for leaf in part.leaves:
            if leaf.is_tensor and part.kind != "value":
                continue
            self._add(leaf.path, leaf.value, is_tensor=leaf.is_tensor)

    def _add(self, path: Path, value: Any, *, is_tensor: bool) -> None:
        if is_tensor:
            copy = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            self.items.append((path, copy))
            return
        if self._hashing:
            self._hash.update(repr(path).encode() + digest(value))
        self.items.append((path, record_bytes(value)))

    def digest(self) -> str:
        """Return what the ranks compare to see whether their values are equal."""
        if self._hashing:
            for path, value in self.items:
                if isinstance(value, torch.Tensor):
                    self._hash.update(repr(path).encode() + digest(value))
            self._hashing = False
        return self._hash.hexdigest()


def pack_values(groups: Sequence[Values], file: str) -> tuple[bytes, dict[str, Any]]:
    """Return the data file of the small values, and what is where in it."""
    data = bytearray()
    described: dict[str, Any] = {}
    for group in groups:
        items = []
        for path, value in group.items:
            tensor = value if isinstance(value, torch.Tensor) else None
            record = value if isinstance(value, bytes) else record_bytes(value)
            entry = b"" if tensor is None else tensor_piece(tensor)
            items.append(
                {
                    "path": path,
                    "file": file,
                    "offset": len(data),
                    "length": len(record),
                    # Pieces of pickles travel in JSON one byte a character.
                    "entry": entry.decode("latin-1"),
                    "index": index_piece(tensor).decode("latin-1"),
                }
            )
            data += record
        described[group.name] = {"share": group.share, "digest": group.digest(), "items": items}
    return bytes(data), described


@dataclass(slots=True)
class Generation:
    """What one `save()` hands to the background.

    Attributes:
        handle: What the user holds.
        token: Names this very save, the same on every rank.
        image: The data file in memory; its early tensors are in it already.
        late: Views of the image with the live tensors to copy into them.
        values: The small values.
        began_ns: When `save()` was called.
        handed_over: Whether the writer was told.
        finished: Set when it is committed or failed, and the image is free again.
    """

    handle: SaveHandle
    token: str
    image: Image
    late: list[tuple[torch.Tensor, torch.Tensor]]
    values: list[Values]
    began_ns: int
    handed_over: bool = False
    finished: threading.Event = field(default_factory=threading.Event)
    _events: dict[torch.device, Any] = field(default_factory=dict)

    def mark_devices(self) -> None:
        """Remember where the streams of the training thread are now."""
        for device in {tensor.device for _, tensor in self.late if tensor.device.type == "cuda"}:
            self._events[device] = torch.cuda.current_stream(device).record_event()

    def stage(self) -> None:
        """Copy the late tensors into the image; stops when the save was given up."""
        for device, event in self._events.items():
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            with torch.cuda.stream(stream):
                self._copy(device)
            stream.synchronize()
        self._copy(None)
        self.late.clear()
        self.handle.staged_ns = time.monotonic_ns() - self.began_ns

    def _copy(self, device: torch.device | None) -> None:
        for view, tensor in self.late:
            if self.handle.staged.done:  # failed: the values may be changing already
                return
            if tensor.device == device or (device is None and tensor.device.type != "cuda"):
                copy_into(view, tensor)

    def fail(self, error: CheckpointWriteError) -> None:
        """Tell whoever waits that it failed."""
        self.handle.staged.settle(error)
        self.handle.durable.settle(error)
