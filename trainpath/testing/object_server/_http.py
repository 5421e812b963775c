"""HTTP/1.1 on one connection: parse, check preconditions, answer, misbehave as planned."""

from __future__ import annotations

import email.utils
import json
import re
import socket
import struct
import tempfile
import time
import traceback
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, BinaryIO, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from trainpath.errors import ConfigError
from trainpath.testing.object_server._listing import html_index, s3_listing
from trainpath.testing.object_server._objects import PreconditionError

if TYPE_CHECKING:
    from trainpath.testing.object_server._core import Core
    from trainpath.testing.object_server._faults import Fault
    from trainpath.testing.object_server._objects import Object

__all__ = ["Connection"]

_CONTROL: Final = "-/"
_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)")
_MAX_NAME: Final = 255
_PIECE: Final = 256 << 10
_IN_MEMORY: Final = 64 << 20  # a larger upload goes through a temporary file


class _RefusedError(Exception):
    """The request makes no sense or cannot be met; the server itself is fine."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _check_name(name: str, method: str) -> None:
    """Refuse names that no file below a directory can have."""
    parts = name.split("/")
    if parts[-1] == "" and method in {"GET", "HEAD"}:
        parts.pop()  # a directory, to list
    bad = any(part in {"", ".", ".."} or len(part.encode()) > _MAX_NAME for part in parts)
    if bad or "\0" in name:
        raise _RefusedError(400, "object names have no empty, '.', '..' or overlong parts")


class Connection(BaseHTTPRequestHandler):
    """Answers the requests of one client connection until it ends."""

    protocol_version = "HTTP/1.1"
    server_version = "trainpath"
    sys_version = ""

    def __init__(self, core: Core, client: socket.socket, address: tuple[str, int]) -> None:
        self._core = core
        self._name = ""
        self._body_left = False
        super().__init__(client, address, core)  # type: ignore[arg-type]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write nothing: requests are counted, not logged."""

    def do_GET(self) -> None:
        """Serve an object, a range of it, or a listing."""
        self._answer()

    do_HEAD = do_PUT = do_DELETE = do_POST = do_GET  # noqa: N815

    def _answer(self) -> None:
        """Answer one request; a client that goes away is no error."""
        self._body_left = "Transfer-Encoding" in self.headers
        self._body_left |= self.headers.get("Content-Length", "0") != "0"
        url = urlsplit(self.path)
        self._name = unquote(url.path).lstrip("/")
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        try:
            if self._name.startswith(_CONTROL):
                self._control()
            else:
                _check_name(self._name, self.command)
                self._object(query)
        except ConnectionError:
            self.close_connection = True
        except _RefusedError as refused:
            self._text(refused.status, f"{refused}\n")
        except Exception as error:  # surfaces when the server is closed
            self._core.errors.append(error)
            self.close_connection = True
            with suppress(ConnectionError):
                self._text(500, traceback.format_exc())
        if self._body_left:  # its bytes would be taken for the next request
            self.close_connection = True

    def _object(self, query: dict[str, str]) -> None:
        """Count the request, apply latency and faults, then do what it asks."""
        core = self._core
        core.counters.request(self._name, self.command)
        fault = core.faults.take(self._name, self.command)
        core.pause(core.latency_s)
        if fault is not None and fault.kind == "status":
            retry = {} if fault.retry_after_s is None else {"Retry-After": fault.retry_after_s}
            self._text(
                fault.status, "a fault of this test\n", {k: f"{v:g}" for k, v in retry.items()}
            )
            return
        if fault is not None and fault.kind == "changed":
            core.change(self._name)
        if fault is not None and fault.kind in {"reset", "hang"} and fault.after_bytes == 0:
            self._strike(fault)  # before a single byte of the answer
            fault = None
        if self.command == "PUT":
            self._put()
        elif self.command == "DELETE":
            self._text(204 if core.delete(self._name) else 404)
        elif self.command == "POST":
            self._text(405, "", {"Allow": "GET, HEAD, PUT, DELETE"})
        else:
            self._get(query, fault)

    def _get(self, query: dict[str, str], fault: Fault | None) -> None:
        if query.get("list-type") == "2":
            if not query.get("max-keys", "0").isdecimal():
                raise _RefusedError(400, "max-keys must be a number")
            page = s3_listing(self._core.names(), self._name.strip("/"), query)
            self._text(200, page, {"Content-Type": "application/xml"})
            return
        found = None if not self._name or self._name.endswith("/") else self._core.get(self._name)
        if found is None:
            directory = f"{self._name.rstrip('/')}/" if self._name else ""
            index = html_index(self._core.names(), directory)
            if index is None:
                self._text(404, f"no object {self._name}\n")
            else:
                self._text(200, index, {"Content-Type": "text/html; charset=utf-8"})
            return
        try:
            self._send_object(found, fault)
        finally:
            found.close()

    def _send_object(self, found: Object, fault: Fault | None) -> None:
        headers = {
            "ETag": found.etag,
            "Accept-Ranges": "bytes",
            "Last-Modified": email.utils.formatdate(found.modified_s, usegmt=True),
        }
        if not self._matches("If-Match", found, default=True):
            self._text(412, "the object has changed\n", headers)
            return
        if self._matches("If-None-Match", found, default=False):
            self._text(304, "", headers)
            return
        part = self._range(found)
        status = 200 if part is None else 206
        first, count = part or (0, found.size)
        if part is not None and count <= 0:
            self._text(416, "", {**headers, "Content-Range": f"bytes */{found.size}"})
            return
        if part is not None:
            headers["Content-Range"] = f"bytes {first}-{first + count - 1}/{found.size}"
        announced = count
        if fault is not None and fault.kind == "length":
            announced = max(0, count + fault.extra_bytes)
            self.close_connection = True
        headers["Content-Type"] = "application/octet-stream"
        self._head(status, {**headers, "Content-Length": str(announced)})
        if self.command != "HEAD":
            self._send_body(found, first, count, fault)

    def _send_body(self, found: Object, first: int, count: int, fault: Fault | None) -> None:
        """Send `count` bytes at the server's rate; strike after `fault.after_bytes` of them."""
        since = time.monotonic()
        stop = min(count, fault.after_bytes) if fault is not None else -1
        if fault is not None and fault.kind in {"cut", "reset"}:
            stop = min(stop, max(0, count - 1))  # a complete body would be no fault
        done = 0
        while True:
            if done == stop and fault is not None:
                self._strike(fault)
            if done == count:
                return
            end = stop if done < stop else count
            piece = min(end - done, self._core.rate.chunk_bytes())
            self._core.pause(self._core.rate.reserve(piece, since=since))
            sent = self._send_piece(found, first + done, piece)
            done += sent
            if sent < piece:  # the file has been cut behind our back: never pretend
                self.close_connection = True
                return

    def _send_piece(self, found: Object, offset: int, piece: int) -> int:
        """Send a piece and count it; a client that has received it finds it counted."""
        count = self._core.counters.sent
        count(self._name, self.command, piece)
        sent = 0
        try:
            sent = found.send(self.connection, offset, piece)
        finally:
            count(self._name, self.command, sent - piece)
        return sent

    def _strike(self, fault: Fault) -> None:
        """Let the fault happen that interrupts an answer."""
        if fault.kind == "hang":
            self._core.pause(fault.pause_s)
        elif fault.kind == "reset":
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            raise ConnectionResetError
        elif fault.kind == "cut":
            raise ConnectionAbortedError

    def _put(self) -> None:
        if not self._body_left and "Content-Length" not in self.headers:
            raise _RefusedError(411, "PUT needs a Content-Length or chunks")

        def check(old: Object | None) -> None:
            if self.headers.get("If-None-Match") == "*" and old is not None:
                raise PreconditionError(f"{self._name} exists")
            if "If-Match" in self.headers and (
                old is None or not self._matches("If-Match", old, default=True)
            ):
                raise PreconditionError(f"{self._name} has changed")

        with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as data:
            self._receive_body(data)  # type: ignore[arg-type]
            try:
                etag = self._core.put(self._name, data, check=check)  # type: ignore[arg-type]
            except PreconditionError as error:
                raise _RefusedError(412, str(error)) from error
            except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
                raise _RefusedError(409, f"a file or directory is in the way: {error}") from error
            except OSError as error:
                raise _RefusedError(507, f"{self._name} was not stored: {error}") from error
        self._text(200, "", {"ETag": etag})

    def _receive_body(self, destination: BinaryIO) -> None:
        """Copy the request's body; a client that leaves in the middle is a ConnectionError."""
        since = time.monotonic()
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            self._receive(self._content_length(), destination, since)
        else:
            while size := self._chunk_size():
                self._receive(size, destination, since)
                self.rfile.readline(100)
            while self.rfile.readline(1 << 16).strip():  # trailers
                continue
        self._body_left = False

    def _chunk_size(self) -> int:
        line = self.rfile.readline(100)
        if not line:
            raise ConnectionAbortedError
        try:
            return int(line.partition(b";")[0], 16)
        except ValueError:
            raise _RefusedError(400, f"{line!r} is not the size of a chunk") from None

    def _receive(self, count: int, destination: BinaryIO, since: float) -> None:
        while count:
            piece = self.rfile.read1(min(count, _PIECE))
            if not piece:
                raise ConnectionAbortedError
            self._core.counters.received(self._name, self.command, len(piece))
            self._core.pause(self._core.rate.reserve(len(piece), since=since))
            destination.write(piece)
            count -= len(piece)

    def _control(self) -> None:
        """Answer the requests about the server itself, which are not counted."""
        action = (self.command, self._name.removeprefix(_CONTROL))
        if action == ("GET", "stats"):
            self._json(self._core.counters.snapshot())
        elif action == ("POST", "reset"):
            self._core.reset()
            self._json({})
        elif action == ("GET", "settings"):
            self._json(self._core.settings())
        elif action == ("POST", "settings"):
            with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as body:
                self._receive_body(body)  # type: ignore[arg-type]
                body.seek(0)
                try:
                    self._core.configure(json.loads(body.read()))
                except (ConfigError, ValueError, TypeError) as error:
                    raise _RefusedError(400, str(error)) from error
            self._json(self._core.settings())
        else:
            self._text(404, "GET /-/stats, POST /-/reset, GET or POST /-/settings\n")

    def _matches(self, header: str, found: Object, *, default: bool) -> bool:
        """Tell whether the ETag of `found` is among those in a precondition header."""
        value = self.headers.get(header)
        if value is None:
            return default
        tags = {tag.strip().removeprefix("W/") for tag in value.split(",")}
        return "*" in tags or found.etag in tags

    def _range(self, found: Object) -> tuple[int, int] | None:
        """Return first byte and count of a single range; None: serve the whole object.

        The count is zero or less when no byte of the object is in the range.
        """
        match = _RANGE.fullmatch(self.headers.get("Range", "").replace(" ", ""))
        if match is None or match[1] == match[2] == "":
            return None
        if not self._matches("If-Range", found, default=True):
            return None
        if match[1] == "":
            count = min(int(match[2]), found.size)
            return found.size - count, count
        first = int(match[1])
        last = found.size - 1 if match[2] == "" else min(int(match[2]), found.size - 1)
        if match[2] != "" and int(match[2]) < first:
            return None  # not a range at all
        return first, last - first + 1

    def _content_length(self) -> int:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal():
            raise _RefusedError(400, f"{length!r} is not a Content-Length")
        return int(length)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self._core.counters.answer(self._name, self.command, status)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        if self.close_connection or self._body_left:
            self.send_header("Connection", "close")
        self.end_headers()

    def _text(self, status: int, text: str = "", headers: dict[str, str] | None = None) -> None:
        """Send a complete short answer."""
        body = text.encode()
        length = {} if status in {204, 304} else {"Content-Length": str(len(body))}
        default = {"Content-Type": "text/plain; charset=utf-8"} if body else {}
        self._head(status, {**default, **length, **(headers or {})})
        if self.command != "HEAD" and status not in {204, 304}:
            self.wfile.write(body)

    def _json(self, value: object) -> None:
        self._text(200, json.dumps(value), {"Content-Type": "application/json"})
