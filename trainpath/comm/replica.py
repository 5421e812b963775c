"""Proof that all ranks hold the same model before any gradient is mixed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainpath.errors import ReplicaMismatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor

    from trainpath.comm.collectives import Peers

__all__ = ["check_same", "describe"]


def describe(kind: str, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return one line for each tensor: all that must be equal on every rank."""
    return [
        f"{kind} {name!r}, {_dtype(tensor)}, shape {tuple(tensor.shape)}, "
        f"stride {tuple(tensor.stride())}{', trained' if tensor.requires_grad else ''}"
        for name, tensor in tensors.items()
    ]


def check_same(lines: Sequence[str], peers: Peers, device: torch.device) -> None:
    """Compare `lines` across the ranks; collective: one all-gather of 32 bytes.

    Raises:
        ReplicaMismatchError: On every rank, naming the first difference and whose it is.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    digests = peers.gather_bytes(digest, device, "comparison of the models")
    if all(other == digests[0] for other in digests):
        return
    everyones: list[Sequence[str]] = [()] * peers.world_size
    dist.all_gather_object(everyones, lines, group=peers.group)
    for rank, theirs in enumerate(everyones):
        if theirs != everyones[0]:
            raise ReplicaMismatchError(_difference(rank, theirs, everyones[0]))
    raise ReplicaMismatchError("the models of the ranks changed while they were compared")


def _difference(rank: int, theirs: Sequence[str], ours: Sequence[str]) -> str:
    length = max(len(theirs), len(ours))
    for index in range(length):
        first = ours[index] if index < len(ours) else "nothing more"
        other = theirs[index] if index < len(theirs) else "nothing more"
        if first != other:
            return (
                f"rank {rank} holds another model than rank 0: {other} there, {first} on rank 0; "
                "build (and freeze) the same model with the same settings on every rank"
            )
    return f"rank {rank} holds another model than rank 0"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
