"""The distributed job this process belongs to."""

from __future__ import annotations

import os
from typing import Any, Final

import torch.distributed as dist

from trainpath.errors import ConfigError

__all__ = ["ensure_process_group", "job_store", "rank", "world_size"]


_VARIABLES: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group() -> bool:
    """Initialise the default group under torchrun; return whether it was us.

    Raises:
        ConfigError: The environment speaks of several ranks, but not of how they meet: each
            would train alone, unnoticed.
    """
    if not dist.is_available() or dist.is_initialized():
        return False
    given = {name: os.environ.get(name, "") for name in _VARIABLES}
    if given["WORLD_SIZE"].strip() in ("", "0", "1"):
        return False
    numbers = [given[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if not given["MASTER_ADDR"] or not all(number.isdecimal() for number in numbers):
        stated = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ConfigError(
            f"the environment describes no usable job ({stated}): start it with torchrun or "
            "another launcher that sets all four, or unset WORLD_SIZE to train in one process"
        )
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
