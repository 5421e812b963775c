"""Tools for testing distributed training for real: ranks, an object server, faults."""

from __future__ import annotations

from trainpath.testing.object_server import Fault, ObjectServer
from trainpath.testing.spawn import SpawnError, spawn

__all__ = ["Fault", "ObjectServer", "SpawnError", "spawn"]
