"""HTTP(S) origins by the standard library: keep-alive, retries, resume, no version mixed.

About half the CPU per byte of any S3 client, and safe after a fork, which most are not.
Proxies and certificate authorities come from the usual variables (`HTTP_PROXY`,
`HTTPS_PROXY`, `NO_PROXY`, `SSL_CERT_FILE`, `SSL_CERT_DIR`).
"""

from __future__ import annotations

import base64
import email.utils
import http.client
import os
import ssl
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from trainpath.cache.download import ObjectChangedError
from trainpath.cache.names import redact
from trainpath.errors import ConfigError, FetchError, ShardNotFoundError
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import stage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import BinaryIO, TypeVar

    from tenacity import RetryCallState

    T = TypeVar("T")

__all__ = ["HttpStore"]

_CHUNK: Final = 1 << 18  # small enough to see progress on a slow link
_MAX_REDIRECTS: Final = 5
_MAX_RETRY_AFTER_S: Final = 120.0
_RETRIED: Final = {408, 425, 429}
_NO_HEAD: Final = {403, 405, 501}  # a URL signed for GET only answers HEAD with 403


class _TransientError(Exception):
    """Worth another try: a cut, a time-out, 5xx or 429."""

    def __init__(self, reason: str, *, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class _Answer:
    """A response and the connection that it occupies until it is read or dropped."""

    def __init__(
        self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection
    ) -> None:
        self.response = response
        self.status = response.status
        self.header = response.getheader
        self._connection = connection

    def finish(self) -> None:
        """Read a small rest so that the connection can be used again, or drop it."""
        length = self.response.length
        try:
            if length is not None and length <= 1 << 16:
                self.response.read()
                return
        except (OSError, http.client.HTTPException):
            pass
        self.drop()

    def drop(self) -> None:
        """Close the connection: the rest of this answer must not meet the next request."""
        self.response.close()
        self._connection.close()


class HttpStore:
    """Objects at HTTP(S) URLs.

    Args:
        timeout_s: Longest silence of a socket.
        num_retries: Failures in a row, without a byte of progress, before giving up.
        headers: Sent with every request to the host of the URL, for example authorization.
        longest_pause_s: Upper end of the random pause before a retry.

    Cost:
        One connection per thread and host, kept open; a 256 KiB buffer per running download.

    Guarantee:
        What was written is one version of the object, complete, or an error was raised.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 30.0,
        num_retries: int = 6,
        headers: Mapping[str, str] | None = None,
        longest_pause_s: float = 10.0,
    ) -> None:
        self._timeout_s = timeout_s
        self._num_retries = num_retries
        self._headers = dict(headers or {})
        self._longest_pause_s = longest_pause_s
        # By process and thread: neither a fork nor a thread may share a connection.
        self._connections: dict[tuple[Any, ...], http.client.HTTPConnection] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._connections)

    def close(self) -> None:
        """Close the kept connections; safe to call twice. A later request opens new ones."""
        _close_all(self._connections)

    def size(self, url: str) -> tuple[int, str | None]:
        """Return length and version: the ETag or else the date of last modification."""
        with stage(S.DATA_STORAGE):
            return self._retrying(url, lambda: self._size(url), lambda: 0)

    def fetch(self, url: str, destination: BinaryIO, *, etag: str | None) -> int:
        """Write the object to `destination`, resuming after cuts; return its length.

        Raises:
            ShardNotFoundError: 404 or 410.
            FetchError: The object is no longer version `etag`, or any other failure.
        """
        base = destination.tell()
        self._retrying(url, lambda: self._fetch(url, destination, etag, base), destination.tell)
        return destination.tell() - base

    def _retrying(self, url: str, call: Callable[[], T], progress: Callable[[], int]) -> T:
        import tenacity  # noqa: PLC0415 - costs more than this package to import

        failures = 0
        reached = progress()

        def stop(_state: RetryCallState) -> bool:
            nonlocal failures, reached
            failures = failures + 1 if progress() <= reached else 1
            reached = progress()
            return failures > self._num_retries

        jitter = tenacity.wait_random_exponential(multiplier=0.1, max=self._longest_pause_s)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return max(jitter(state), getattr(error, "wait_s", 0.0))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_TransientError),
            stop=stop,
            wait=wait,
            reraise=True,
        )
        try:
            return retrying(call)
        except _TransientError as error:
            raise FetchError(
                f"{redact(url)}: {error}, {failures} times in a row; is the origin up and the "
                "link able to carry this many readers?"
            ) from error.__cause__

    def _size(self, url: str) -> tuple[int, str | None]:
        answer = self._request("HEAD", url, {})
        answer.finish()
        if answer.status in _NO_HEAD:
            answer = self._request("GET", url, {"Range": "bytes=0-0"})
            answer.finish()
        if answer.status not in {200, 206}:
            _refuse(url, answer)
        total = answer.header("Content-Length")
        if answer.status == 206:
            total = (answer.header("Content-Range") or "").rpartition("/")[2]
        if total is None or not total.isdigit():
            raise FetchError(f"{redact(url)}: the origin does not say how long the object is")
        return int(total), _version(answer)

    def _fetch(self, url: str, destination: BinaryIO, etag: str | None, base: int) -> None:
        # Without a version nothing proves that the rest belongs to what is here already.
        if etag is None:
            _restart(destination, base)
        start = destination.tell() - base
        headers = {"Range": f"bytes={start}-"} if start else {}
        if etag is not None and etag.startswith('"'):
            headers["If-Match"] = etag
        elif etag is not None and not etag.startswith("W/"):
            headers["If-Unmodified-Since"] = etag
        with stage(S.DATA_STORAGE):
            answer = self._request("GET", url, headers)
        if answer.status == 412 or (answer.status < 300 and _differs(answer, etag)):
            answer.drop()
            raise ObjectChangedError(f"{redact(url)} changed while it was being downloaded")
        if answer.status == 416:
            answer.finish()
            _restart(destination, base)
            raise _TransientError("the object is shorter than announced")
        if answer.status not in {200, 206}:
            _refuse(url, answer)
        if answer.status == 206 and not _starts_at(answer, start):
            answer.drop()
            raise _TransientError("the origin answered with another range")
        if answer.status == 200 and start:  # the origin does not do ranges
            _restart(destination, base)
        self._copy(answer, destination)

    def _copy(self, answer: _Answer, destination: BinaryIO) -> None:
        response = answer.response
        expected = response.length
        buffer = memoryview(bytearray(_CHUNK))
        done = 0
        try:
            while True:
                try:
                    count = response.readinto(buffer)
                except (OSError, http.client.HTTPException) as error:
                    raise _TransientError(
                        f"{_what(error)} after {done} bytes of the body"
                    ) from error
                if not count:
                    break
                destination.write(buffer[:count])
                done += count
        except BaseException:
            answer.drop()
            raise
        if expected is not None and done < expected:
            answer.drop()
            raise _TransientError(f"the connection was cut after {done} of {expected} bytes")

    def _request(self, method: str, url: str, headers: Mapping[str, str]) -> _Answer:
        first = urlsplit(url)
        current = url
        for _ in range(_MAX_REDIRECTS + 1):
            parts = urlsplit(current)
            if parts.scheme not in {"http", "https"} or not parts.hostname:
                raise ConfigError(f"{redact(current)} is not an HTTP URL")
            all_headers = {"Accept-Encoding": "identity", "User-Agent": "trainpath", **headers}
            same_host = (parts.scheme, parts.hostname, parts.port) == (
                first.scheme,
                first.hostname,
                first.port,
            )
            if same_host:  # never hand credentials to the target of a redirect
                all_headers.update(self._headers)
                all_headers.update(_authorization(first))
            answer = self._exchange(method, parts, all_headers)
            location = answer.header("Location")
            if answer.status not in {301, 302, 303, 307, 308} or location is None:
                return answer
            answer.finish()
            current = urljoin(current, location)
        raise FetchError(f"{redact(url)}: more than {_MAX_REDIRECTS} redirects")

    def _exchange(self, method: str, parts: SplitResult, headers: Mapping[str, str]) -> _Answer:
        """Send one request, once more at once if a kept connection turns out to be dead."""
        while True:
            connection, target, kept = self._connection(parts)
            try:
                connection.request(method, target, headers=dict(headers))
                response = connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                connection.close()
                raise FetchError(f"{parts.hostname}: {error.verify_message}") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if kept and isinstance(error, (ConnectionError, http.client.BadStatusLine)):
                    continue
                raise _TransientError(f"{_what(error)} from {parts.hostname}") from error
            answer = _Answer(response, connection)
            if answer.status >= 500 or answer.status in _RETRIED:
                wait_s = _retry_after_s(answer)
                reason = f"answer {answer.status} {answer.response.reason}"
                answer.finish()
                if method == "HEAD" and answer.status == 501:
                    return answer
                raise _TransientError(reason, wait_s=wait_s)
            return answer

    def _connection(self, parts: SplitResult) -> tuple[http.client.HTTPConnection, str, bool]:
        """Return a connection of this thread and process, the request target, and if it is old."""
        host = parts.hostname or ""
        port = parts.port or (443 if parts.scheme == "https" else 80)
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
        query = quote(parts.query, safe="%=&?/:@!$'()*+,;~[]|")
        target = f"{path}?{query}" if query else path
        proxy = _proxy(parts.scheme, f"{host}:{port}")
        if proxy is not None and parts.scheme == "http":
            target = f"http://{host}:{port}{target}"
        key = (os.getpid(), threading.get_ident(), parts.scheme, host, port)
        connection = self._connections.get(key)
        if connection is None:
            connection = _connect(parts.scheme, host, port, proxy, self._timeout_s)
            self._connections[key] = connection
        return connection, target, connection.sock is not None


def _close_all(connections: dict[tuple[Any, ...], http.client.HTTPConnection]) -> None:
    while connections:
        try:
            connections.popitem()[1].close()
        except (KeyError, OSError):
            continue


def _connect(
    scheme: str, host: str, port: int, proxy: SplitResult | None, timeout_s: float
) -> http.client.HTTPConnection:
    via_host, via_port = host, port
    if proxy is not None:
        via_host, via_port = proxy.hostname or "", proxy.port or 80
    if scheme == "http":
        return http.client.HTTPConnection(via_host, via_port, timeout=timeout_s)
    connection = http.client.HTTPSConnection(
        via_host, via_port, timeout=timeout_s, context=ssl.create_default_context()
    )
    if proxy is not None:
        connection.set_tunnel(host, port, headers=_authorization(proxy, "Proxy-Authorization"))
    return connection


def _proxy(scheme: str, host: str) -> SplitResult | None:
    proxies = getproxies()
    url = proxies.get(scheme) or proxies.get("all")
    if not url or proxy_bypass(host):
        return None
    return urlsplit(url if "://" in url else f"http://{url}")


def _authorization(parts: SplitResult, header: str = "Authorization") -> dict[str, str]:
    if parts.username is None:
        return {}
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {header: f"Basic {base64.b64encode(pair.encode()).decode()}"}


def _version(answer: _Answer) -> str | None:
    return answer.header("ETag") or answer.header("Last-Modified")


def _restart(destination: BinaryIO, base: int) -> None:
    destination.seek(base)
    destination.truncate()


def _differs(answer: _Answer, etag: str | None) -> bool:
    """Say whether an answer is another version; origins may ignore the conditions we send."""
    seen = _version(answer)
    return etag is not None and seen is not None and seen != etag


def _starts_at(answer: _Answer, start: int) -> bool:
    return (answer.header("Content-Range") or "").startswith(f"bytes {start}-")


def _refuse(url: str, answer: _Answer) -> None:
    answer.finish()
    if answer.status in {404, 410}:
        raise ShardNotFoundError(
            f"{redact(url)} does not exist (the origin answered {answer.status}); "
            "check the URL and its range of numbers"
        )
    hint = "; are the credentials right and not expired?" if answer.status in {401, 403} else ""
    raise FetchError(
        f"{redact(url)}: the origin answered {answer.status} {answer.response.reason}{hint}"
    )


def _retry_after_s(answer: _Answer) -> float:
    value = answer.header("Retry-After")
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return 0.0
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)


def _what(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no byte within the time-out"
    return f"{type(error).__name__}: {error}"
