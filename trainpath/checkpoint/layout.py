"""Where every tensor goes: which rank writes it, and where in that rank's file.

A data file of `torch.distributed.checkpoint` is a row of self-contained `torch.save`
records. What surrounds the payload of a record depends on dtype and shape only, so it is
produced once, by the running torch itself, and put around the payload's place in memory.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import os
import tempfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.serialization import skip_data

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainpath.checkpoint.capture import Leaf

__all__ = ["Frame", "Plan", "Slot", "anonymous_file", "frame", "make_plan", "record_bytes"]

# Torch aligns payloads to this inside a record; so must the records be inside the file.
_ALIGNMENT = 64
_DESCRIPTOR = b"PK\x07\x08"


@dataclass(frozen=True, slots=True)
class Frame:
    """What stands around the payload of a `torch.save` record.

    Attributes:
        head: Bytes before the payload.
        tail: Bytes after it.
        num_bytes: Length of the payload.
        crc_at: Where the zip format wants the payload's CRC-32, from the record's start.
    """

    head: bytes
    tail: bytes
    num_bytes: int
    crc_at: tuple[int, ...]

    @property
    def length(self) -> int:
        """Length of the whole record."""
        return len(self.head) + self.num_bytes + len(self.tail)


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one tensor in the image of one rank.

    Attributes:
        leaf: Index of the leaf among the tensors of the state.
        offset: Where its record starts in the file.
        frame: What surrounds the payload.
    """

    leaf: int
    offset: int
    frame: Frame

    @property
    def payload_at(self) -> int:
        """Where the payload starts in the file."""
        return self.offset + len(self.frame.head)


@dataclass(frozen=True, slots=True)
class Plan:
    """The same on every rank that holds the same state.

    Attributes:
        fingerprint: What it was made for.
        digest: Hash of the fingerprint; the ranks compare it at commit.
        kinds: For each tensor, its dtype and shape.
        slots: For each rank, what it writes.
        sizes: For each rank, the size of its image.
        homes: For each tensor, the (rank, slot index) that holds its bytes.
    """

    fingerprint: tuple[object, ...]
    digest: str
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    slots: tuple[tuple[Slot, ...], ...]
    sizes: tuple[int, ...]
    homes: tuple[tuple[int, int], ...]


def anonymous_file() -> int:
    """Return the descriptor of a file in memory that has no name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("trainpath-ckpt", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def record_bytes(value: object) -> bytes:
    """Return `value` as one `torch.save` record."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, shape: tuple[int, ...]) -> Frame:
    """Return what the running torch puts around a contiguous tensor of this kind."""
    fd = anonymous_file()
    try:
        with os.fdopen(os.dup(fd), "w+b") as file:
            with skip_data():  # leaves a hole for the payload: no memory, however large
                torch.save(torch.empty(shape, dtype=dtype), file)
            file.flush()
            return _cut(file)
    finally:
        os.close(fd)


def _cut(file: io.BufferedRandom) -> Frame:
    """Cut a record into what is before and after its payload, and find its CRC fields."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        index, entry = next(
            (index, entry)
            for index, entry in enumerate(entries)
            if entry.filename.endswith("/data/0")
        )
        directory = archive.start_dir
    head_length = _payload_start(file, entry.header_offset)
    size = entry.file_size
    file.seek(0)
    head = file.read(head_length)
    file.seek(head_length + size)
    tail = file.read()
    crc_at = []
    if entry.flag_bits & 8 and tail.startswith(_DESCRIPTOR):
        crc_at.append(head_length + size + 4)
    elif size:
        crc_at.append(entry.header_offset + 14)
    crc_at.append(_central_entry(tail, directory - head_length - size, index) + head_length + size)
    return Frame(head, tail, size, tuple(crc_at) if size else ())


def _payload_start(file: io.BufferedRandom, header: int) -> int:
    file.seek(header)
    local = file.read(30)
    name, extra = (int.from_bytes(local[at : at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra


def _central_entry(tail: bytes, at: int, index: int) -> int:
    """Return where the `index`-th entry of the central directory keeps its CRC."""
    for _ in range(index):
        lengths = (int.from_bytes(tail[at + n : at + n + 2], "little") for n in (28, 30, 32))
        at += 46 + sum(lengths)
    return at + 16


def make_plan(leaves: Sequence[Leaf], world_size: int, previous: Plan | None) -> Plan:
    """Divide the tensors over the ranks, balanced by bytes; reuse `previous` if it fits.

    Balanced leaves go, largest first, to the rank with the least so far; all others to
    rank 0. Tied tensors (same memory, shape and strides) are written once.

    Args:
        leaves: The tensors of the state, in the same order on every rank.
        world_size: How many ranks write.
        previous: The last plan.
    """
    owners = _owners(leaves)
    fingerprint = (
        world_size,
        *(
            (leaf.path, tuple(leaf.value.shape), leaf.value.dtype, leaf.balanced, owner)
            for leaf, owner in zip(leaves, owners, strict=True)
        ),
    )
    if previous is not None and previous.fingerprint == fingerprint:
        return previous
    ranks = _divide(leaves, owners, world_size)
    slots: list[list[Slot]] = [[] for _ in range(world_size)]
    ends = [0] * world_size
    homes: dict[int, tuple[int, int]] = {}
    for index in sorted(ranks):
        rank = ranks[index]
        tensor = leaves[index].value
        slot = Slot(index, ends[rank], frame(tensor.dtype, tuple(tensor.shape)))
        homes[index] = (rank, len(slots[rank]))
        slots[rank].append(slot)
        ends[rank] = -(-(slot.offset + slot.frame.length) // _ALIGNMENT) * _ALIGNMENT
    return Plan(
        fingerprint=fingerprint,
        digest=hashlib.sha256(repr(fingerprint).encode()).hexdigest(),
        kinds=tuple((leaf.value.dtype, tuple(leaf.value.shape)) for leaf in leaves),
        slots=tuple(map(tuple, slots)),
        sizes=tuple(ends),
        homes=tuple(homes[owner] for owner in owners),
    )


def _owners(leaves: Sequence[Leaf]) -> list[int]:
    """For each tensor, the index of the first one that shares all of its memory."""
    seen: dict[object, int] = {}
    owners = []
    for index, leaf in enumerate(leaves):
        tensor = leaf.value
        if tensor.numel() == 0:
            owners.append(index)
            continue
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        owners.append(seen.setdefault(place, index))
    return owners


def _divide(leaves: Sequence[Leaf], owners: Sequence[int], world_size: int) -> dict[int, int]:
    def size(index: int) -> int:
        tensor = leaves[index].value
        return frame(tensor.dtype, tuple(tensor.shape)).length

    unique = [index for index, owner in enumerate(owners) if index == owner]
    ranks = {index: 0 for index in unique if not leaves[index].balanced}
    load = [(sum(map(size, ranks)) if rank == 0 else 0, rank) for rank in range(world_size)]
    heapq.heapify(load)
    balanced = [index for index in unique if leaves[index].balanced]
    for index in sorted(balanced, key=lambda index: (-size(index), index)):
        total, rank = heapq.heappop(load)
        ranks[index] = rank
        heapq.heappush(load, (total + size(index), rank))
    return ranks
