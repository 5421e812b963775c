"""The HTTP store against a server that misbehaves: right bytes or one clear error."""

from __future__ import annotations

import io
import shutil
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trainpath.cache import HttpStore
from trainpath.cache.download import ObjectChangedError
from trainpath.errors import ConfigError, FetchError, ShardNotFoundError
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import StageRecorder, recording
from trainpath.testing import Fault


@pytest.fixture
def store():
    """A store that gives up soon."""
    made = HttpStore(timeout_s=0.3, num_retries=3, longest_pause_s=0.02)
    yield made
    made.close()


def get(store, url):
    """Return the bytes of `url`, by both calls of a store."""
    destination = io.BytesIO()
    _, etag = store.size(url)
    assert store.fetch(url, destination, etag=etag) == destination.tell()
    return destination.getvalue()


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (Fault(kind="cut", after_bytes=30_000), 2),
        (Fault(kind="cut", after_bytes=30_000, times=8), 9),
        (Fault(kind="cut", after_bytes=0), 2),
        (Fault(kind="reset", after_bytes=50_000), 2),
        (Fault(kind="reset"), 2),
        (Fault(kind="status", status=500, times=3), 4),
        (Fault(kind="status", status=503), 2),
        (Fault(kind="status", status=429, retry_after_s=0), 2),
        (Fault(kind="hang", after_bytes=10_000), 2),
        (Fault(kind="hang"), 2),
        (Fault(kind="length", extra_bytes=5), 2),
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else str(value),
)
def test_recovers(fault, requests, store, put, server):
    """A passing fault costs another request, never a wrong byte."""
    url, data = put(size=300_000)
    server.inject("*", fault)

    assert get(store, url) == data

    assert server.gets() <= requests + 1
    assert server.gets() > 1


def test_resumes_where_it_was_cut(store, put, server):
    """After a cut only the missing part is asked for."""
    url, data = put(size=3_000_000)
    server.inject("*", Fault(kind="cut", after_bytes=2_000_000))

    assert get(store, url) == data

    assert server.gets() == 2
    assert server.bytes_sent() < 3_100_000


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(kind="status", status=500, times=None), "answer 500 .*4 times in a row"),
        (Fault(kind="status", status=403, times=None), "answered 403 .*credentials"),
        (Fault(kind="hang", times=None), "no byte within the time-out.*4 times in a row"),
        (Fault(kind="reset", times=None), "4 times in a row"),
    ],
    ids=["500", "403", "hang", "reset"],
)
def test_gives_up(fault, message, store, put, server):
    """A fault that stays is one error that says what happened, without secrets of the URL."""
    url, _ = put()
    server.inject("*", fault)
    secret = url.replace("//", "//user:secret@") + "?token=secret"

    with pytest.raises(FetchError, match=message) as caught:
        store.fetch(secret, io.BytesIO(), etag=None)

    assert "secret" not in str(caught.value)
    assert "a/x.tar" in str(caught.value)


def test_refusals_are_not_retried(store, put, server):
    """404 is a ShardNotFoundError at the first answer, also a FileNotFoundError."""
    put()

    with pytest.raises(ShardNotFoundError, match=r"b/no\.tar does not exist .*404") as caught:
        store.size(server.url_for("b/no.tar"))

    assert isinstance(caught.value, FileNotFoundError)
    assert server.requests() == 1


def test_retry_after_is_honoured(store, put, server):
    """The wait that the origin asks for is kept before the next request."""
    url, data = put()
    server.inject("*", Fault(kind="status", status=429, retry_after_s=1))
    began = time.monotonic()

    assert get(store, url) == data

    assert time.monotonic() - began >= 1.0


def test_changed_object(store, put, server):
    """An object that changes between length and body is refused, not mixed."""
    url, _ = put()
    _, etag = store.size(url)
    server.put("a/x.tar", b"other" * 50)

    with pytest.raises(ObjectChangedError, match="changed while"):
        store.fetch(url, io.BytesIO(), etag=etag)


def test_changed_in_the_middle(store, put, server):
    """An object that changes between a cut and the resumption is refused, not mixed."""
    url, _ = put(size=300_000)
    _, etag = store.size(url)
    server.inject("*", Fault(kind="cut", after_bytes=100_000))
    server.inject("*", Fault(kind="changed"))

    with pytest.raises(ObjectChangedError, match="changed while"):
        store.fetch(url, io.BytesIO(), etag=etag)


def test_keeps_its_connection(store, put, server):
    """Ten objects need one connection."""
    urls = [put(f"{index}.tar")[0] for index in range(10)]

    for url in urls:
        get(store, url)

    assert server.stats()["connections"] == 1


def test_stages(store, put, server):
    """Waiting for the answer is data.storage, the bytes are data.network."""
    url, _ = put(size=100_000)
    server.latency_s = 0.05
    server.rate_bytes_per_s = 500_000
    recorder = StageRecorder()

    with recording(recorder):
        recorder.switch(S.DATA_DECODE)
        store.fetch(url, io.BytesIO(), etag=None)
        recorder.switch(-1)

    spent = dict.fromkeys(range(len(S.SEGMENTS)), 0)
    for segment, start, end in recorder.take():
        spent[segment] += end - start
    assert spent[S.DATA_STORAGE] >= 50e6
    # the caller of the store says what its body is charged to
    assert sum(spent.values()) - spent[S.DATA_STORAGE] >= 100e6


@pytest.mark.parametrize("url", ["ftp://host/x", "http:///x"])
def test_not_http(url, store):
    """A URL of another kind is a ConfigError."""
    with pytest.raises(ConfigError, match="is not an HTTP URL"):
        store.size(url)


