"""Tools for testing distributed training for real: ranks, an object server, faults.

The names load on first use, so that the object server starts without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
