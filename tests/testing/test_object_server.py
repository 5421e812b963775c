"""`ObjectServer`: what clients get from it, what it counts, and how it misbehaves on demand."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pytest

from trainpath.errors import ConfigError
from trainpath.testing import Fault, ObjectServer

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(params=["memory", "directory"])
def server(request, tmp_path):
    """An empty server of either kind."""
    root = None if request.param == "memory" else tmp_path
    with ObjectServer(root) as running:
        yield running


class Client(http.client.HTTPConnection):
    """A keep-alive client of a server."""

    def __init__(self, server):
        super().__init__(urlsplit(server.url).netloc, timeout=20)

    def ask(self, method, path, body=None, **headers):
        """Send a request; return status, headers and body."""
        names = {key.replace("_", "-"): value for key, value in headers.items()}
        self.request(method, path, body, names)
        answer = self.getresponse()
        return answer.status, answer.headers, answer.read()


def get(server, name, **headers):
    """Ask for an object on a connection of its own."""
    with closing(Client(server)) as client:
        return client.ask("GET", f"/{name}", **headers)


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-99", 10, 99),
        ("bytes=1048570-", 1048570, 1048575),
        ("bytes=1048570-9999999", 1048570, 1048575),
        ("bytes=-7", 1048569, 1048575),
        ("bytes=-9999999", 0, 1048575),
    ],
)
def test_ranges(server, header, first, last):
    """A single range gets exactly its bytes, and says which they are."""
    server.put("a/b.bin", DATA)

    status, headers, body = get(server, "a/b.bin", Range=header)

    assert status == 206
    assert headers["Content-Range"] == f"bytes {first}-{last}/{len(DATA)}"
    assert headers["Content-Length"] == str(last - first + 1)
    assert body == DATA[first : last + 1]


@pytest.mark.parametrize("header", ["bytes=1048576-", "bytes=2000000-2000001", "bytes=-0"])
def test_a_range_behind_the_end(server, header):
    """A range that holds no byte of the object is answered by 416 with its size."""
    server.put("x", DATA)

    status, headers, body = get(server, "x", Range=header)

    assert (status, body) == (416, b"")
    assert headers["Content-Range"] == f"bytes */{len(DATA)}"


@pytest.mark.parametrize("header", ["bytes=5-2", "bytes=0-1,4-5", "lines=0-1", "bytes=-", "bytes"])
def test_what_is_no_single_range_is_ignored(server, header):
    """Anything but a single range of bytes gets the whole object."""
    server.put("x", b"0123456789")

    assert get(server, "x", Range=header)[::2] == (200, b"0123456789")


def test_head_and_get_agree(server):
    """HEAD says what GET would, without the body; GET sends every byte."""
    server.put("x", DATA)
    server.put("empty", b"")

    with closing(Client(server)) as client:
        for name, data in [("x", DATA), ("empty", b"")]:
            head, got = client.ask("HEAD", f"/{name}"), client.ask("GET", f"/{name}")

            assert (head[0], head[2], got[0], got[2]) == (200, b"", 200, data)
            for key in ("Content-Length", "ETag", "Last-Modified", "Accept-Ranges"):
                assert head[1][key] == got[1][key]
            assert got[1]["Content-Length"] == str(len(data))
        assert client.ask("GET", "/missing")[0] == 404
        assert client.ask("HEAD", "/missing")[::2] == (404, b"")


def test_the_etag_is_that_of_the_content(tmp_path):
    """Equal bytes have equal ETags wherever they are kept; other bytes have another one."""
    (tmp_path / "file").write_bytes(DATA)
    with ObjectServer() as memory, ObjectServer(tmp_path) as directory:
        tag = memory.put("y", DATA)
        assert get(memory, "y")[1]["ETag"] == get(directory, "file")[1]["ETag"] == tag
        (tmp_path / "file").write_bytes(DATA[:-1] + b"!")  # behind the back of the server
        changed = get(directory, "file")

    assert changed[1]["ETag"] != tag
    assert changed[2][-1:] == b"!"


def test_preconditions(server):
    """If-Match, If-None-Match and If-Range compare the ETag."""
    tag = server.put("x", b"0123456789")

    assert get(server, "x", If_Match=tag)[0] == 200
    assert get(server, "x", If_Match=f'"other", {tag}')[0] == 200
    assert get(server, "x", If_Match='"other"')[0] == 412
    assert get(server, "x", If_Match='"other"', Range="bytes=0-1")[0] == 412
    assert get(server, "x", If_None_Match=tag)[::2] == (304, b"")
    assert get(server, "x", If_None_Match='"other"')[0] == 200
    assert get(server, "x", If_Range=tag, Range="bytes=0-1")[::2] == (206, b"01")
    assert get(server, "x", If_Range='"other"', Range="bytes=0-1")[::2] == (200, b"0123456789")


def test_put_and_delete(server):
    """PUT creates and replaces, also in chunks and on conditions; DELETE removes."""
    with closing(Client(server)) as client:
        status, headers, _ = client.ask("PUT", "/a/new", DATA)
        assert (status, get(server, "a/new")[2]) == (200, DATA)
        first = headers["ETag"]
        assert client.ask("PUT", "/a/new", b"x", If_None_Match="*")[0] == 412
        assert client.ask("PUT", "/a/new", b"x", If_Match='"other"')[0] == 412
        assert client.ask("PUT", "/a/new", b"chunks" * 3, If_Match=first)[0] == 200
        assert client.ask("PUT", "/b", iter([b"in ", b"chunks"]))[0] == 200
        assert get(server, "a/new")[2] == b"chunks" * 3
        assert get(server, "b")[2] == b"in chunks"
        assert client.ask("DELETE", "/b")[0] == 204
        assert client.ask("DELETE", "/b")[0] == 404
        assert get(server, "b")[0] == 404
        assert server.stats()["objects"]["a/new"]["PUT"]["bytes_received"] == len(DATA) + 20


def test_an_upload_that_breaks_off_changes_nothing(server, tmp_path):
    """When the client leaves in the middle of a PUT the old object stays, and no file more."""
    server.put("x", b"old")
    files = sorted(tmp_path.iterdir())
    with closing(socket.create_connection(urlsplit(server.url).netloc.split(":"))) as client:
        client.sendall(b"PUT /x HTTP/1.1\r\nContent-Length: 100\r\n\r\nonly this")
        wait_until(lambda: server.stats()["bytes_received"] == 9)
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) == b""

    assert get(server, "x")[2] == b"old"
    assert sorted(tmp_path.iterdir()) == files


def wait_until(condition):
    """Wait, with a deadline, until `condition()` holds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_put_is_atomic(server):
    """Readers see one version or the other while an object is replaced again and again."""
    versions = [b"a" * 300_000, b"b" * 400_000]
    server.put("x", versions[0])
    stop = threading.Event()

    def write():
        with closing(Client(server)) as client:
            while not stop.is_set():
                for version in versions:
                    assert client.ask("PUT", "/x", version)[0] == 200

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        bodies = {get(server, "x")[2] for _ in range(40)}
        stop.set()
        writing.result(20)

    assert bodies <= set(versions)


