"""Which models the gradient reducer refuses, and what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from trainpath._inert_hook import InertHook
from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_reducible"]


def check_reducible(model: nn.Module, reducer: type) -> None:
    """Refuse models whose gradients somebody reduces already, and sparse gradients.

    Args:
        model: The model.
        reducer: The type whose hooks on a module tell that it is reduced already.

    Raises:
        ConfigError: Saying what to use instead.
    """
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, DistributedDataParallel):
            raise ConfigError(
                f"{where} is in torch DDP, which reduces its gradients; use "
                "trainpath.comm.comm_hook(ddp_model), or hand over the module inside"
            )
        if isinstance(module, DataParallel):
            raise ConfigError(f"{where} is in DataParallel; hand over the module inside")
        if isinstance(module, FSDPModule | FullyShardedDataParallel):
            raise ConfigError(
                f"{where} is in FSDP, which reduces its own gradients; leave GradientReducer out "
                "and measure it with trainpath.observe()"
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"{where} gives sparse gradients, which are not supported; build it with "
                "sparse=False"
            )
        if any(isinstance(owner, reducer) for owner in _hook_owners(module)):
            raise ConfigError(f"{where} has a GradientReducer already; close() that one first")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"parameter {name!r} is a DTensor: FSDP or tensor parallelism owns it; leave "
                "GradientReducer out and measure with trainpath.observe()"
            )


def _hook_owners(module: nn.Module) -> Iterator[object]:
    for hook in module._forward_pre_hooks.values():  # noqa: SLF001
        if isinstance(hook, InertHook):
            yield hook.owner