class Odd(BaseHTTPRequestHandler):
    """An origin with the habits of some real ones."""

    protocol_version = "HTTP/1.1"
    seen: list

    def log_message(self, *args):
        """Say nothing."""

    def do_HEAD(self):
        self.seen.append((self.command, self.path, dict(self.headers)))
        if self.path.startswith("/redirect"):
            self.answer(302, {"Location": f"http://localhost:{self.server.server_port}/target"})
        elif self.path.startswith("/loop"):
            self.answer(302, {"Location": "/loop"})
        elif self.path.startswith("/signed"):
            self.answer(403, {})
        elif self.path.startswith("/endless"):
            self.answer(200, {}, length=None)
        else:
            self.answer(200, {"Last-Modified": "Tue, 01 Dec 2026 00:00:00 GMT"}, length=5)

    def do_GET(self):
        self.seen.append((self.command, self.path, dict(self.headers)))
        if self.path.startswith("/redirect"):
            self.answer(302, {"Location": f"http://localhost:{self.server.server_port}/target"})
            return
        body = b"hello"
        if self.headers.get("Range") == "bytes=0-0":
            self.answer(206, {"Content-Range": "bytes 0-0/5", "ETag": '"e"'}, length=1)
            body = b"h"
        else:
            self.answer(200, {"ETag": '"e"'} if "signed" in self.path else {}, length=5)
        self.wfile.write(body)

    def answer(self, status, headers, length=0):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()


@pytest.fixture
def https(tmp_path, monkeypatch):
    """An `Odd` origin behind TLS, whose certificate `SSL_CERT_FILE` makes trusted."""
    if shutil.which("openssl") is None:
        pytest.skip("making a certificate needs openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate}"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    handler = type("Seen", (Odd,), {"seen": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    running.socket = context.wrap_socket(running.socket, server_side=True)
    running.handle_error = lambda *_: None
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    yield f"https://localhost:{running.server_port}"
    running.shutdown()
    running.server_close()
    thread.join()


def test_https(store, https, monkeypatch):
    """HTTPS is checked against the usual certificates; an unknown one is refused at once."""
    assert get(store, f"{https}/signed") == b"hello"

    monkeypatch.delenv("SSL_CERT_FILE")
    stranger = HttpStore(timeout_s=5)
    with pytest.raises(FetchError, match=r"localhost: .*self-signed certificate"):
        stranger.size(f"{https}/signed")
    stranger.close()


@pytest.fixture
def odd():
    """An `Odd` origin; yields its address and the requests that it has seen."""
    handler = type("Seen", (Odd,), {"seen": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}", handler.seen
    running.shutdown()
    running.server_close()
    thread.join()


def test_url_signed_for_get_only(store, odd):
    """Where HEAD is refused, one byte by GET tells the length."""
    assert store.size(f"{odd[0]}/signed") == (5, '"e"')
    assert get(store, f"{odd[0]}/signed") == b"hello"


def test_no_etag(store, odd):
    """Without an ETag the date of last modification is the version, and is asserted."""
    assert get(store, f"{odd[0]}/plain") == b"hello"
    assert odd[1][-1][2]["If-Unmodified-Since"] == "Tue, 01 Dec 2026 00:00:00 GMT"


def test_redirect_to_another_host_gets_no_credentials(odd):
    """Redirects are followed; user, password and headers stay with the host of the URL."""
    store = HttpStore(headers={"X-Api-Key": "secret"})
    url = f"{odd[0]}/redirect".replace("//", "//user:secret@")

    assert get(store, url) == b"hello"

    store.close()
    first, target = odd[1][0], odd[1][1]
    assert first[2]["Authorization"].startswith("Basic ")
    assert first[2]["X-Api-Key"] == "secret"
    assert target[1] == "/target"
    assert "Authorization" not in target[2]
    assert "X-Api-Key" not in target[2]


def test_redirect_loop(store, odd):
    """A loop of redirects is an error."""
    with pytest.raises(FetchError, match="more than 5 redirects"):
        store.size(f"{odd[0]}/loop")


def test_unknown_length(store, odd):
    """An origin that does not tell the length is an error that says so."""
    with pytest.raises(FetchError, match="does not say how long"):
        store.size(f"{odd[0]}/endless")


def test_proxy(store, odd, monkeypatch):
    """`http_proxy` is used, except for the hosts of `no_proxy`."""
    monkeypatch.setenv("http_proxy", odd[0])
    monkeypatch.setenv("no_proxy", "")

    assert store.size("http://shards.invalid/x.tar")[0] == 5

    assert odd[1][0][1] == "http://shards.invalid:80/x.tar"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert store.size(f"{odd[0]}/direct")[0] == 5
    assert odd[1][1][1] == "/direct"


def test_appends_to_what_is_there(store, put, server):
    """A destination that is not empty is continued from where it stands, after cuts too."""
    url, data = put(size=300_000)
    server.inject("*", Fault(kind="cut", after_bytes=100_000))
    destination = io.BytesIO()
    destination.write(b"before")

    assert store.fetch(url, destination, etag=None) == len(data)

    assert destination.getvalue() == b"before" + data


def test_names_are_quoted(store, put):
    """Spaces, unicode, percent signs and `..` in names reach the origin as they are."""
    for name in ["a b.tar", "\u00fc/\u4e2d.tar", "p%25.tar", "x+y&z=1.tar"]:
        url, data = put(name)
        assert get(store, url) == data