def test_fsspec_lists_and_reads(server):
    """The http file system of fsspec lists directories, finds by pattern, reads and writes."""
    for name in ("top.tar", "shards/a-0.tar", "shards/a-1.tar", "shards/deep/b 2.tar"):
        server.put(name, name.encode())
    web = fsspec.filesystem("http", skip_instance_cache=True)
    shards = f"{server.url}/shards"

    assert sorted(web.ls(server.url, detail=False)) == [
        f"{server.url}/shards/",
        f"{server.url}/top.tar",
    ]
    assert web.glob(f"{shards}/a-*.tar") == [f"{shards}/a-0.tar", f"{shards}/a-1.tar"]
    assert web.cat(server.url_for("shards/deep/b 2.tar")) == b"shards/deep/b 2.tar"
    assert web.info(server.url_for("top.tar"))["size"] == 7
    with web.open(server.url_for("top.tar"), "rb", block_size=3) as file:
        file.seek(4)
        assert file.read() == b"tar"
    assert not web.exists(f"{server.url}/none/")


def test_s3_listing(server):
    """ListObjectsV2 pages through keys, and folds those behind a delimiter."""
    for number in range(7):
        server.put(f"bucket/p/{number}&.tar", b"x" * number)
    server.put("bucket/q", b"")
    space = {"s3": "http://s3.amazonaws.com/doc/2006-03-01/"}

    def page(query):
        return ET.fromstring(get(server, f"bucket?list-type=2&{query}")[2])

    def texts(root, path):
        return [element.text for element in root.findall(path, space)]

    keys, token = [], ""
    while True:
        root = page(f"prefix=p/&max-keys=3{token}")
        keys += texts(root, "s3:Contents/s3:Key")
        if texts(root, "s3:IsTruncated") == ["false"]:
            break
        token = f"&continuation-token={root.find('s3:NextContinuationToken', space).text}".replace(
            "&.tar", "%26.tar"
        )
    folded = page("delimiter=/")

    assert keys == [f"p/{number}&.tar" for number in range(7)]
    assert texts(page("prefix=p/"), "s3:Contents/s3:Size") == [str(number) for number in range(7)]
    assert texts(folded, "s3:CommonPrefixes/s3:Prefix") == ["p/"]
    assert texts(folded, "s3:Contents/s3:Key") == ["q"]


