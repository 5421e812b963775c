"""What all connections of one server share, and the threads that serve them."""

from __future__ import annotations

import math
import socket
import threading
import time
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from trainpath.errors import ConfigError
from trainpath.testing.object_server._counters import Counters
from trainpath.testing.object_server._faults import Fault, FaultPlan
from trainpath.testing.object_server._http import Connection
from trainpath.testing.object_server._objects import MemoryObjects
from trainpath.testing.object_server._rate import RateLimit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainpath.testing.object_server._objects import Object, Objects

__all__ = ["Core"]

_CLOSE_S: Final = 10.0


class Core:
    """The state of a server and its threads: one that accepts, one per connection."""

    def __init__(self, objects: Objects, rate: float | None, latency_s: float, port: int) -> None:
        self.counters = Counters()
        self.faults = FaultPlan()
        self.rate = RateLimit()
        self.latency_s = 0.0
        self.errors: list[Exception] = []
        self.configure({"rate_bytes_per_s": rate, "latency_s": latency_s})
        self._objects = objects
        self._changed = MemoryObjects()  # versions made by faults, in front of `objects`
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(
            target=self._accept, name="trainpath-object-server", daemon=True
        )
        self._acceptor.start()

    def get(self, name: str) -> Object | None:
        """Open the version of an object that is served now."""
        return self._changed.get(name) or self._objects.get(name)

    def put(self, name: str, data: BinaryIO, *, check: Callable[[Object | None], None]) -> str:
        """Replace an object; return its ETag."""
        etag = self._objects.put(name, data, check=check)
        self._changed.delete(name)
        return etag

    def delete(self, name: str) -> bool:
        """Remove an object; tell whether it was there."""
        self._changed.delete(name)
        return self._objects.delete(name)

    def names(self) -> dict[str, tuple[int, float]]:
        """Return size and modification time of every object, by name."""
        return self._objects.names()

    def change(self, name: str) -> None:
        """Turn an object into another version of the same length: its last byte differs."""
        if (old := self.get(name)) is None:
            return
        content = bytearray(old.read())
        old.close()
        content[-1:] = bytes([content[-1] ^ 0xFF]) if content else b"\xff"
        self._changed.put(name, BytesIO(content), check=lambda _: None)

    def reset(self) -> None:
        """Forget counts and faults that are still to come."""
        self.counters.clear()
        self.faults.clear()

    def settings(self) -> dict[str, Any]:
        """Return rate and latency."""
        return {"rate_bytes_per_s": self.rate.bytes_per_s, "latency_s": self.latency_s}

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Change rate and latency, and add faults.

        Raises:
            ConfigError: An unknown setting, or a value that makes no sense.
        """
        known = {"rate_bytes_per_s", "latency_s", "faults"}
        if not isinstance(settings, dict) or set(settings) - known:
            raise ConfigError(f"settings must be a dict of {sorted(known)}, not {settings!r}")
        rate = settings.get("rate_bytes_per_s", self.rate.bytes_per_s)
        latency_s = settings.get("latency_s", self.latency_s)
        faults = [dict(fault) for fault in settings.get("faults", [])]
        planned = [(str(fault.pop("pattern", "*")), Fault(**fault)) for fault in faults]
        if rate is not None and not 0 < rate < math.inf:
            raise ConfigError(f"rate_bytes_per_s must be positive or None, not {rate!r}")
        if not 0 <= latency_s < math.inf:
            raise ConfigError(f"latency_s must not be negative, not {latency_s!r}")
        self.rate.set(rate)
        self.latency_s = latency_s
        for pattern, fault in planned:
            self.faults.add(pattern, fault)

    def pause(self, seconds: float) -> None:
        """Sleep; end the connection if the server is closed meanwhile."""
        if seconds > 0 and self._closing.wait(None if seconds == math.inf else seconds):
            raise ConnectionAbortedError

    def close(self) -> None:
        """End all connections and threads; safe to call twice."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        deadline = time.monotonic() + _CLOSE_S
        self._acceptor.join(_CLOSE_S)
        self._listener.close()
        with self._lock:
            clients = dict(self._clients)
            for client in clients:
                with suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)
        for thread in clients.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.errors:
            error = self.errors.pop(0)
            self.errors.clear()
            raise error

    def _accept(self) -> None:
        number = 0
        while not self._closing.is_set():
            try:
                client, address = self._listener.accept()
            except OSError:
                if self._closing.wait(0.05):  # not closed: out of descriptors for a moment
                    return
                continue
            number += 1
            thread = threading.Thread(
                target=self._serve,
                args=(client, address),
                name=f"trainpath-object-server-{number}",
                daemon=True,
            )
            with self._lock:
                self._clients[client] = thread
            self.counters.connection()
            thread.start()

    def _serve(self, client: socket.socket, address: tuple[str, int]) -> None:
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Connection(self, client, address)
        except ConnectionError:
            pass  # the client has left
        except Exception as error:  # surfaces when the server is closed
            self.errors.append(error)
        finally:
            with self._lock:
                self._clients.pop(client, None)
            client.close()
