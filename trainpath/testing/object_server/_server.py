"""The server as tests use it: a thread in this process."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from trainpath.testing.object_server._core import Core
from trainpath.testing.object_server._objects import DirectoryObjects, MemoryObjects

if TYPE_CHECKING:
    import os

    from typing_extensions import Self

    from trainpath.testing.object_server._faults import Fault

__all__ = ["ObjectServer"]


class ObjectServer:
    """A real HTTP/1.1 object server on loopback.

    It answers HEAD, GET (with single ranges), PUT, DELETE and listings (an HTML index per
    directory, and S3 ListObjectsV2), with strong ETags made from the content, their
    preconditions (If-Match, If-None-Match, If-Range), and keep-alive. Everything it sends
    passes one shared rate; each request waits for `latency_s` first.

    Args:
        root: Directory with the objects, or None to keep them in memory.
        rate_bytes_per_s: Rate shared by all connections; None for no limit.
        latency_s: Time before the first byte of each answer.
        port: Port on 127.0.0.1; 0 takes a free one.

    Cost:
        One thread and one per connection. Bodies are sent by `sendfile`, or from memory,
        without the interpreter lock. The first request of a file reads it once to hash it.

    Guarantee:
        A PUT replaces an object atomically: a reader gets one version or the other. No
        request reaches a file outside of `root`. Counts include a request as soon as it
        has arrived. After `close` no thread, connection or temporary file is left, and an
        error inside the server is raised there.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        *,
        rate_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
        port: int = 0,
    ) -> None:
        objects = MemoryObjects() if root is None else DirectoryObjects(Path(root))
        self._core = Core(objects, rate_bytes_per_s, latency_s, port)
        self.url = f"http://127.0.0.1:{self._core.port}"

    @property
    def rate_bytes_per_s(self) -> float | None:
        """Rate shared by all connections; may be set at any time."""
        return self._core.rate.bytes_per_s

    @rate_bytes_per_s.setter
    def rate_bytes_per_s(self, value: float | None) -> None:
        self._core.configure({"rate_bytes_per_s": value})

    @property
    def latency_s(self) -> float:
        """Time before the first byte of each answer; may be set at any time."""
        return self._core.latency_s

    @latency_s.setter
    def latency_s(self, value: float) -> None:
        self._core.configure({"latency_s": value})

    def url_for(self, name: str) -> str:
        """Return the URL of the object `name`."""
        return f"{self.url}/{quote(name)}"

    def put(self, name: str, data: bytes | bytearray | memoryview) -> str:
        """Store an object, as a PUT would, without counting it; return its ETag."""
        return self._core.put(name, BytesIO(data), check=lambda _: None)

    def delete(self, name: str) -> bool:
        """Remove an object; tell whether it was there."""
        return self._core.delete(name)

    def inject(self, pattern: str, fault: Fault) -> None:
        """Let `fault` befall the next requests of objects that match the glob `pattern`.

        Where several faults match a request, the one injected first is taken.
        """
        self._core.faults.add(pattern, fault)

    def gets(self, name: str | None = None) -> int:
        """Return how many GET requests for `name` (None: anything) have arrived."""
        return self.requests(name, "GET")

    def requests(self, name: str | None = None, method: str | None = None) -> int:
        """Return how many requests have arrived, of one object and method or of any."""
        return self._core.counters.total("requests", name, method)

    def bytes_sent(self, name: str | None = None) -> int:
        """Return how many bytes of `name` (None: of any object) have been sent by GETs."""
        return self._core.counters.total("sent", name, "GET")

    def stats(self) -> dict[str, Any]:
        """Return all counts, as `GET /-/stats` does.

        Keys: `connections`, `requests`, `bytes_sent`, `bytes_received` and `objects`: for
        each name and method `requests`, `bytes_sent`, `bytes_received` and `statuses`.
        """
        return self._core.counters.snapshot()

    def reset(self) -> None:
        """Set all counts to zero and drop the faults that are still to come."""
        self._core.reset()

    def close(self) -> None:
        """End all connections and threads; raise an error inside the server, if any.

        Safe to call twice.
        """
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()