def test_thousands_of_requests_on_one_connection(server):
    """One keep-alive connection serves thousands of requests, each counted."""
    server.put("x", b"0123456789")

    with closing(Client(server)) as client:
        for number in range(2000):
            first = number % 10
            body = client.ask("GET", "/x", Range=f"bytes={first}-{first}")[2]
            assert body == b"%d" % first

    assert server.gets("x") == server.requests() == server.bytes_sent("x") == 2000
    assert server.stats()["connections"] == 1


def test_counts_are_exact_under_concurrency(server):
    """Requests and bytes of many clients at once are counted by object and method."""
    server.put("x", DATA)
    server.put("y", b"123")

    def use(_):
        with closing(Client(server)) as client:
            for _ in range(20):
                assert client.ask("GET", "/x")[2] == DATA
                assert client.ask("HEAD", "/y")[0] == 200

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(use, range(8)))

    assert (server.gets("x"), server.gets("y"), server.requests("y")) == (160, 0, 160)
    assert server.bytes_sent("x") == server.bytes_sent() == 160 * len(DATA)
    assert server.stats()["objects"]["y"]["HEAD"]["statuses"] == {"200": 160}
    server.reset()
    assert server.requests() == server.bytes_sent() == 0


def test_the_rate_is_shared_and_exact(server):
    """Several connections together get the rate: never more, and hardly less."""
    server.put("x", DATA)
    server.rate_bytes_per_s = 20e6

    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: get(server, "x"), range(4)))
    seconds = time.monotonic() - started

    assert seconds >= 4 * len(DATA) / 20e6 * 0.99
    assert seconds < 20 * 4 * len(DATA) / 20e6  # it is limited, not stuck
    server.rate_bytes_per_s = None
    assert server.rate_bytes_per_s is None


def test_the_rate_may_change_while_a_body_is_sent(server):
    """A body that would take minutes arrives soon after the limit is lifted."""
    server.put("x", DATA)
    server.rate_bytes_per_s = 5_000

    with ThreadPoolExecutor(1) as pool:
        body = pool.submit(get, server, "x")
        wait_until(lambda: server.bytes_sent("x") > 0)
        server.rate_bytes_per_s = None
        assert body.result(20)[2] == DATA


