"""Checkpoints that do not block: stock `torch.distributed.checkpoint` directories, proven.

`CheckpointManager` stages behind the next forward and backward, writes in a process of its
own and commits by rename. The names are imported at their first use, because the writer
process imports this package without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainpath._lazy import lazy_names

if TYPE_CHECKING:
    from trainpath.checkpoint.handle import Milestone, SaveHandle, SaveStats
    from trainpath.checkpoint.manager import CheckpointManager
    from trainpath.checkpoint.rng import RandomState

__all__ = ["CheckpointManager", "Milestone", "RandomState", "SaveHandle", "SaveStats"]

_HOMES: Final = {
    "CheckpointManager": "trainpath.checkpoint.manager",
    "Milestone": "trainpath.checkpoint.handle",
    "RandomState": "trainpath.checkpoint.rng",
    "SaveHandle": "trainpath.checkpoint.handle",
    "SaveStats": "trainpath.checkpoint.handle",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
