"""The few collectives of the gradient path, each with a deadline."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainpath.errors import ConfigError, PeerError, PeerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["Peers"]

# A wait is cut into slices so that Ctrl-C is served while a peer is late.
_SLICE_S = 0.5
_CHUNK_BYTES = 25 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """The ranks that share their gradients, seen from this one.

    Attributes:
        group: Their process group; None stands for the default one.
        rank: This rank's number in it.
        world_size: How many they are.
        timeout_s: How long a wait for one of them may take.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    timeout_s: float

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, *, timeout_s: float) -> Peers:
        """Return the peers of `group`, or a lone rank outside a distributed job."""
        if not dist.is_available() or not dist.is_initialized():
            return cls(group=None, rank=0, world_size=1, timeout_s=timeout_s)
        rank = dist.get_rank(group)
        if rank < 0:
            raise ConfigError(
                f"rank {dist.get_rank()} is not in the process group; build the reducer only on "
                "the ranks of its group"
            )
        return cls(
            group=group, rank=rank, world_size=dist.get_world_size(group), timeout_s=timeout_s
        )

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start the sum of `tensor` over all ranks, in place."""
        work: dist.Work | None = dist.all_reduce(tensor, group=self.group, async_op=True)
        if work is None:
            raise ConfigError("this rank is not in the process group of its reducer")
        return work

    def wait(self, work: dist.Work, device: torch.device, what: str) -> None:
        """Wait for `work` on tensors of `device`.

        Args:
            work: What to wait for.
            device: On an accelerator the wait is one of its stream, not of this thread; the
                deadline is then that of the process group.
            what: Step and object, for the error.

        Raises:
            PeerTimeoutError: `timeout_s` went by.
            PeerError: A peer left.
        """
        if device.type != "cpu":
            work.wait()
            return
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                work.wait(timedelta(seconds=min(_SLICE_S, self.timeout_s)))
            except RuntimeError as error:
                if work.is_completed():
                    raise self._failed(what, error) from error
                if time.monotonic() >= deadline:
                    raise PeerTimeoutError(
                        f"rank {self.rank} waited {self.timeout_s:g} s for its peers ({what}): one "
                        "of them is late, stuck or ran fewer backward passes; see the output of "
                        "the other ranks, or raise timeout_s if a rank may be that late"
                    ) from error
            else:
                return

    def _failed(self, what: str, error: RuntimeError) -> Exception:
        if "timed out" in str(error).lower():
            return PeerTimeoutError(
                f"rank {self.rank} reached the timeout of its process group ({what}): a peer is "
                f"late or stuck; see the output of the other ranks ({error})"
            )
        return PeerError(
            f"rank {self.rank} lost a peer ({what}); see the output of the other ranks for the "
            f"first error ({error})"
        )

    def gather_bytes(self, content: bytes, device: torch.device, what: str) -> list[bytes]:
        """Return the `content` of every rank; equally long on all of them."""
        mine = torch.tensor(list(content), dtype=torch.uint8, device=device)
        everyones = [torch.empty_like(mine) for _ in range(self.world_size)]
        work = dist.all_gather(everyones, mine, group=self.group, async_op=True)
        if work is not None:
            self.wait(work, device, what)
        return [bytes(tensor.tolist()) for tensor in everyones]

    @torch.no_grad()
    def broadcast(self, tensors: Iterable[Tensor], what: str) -> None:
        """Overwrite `tensors` with those of rank 0: dense, alike on all ranks, any dtypes."""
        # Widest elements first keeps every piece of a chunk aligned to its dtype.
        parts = sorted((_real(t) for t in tensors), key=lambda t: -t.element_size())
        by_device: dict[torch.device, list[Tensor]] = {}
        for part in parts:
            by_device.setdefault(part.device, []).append(part)
        for same_device in by_device.values():
            for chunk in _chunks(same_device):
                self._broadcast_chunk(chunk, what)

    def _broadcast_chunk(self, parts: Sequence[Tensor], what: str) -> None:
        flat = torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        work = dist.broadcast(flat, source, group=self.group, async_op=True)
        if work is not None:
            self.wait(work, flat.device, what)
        if self.rank == 0:
            return
        sizes = [part.numel() * part.element_size() for part in parts]
        for part, piece in zip(parts, torch.split(flat, sizes), strict=True):
            part.copy_(piece.view(part.dtype).view(part.shape))


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _chunks(parts: Iterable[Tensor]) -> list[list[Tensor]]:
    chunks: list[list[Tensor]] = [[]]
    size = 0
    for part in parts:
        if size >= _CHUNK_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(part)
        size += part.numel() * part.element_size()
    return chunks