def test_latency_comes_before_each_answer(server):
    """Each request waits; requests on different connections wait at the same time."""
    server.put("x", b"x")
    server.latency_s = 0.05

    started = time.monotonic()
    with closing(Client(server)) as client:
        for _ in range(4):
            client.ask("GET", "/x")

    assert time.monotonic() - started >= 0.2
    assert server.latency_s == 0.05


def test_error_statuses_come_as_often_as_asked(server):
    """A status fault befalls matching GETs only, after `skip`, `times` times."""
    server.put("a-0.tar", b"data")
    server.put("b-0.tar", b"data")
    server.inject("a-*.tar", Fault(kind="status", status=503, times=2, skip=1))

    with closing(Client(server)) as client:
        assert client.ask("HEAD", "/a-0.tar")[0] == 200
        assert [client.ask("GET", "/a-0.tar")[0] for _ in range(4)] == [200, 503, 503, 200]
        assert client.ask("GET", "/b-0.tar")[0] == 200
        server.inject("*", Fault(kind="status", status=429, retry_after_s=2, method=None))
        status, headers, _ = client.ask("HEAD", "/b-0.tar")

    assert (status, headers["Retry-After"]) == (429, "2")
    assert server.stats()["connections"] == 1
    assert server.stats()["objects"]["a-0.tar"]["GET"]["statuses"] == {"200": 2, "503": 2}


def test_a_cut_body(server):
    """A cut body has the right length announced and ends after `after_bytes` bytes."""
    server.put("x", DATA)
    server.inject("x", Fault(kind="cut", after_bytes=700_000))

    with pytest.raises(http.client.IncompleteRead) as caught:
        get(server, "x")

    assert caught.value.partial == DATA[:700_000]
    assert caught.value.expected == len(DATA) - 700_000
    assert server.bytes_sent("x") == 700_000
    assert get(server, "x")[2] == DATA


def test_a_reset_connection(server):
    """A reset shows as a reset, in the body or instead of an answer."""
    server.put("x", DATA)
    server.inject("x", Fault(kind="reset"))
    server.inject("x", Fault(kind="reset", after_bytes=500_000))

    for _ in range(2):
        with pytest.raises((ConnectionResetError, http.client.RemoteDisconnected)):
            get(server, "x")
    assert get(server, "x")[2] == DATA


@pytest.mark.parametrize("extra", [5, -5])
def test_a_wrong_length(server, extra):
    """A wrong Content-Length is announced; the bytes are those of the object."""
    server.put("x", b"0123456789")
    server.inject("x", Fault(kind="length", extra_bytes=extra))

    with closing(Client(server)) as client:
        client.request("GET", "/x")
        answer = client.getresponse()
        assert answer.headers["Content-Length"] == str(10 + extra)
        if extra > 0:
            with pytest.raises(http.client.IncompleteRead):
                answer.read()
        else:
            assert answer.read() == b"01234"
    assert get(server, "x")[2] == b"0123456789"


def test_an_object_that_changes_between_requests(server):
    """From the changing request on there are other bytes and another ETag, of equal length."""
    server.put("x", DATA)
    server.inject("x", Fault(kind="changed", skip=1))

    before, after, later = (get(server, "x") for _ in range(3))

    assert before[2] == DATA
    assert after[2] == later[2] == DATA[:-1] + b"\x00"
    assert after[1]["ETag"] == later[1]["ETag"] != before[1]["ETag"]
    assert get(server, "x", If_Match=before[1]["ETag"])[0] == 412
    server.put("x", b"new")
    assert get(server, "x")[2] == b"new"


def test_a_hang(server):
    """A hang sends nothing more; with `pause_s` the answer goes on afterwards."""
    server.put("x", DATA)
    server.inject("x", Fault(kind="hang", pause_s=0.05, after_bytes=1000))
    server.inject("x", Fault(kind="hang", after_bytes=1000))

    assert get(server, "x")[2] == DATA
    with closing(Client(server)) as client:
        client.timeout = 0.3
        client.request("GET", "/x")
        answer = client.getresponse()
        assert answer.read(1000) == DATA[:1000]
        with pytest.raises(TimeoutError):
            answer.read(1)


