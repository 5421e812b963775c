"""Which part serves which mode: the choices behind `accelerate()`."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

from trainpath import _job
from trainpath.cache import register_webdataset, shared_cache
from trainpath.comm import GradientReducer, comm_hook, watch_backward
from trainpath.comm.stock import StockReducer
from trainpath.config import CACHE_VARIABLE
from trainpath.loader import DataLoader, TarDataset, observed, prefetch
from trainpath.overlap import DevicePrefetcher

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch.distributed as dist
    from torch import nn

    from trainpath.comm.watch import BackwardWatch
    from trainpath.metrics import StepClock

__all__ = [
    "device_of",
    "host_loader",
    "install_cache",
    "install_comm",
    "is_sharded",
    "watch_optimizers",
]


def install_cache(loader: Any, directory: Path | None) -> ExitStack:
    """Let remote shards go through the cache in `directory`, if there is one.

    A `TarDataset` without a cache gets one; `trainpath::` URLs read the variable, in this
    process and in those it starts. webdataset, where a script uses it, learns such URLs.

    Returns:
        What puts variable and data set back when it is closed.
    """
    if "webdataset" in sys.modules:
        register_webdataset()
    undo = ExitStack()
    if directory is None:
        return undo
    cache = shared_cache(directory)  # here, so that all workers know when the job began
    undo.callback(_set_variable, os.environ.get(CACHE_VARIABLE))
    _set_variable(str(directory))
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, TarDataset) and dataset.cache is None:
        undo.callback(setattr, dataset, "cache", None)
        dataset.cache = cache
    return undo


def _set_variable(directory: str | None) -> None:
    if directory is None:
        os.environ.pop(CACHE_VARIABLE, None)
    else:
        os.environ[CACHE_VARIABLE] = directory


def install_comm(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    mode: str,
    clock: StepClock,
    process_group: dist.ProcessGroup | None,
) -> tuple[Any, list[Any]]:
    """Reduce the gradients of `model`, or watch whoever does.

    Returns:
        What has `no_sync()` for this model (None: nothing has), and what to close.
    """
    closables: list[Any] = []
    reducer: Any = None
    if isinstance(model, DistributedDataParallel):
        reducer = model
        if mode == "on":
            closables.append(comm_hook(model, clock=clock))
    elif _job.world_size() > 1 and not is_sharded(model):
        if mode == "on":
            reducer = GradientReducer(model, process_group=process_group, clock=clock)
            for optimizer in optimizers:
                reducer.guard(optimizer)
        else:
            reducer = StockReducer(model, process_group=process_group)
        closables.append(reducer)
    if mode == "observe" or (mode == "on" and is_sharded(model)):
        closables.append(watch_backward(list(model.parameters()), clock))
    return reducer, closables


def watch_optimizers(optimizers: list[torch.optim.Optimizer], clock: StepClock) -> BackwardWatch:
    """Mark backward and gradient waits when only the optimizers are known."""
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    return watch_backward(parameters, clock)


def host_loader(
    loader: Iterable[Any], *, mode: str, clock: StepClock, device: torch.device | str | None
) -> tuple[Iterable[Any], list[Any]]:
    """Return what serves the batches of `loader` in `mode`, and what of it is ours to close."""
    source: Any = loader
    if isinstance(loader, DataLoader):
        loader.clock = clock
    elif mode == "off":
        return loader, []
    elif isinstance(loader, data.DataLoader):
        on = mode == "on"
        source = DataLoader.from_torch(loader, clock=clock) if on else observed(loader, clock)
    else:
        source = prefetch(loader, depth=2 if mode == "on" else 0, clock=clock)
    ours = [] if source is loader else [source]
    if mode == "on" and device is not None and torch.device(device).type == "cuda":
        source = DevicePrefetcher(source, device, clock=clock)
    return source, ours


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of the first parameter of `model`."""
    return next((parameter.device for parameter in model.parameters()), None)


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP (1 or 2) or tensor parallelism owns the parameters of `model`."""
    wrappers = (FSDPModule, FullyShardedDataParallel)
    return any(isinstance(module, wrappers) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )
