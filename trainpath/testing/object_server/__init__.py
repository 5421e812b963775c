"""A real HTTP/1.1 object server on loopback, with settable rate, latency and faults.

In a test use `ObjectServer`; for other processes run
`python -m trainpath.testing.object_server --root DIR`.
"""

from __future__ import annotations

from trainpath.testing.object_server._faults import Fault
from trainpath.testing.object_server._server import ObjectServer

__all__ = ["Fault", "ObjectServer"]