def test_close_ends_hanging_connections_and_all_threads():
    """After close no thread is left, even of connections that hang; it may be called twice."""
    server = ObjectServer(latency_s=1000)
    client = Client(server)
    client.request("GET", "/x")
    idle = socket.create_connection(urlsplit(server.url).netloc.split(":"))
    wait_until(lambda: server.stats()["connections"] == 2 and server.requests() == 1)
    names = [thread.name for thread in threading.enumerate()]
    assert len([name for name in names if name.startswith("trainpath-object-server")]) == 3

    server.close()
    server.close()

    with pytest.raises(http.client.RemoteDisconnected):
        client.getresponse()
    assert idle.recv(1) == b""
    for connection in (client, idle):
        connection.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("trainpath-object")]


@pytest.mark.parametrize(
    "path",
    ["/../secret", "/%2e%2e/secret", "/a/../../secret", "/a/%2e%2e/%2e%2e/secret", "/a//b", "/./a",
     "/link", "/linked/secret", "/%00", f"/{'n' * 300}"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_no_path_leaves_the_directory(tmp_path, path, method):
    """No name reads, writes or removes anything outside of the served directory."""
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (tmp_path / "secret").write_text("classified")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "linked").symlink_to(tmp_path)
    before = sorted(tmp_path.rglob("*"))

    with ObjectServer(root) as server, closing(Client(server)) as client:
        status, _, body = client.ask(method, path, b"new" if method == "PUT" else None)
        listing = client.ask("GET", "/")[2]

    assert status in {400, 404, 412}
    assert b"classified" not in body
    assert b"link" not in listing
    assert (tmp_path / "secret").read_text() == "classified"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"PUT /x HTTP/1.1\r\n\r\n", 411),
        (b"PUT /x HTTP/1.1\r\nContent-Length: -4\r\n\r\n", 400),
        (b"PUT /x HTTP/1.1\r\nContent-Length: four\r\n\r\n", 400),
        (b"PUT /x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"PUT /x/ HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 400),
        (b"POST /x HTTP/1.1\r\nContent-Length: 1\r\n\r\nx", 405),
        (b"PATCH /x HTTP/1.1\r\n\r\n", 501),
        (b"GET /?list-type=2&max-keys=many HTTP/1.1\r\n\r\n", 400),
        (b"POST /-/settings HTTP/1.1\r\nContent-Length: 1\r\n\r\n{", 400),
        (b"GET /-/none HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_bad_requests_get_an_error_status(server, request_, status):
    """A request that makes no sense is refused, and the server goes on."""
    with closing(socket.create_connection(urlsplit(server.url).netloc.split(":"))) as client:
        client.settimeout(10)
        client.sendall(request_)
        answer = client.recv(1000)

    assert answer.split()[1] == b"%d" % status
    server.put("y", b"fine")
    assert get(server, "y")[2] == b"fine"


def test_a_file_in_the_way_of_a_put(tmp_path):
    """A PUT below a file is a conflict, not a crash."""
    with ObjectServer(tmp_path) as server, closing(Client(server)) as client:
        assert client.ask("PUT", "/a", b"x")[0] == 200
        assert client.ask("PUT", "/a/b", b"x")[0] == 409
        assert client.ask("PUT", "/c/d", b"x")[0] == 200
        assert client.ask("PUT", "/c", b"x")[0] == 409


def test_an_upload_that_does_not_fit(tmp_path):
    """When a file cannot be written the client is told, and the old object stays."""
    with ObjectServer(tmp_path) as server, closing(Client(server)) as client:
        server.put("x", b"old")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            status = client.ask("PUT", "/x", DATA)[0]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        assert status == 507
        assert client.ask("GET", "/x")[2] == b"old"
        assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_error_inside_the_server_surfaces_at_close(tmp_path):
    """The client gets a 500, and close raises what went wrong: here, no file descriptors."""
    (tmp_path / "x").write_bytes(b"x")
    server = ObjectServer(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(Client(server)) as client:
        assert client.ask("GET", "/missing")[0] == 404  # connected
        resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
        try:
            status, _, text = client.ask("GET", "/x")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert status == 500
    assert b"Too many open files" in text
    with pytest.raises(OSError, match="Too many open files"):
        server.close()
    server.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ObjectServer("/no/such/directory"),
        lambda: ObjectServer(rate_bytes_per_s=0),
        lambda: ObjectServer(latency_s=-1),
        lambda: Fault(kind="explode"),
        lambda: Fault(kind="cut", times=0),
        lambda: Fault(kind="cut", after_bytes=-1),
        lambda: Fault(kind="status", status=200),
        lambda: Fault(kind="length", extra_bytes=0),
    ],
)
def test_bad_arguments(make):
    """Settings that make no sense are refused where they are given."""
    with pytest.raises(ConfigError):
        make()


