"""`FaultyStore`: delays and errors in front of a store that works."""

from __future__ import annotations

import io
import pickle
import shutil
import time
import urllib.error
import urllib.request

import pytest

from trainpath.errors import ConfigError, FetchError, ShardNotFoundError
from trainpath.testing import FaultyStore, ObjectServer

DATA = bytes(range(256)) * 1000


class PlainStore:
    """A store on urllib, small and real."""

    def size(self, url):
        """Ask by HEAD."""
        request = urllib.request.Request(url, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return int(answer.headers["Content-Length"]), answer.headers["ETag"]
        except urllib.error.HTTPError as error:
            error.close()
            raise ShardNotFoundError(url) from error

    def fetch(self, url, destination, *, etag):
        """Get it, if it still has this ETag."""
        request = urllib.request.Request(url, headers={} if etag is None else {"If-Match": etag})
        with urllib.request.urlopen(request, timeout=10) as answer:
            shutil.copyfileobj(answer, destination, 10_000)
        return destination.tell()


@pytest.fixture
def server():
    """A server that holds one object."""
    with ObjectServer() as running:
        running.put("x", DATA)
        yield running


def test_without_faults_it_is_the_store(server):
    """Sizes, bytes and the store's own errors pass through; calls are noted in order."""
    store = FaultyStore(PlainStore())
    url, target = server.url_for("x"), io.BytesIO()

    size, etag = store.size(url)
    assert (size, store.fetch(url, target, etag=etag)) == (len(DATA), len(DATA))
    assert target.getvalue() == DATA
    with pytest.raises(ShardNotFoundError):
        store.size(server.url_for("missing"))
    assert store.calls == [("size", url), ("fetch", url), ("size", server.url_for("missing"))]


def test_errors_come_one_per_call(server):
    """Each call raises the next error; None lets one pass; then all pass."""
    first, second = FetchError("one"), TimeoutError("two")
    store = FaultyStore(PlainStore(), errors=[first, None, second])
    url = server.url_for("x")

    with pytest.raises(FetchError) as caught:
        store.size(url)
    assert caught.value is first
    assert store.size(url)[0] == len(DATA)
    with pytest.raises(TimeoutError):
        store.fetch(url, io.BytesIO(), etag=None)
    assert server.gets("x") == 0
    store.errors.append(FetchError("three"))
    with pytest.raises(FetchError, match="three"):
        store.size(url)
    assert store.fetch(url, io.BytesIO(), etag=None) == len(DATA)


@pytest.mark.parametrize("after", [1, 9_999, 10_000, 123_456, 10_000_000])
def test_a_fetch_may_fail_in_the_middle(server, after):
    """A failing fetch has written exactly the first bytes before it raises."""
    store = FaultyStore(PlainStore(), errors=[FetchError("cut")], after_bytes=after)
    target = io.BytesIO()

    with pytest.raises(FetchError, match="cut"):
        store.fetch(server.url_for("x"), target, etag=None)

    assert target.getvalue() == DATA[:after]


def test_delays(server):
    """Every call waits first; the delay may be changed at any time."""
    store = FaultyStore(PlainStore(), delay_s=0.05)

    started = time.monotonic()
    store.size(server.url_for("x"))
    assert time.monotonic() - started >= 0.05
    store.delay_s = 1000
    store.delay_s = 0.0
    assert store.size(server.url_for("x"))[0] == len(DATA)


def test_it_can_be_pickled(server):
    """A copy in another process has the same faults to come."""
    store = FaultyStore(PlainStore(), delay_s=0.0, errors=[FetchError("once")])

    copy = pickle.loads(pickle.dumps(store))

    with pytest.raises(FetchError, match="once"):
        copy.size(server.url_for("x"))
    assert copy.size(server.url_for("x"))[0] == len(DATA)


@pytest.mark.parametrize("wrong", [{"delay_s": -1}, {"after_bytes": -1}])
def test_bad_arguments(wrong):
    """Negative delays and lengths are refused."""
    with pytest.raises(ConfigError, match="must not be negative"):
        FaultyStore(PlainStore(), **wrong)
