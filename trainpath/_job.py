"""The distributed job this process belongs to."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

__all__ = ["ensure_process_group", "job_store", "rank", "world_size"]


def ensure_process_group() -> bool:
    """Initialise the default group under torchrun; return whether it was us."""
    if not dist.is_available() or dist.is_initialized():
        return False
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in os.environ:
        return False
    dist.init_process_group()
    return True


def rank() -> int:
    """Return this process's rank; 0 outside a distributed job."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 outside a distributed job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def job_store() -> Any:
    """Return a key-value store that all ranks of the job share, or None for one process."""
    if world_size() < 2:
        return None
    from torch.distributed import distributed_c10d  # noqa: PLC0415 - for its private accessor

    return distributed_c10d.PrefixStore("trainpath", distributed_c10d._get_default_store())  # noqa: SLF001