@contextmanager
def command(*arguments, **options):
    """Run the server as a process; yield it and what its ready line says."""
    line = [sys.executable, "-m", "trainpath.testing.object_server", *arguments]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


def post(url, value=None):
    """POST JSON; return the JSON answered."""
    request = urllib.request.Request(url, json.dumps(value).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command(tmp_path, number):
    """The process serves a directory, is controlled over HTTP, and ends cleanly by signal."""
    (tmp_path / "x").write_bytes(b"0123456789")
    with command("--root", str(tmp_path), "--rate", "1e6", "--latency", "0.001") as (process, url):
        assert post(f"{url}/-/settings", {"latency_s": 0.002, "faults": [{"kind": "cut"}]}) == {
            "rate_bytes_per_s": 1e6,
            "latency_s": 0.002,
        }
        with (
            urllib.request.urlopen(f"{url}/x", timeout=10) as answer,
            pytest.raises(http.client.IncompleteRead),
        ):
            answer.read()
        with urllib.request.urlopen(f"{url}/x", timeout=10) as answer:
            assert answer.read() == b"0123456789"
        with urllib.request.urlopen(f"{url}/-/stats", timeout=10) as answer:
            stats = json.load(answer)
        assert stats["objects"]["x"]["GET"]["requests"] == 2
        assert stats["bytes_sent"] == 10
        assert post(f"{url}/-/reset") == {}
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(number)
        assert process.wait(10) == 0


def test_the_command_ends_with_its_parent(tmp_path):
    """With --exit-with-parent the process goes when its parent is killed."""
    script = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-m', 'trainpath.testing.object_server',\n"
        "                  '--exit-with-parent'])\n"
        "time.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    ) as parent:
        url = json.loads(parent.stdout.readline())["url"]
        os.kill(parent.pid, signal.SIGKILL)

    def refused():
        try:
            socket.create_connection(urlsplit(url).netloc.split(":")).close()
        except ConnectionError:
            return True
        return False

    wait_until(refused)


def test_it_needs_neither_torch_nor_pytest():
    """Importing the testing tools and the server imports neither torch nor pytest."""
    check = (
        "import sys, trainpath.testing, trainpath.testing.object_server\n"
        "trainpath.testing.ObjectServer, trainpath.testing.Fault, trainpath.testing.FaultyStore\n"
        "sys.exit(' '.join({'torch', 'pytest', 'fsspec'} & set(sys.modules)) or None)"
    )

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_command_says_what_is_wrong():
    """A directory that does not exist is one clear line and exit code 2."""
    line = [sys.executable, "-m", "trainpath.testing.object_server", "--root", "/no/such"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)

    assert ended.returncode == 2
    assert "/no/such is not a directory" in ended.stderr
    assert "Traceback" not in ended.stderr
