"""The checks of what a script hands to `accelerate()` and `observe()`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["as_optimizers", "wrong"]


def as_optimizers(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
) -> list[torch.optim.Optimizer]:
    """Return the optimizers given, none to several, as a list; ConfigError for anything else."""
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    if not isinstance(optimizer, Iterable):
        raise ConfigError(wrong("optimizer", "a torch optimizer or a list of such", optimizer))
    optimizers = []
    for item in optimizer:
        if not isinstance(item, torch.optim.Optimizer):
            raise ConfigError(wrong("optimizer", "a torch optimizer or a list of such", item))
        optimizers.append(item)
    return optimizers


def wrong(name: str, wanted: str, got: object) -> str:
    """Return the message about an argument of the wrong type."""
    return f"{name} must be {wanted}, got {type(got).__name__}: were the arguments mixed up?"
