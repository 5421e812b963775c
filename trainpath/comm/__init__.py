"""Gradient communication overlapped with backward, in place or inside torch DDP."""

from __future__ import annotations

from trainpath.comm.hook import comm_hook
from trainpath.comm.reducer import GradientReducer
from trainpath.comm.watch import watch_backward

__all__ = ["GradientReducer", "comm_hook", "watch_backward"]
