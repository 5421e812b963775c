"""Tools for testing distributed training for real: ranks, an object server, faults.

The names load on first use, so that the object server starts without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainpath._lazy import lazy_names

if TYPE_CHECKING:
    from trainpath.testing._spawn import SpawnError, spawn
    from trainpath.testing.faulty_store import FaultyStore
    from trainpath.testing.object_server import Fault, ObjectServer

__all__ = ["Fault", "FaultyStore", "ObjectServer", "SpawnError", "spawn"]

_HOMES = {
    "Fault": "trainpath.testing.object_server",
    "FaultyStore": "trainpath.testing.faulty_store",
    "ObjectServer": "trainpath.testing.object_server",
    "SpawnError": "trainpath.testing._spawn",
    "spawn": "trainpath.testing._spawn",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
