"""Tools for testing distributed training for real: ranks, an object server, faults."""

from __future__ import annotations

from trainpath.testing.spawn import SpawnError, spawn

__all__ = ["SpawnError", "spawn"]
