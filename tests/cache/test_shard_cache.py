"""One process and its cache: hits, versions, damage, names, errors, prefetch."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import pickle
import threading
import time

import pytest

from trainpath.cache import CacheStats, KeepUntilFull, ShardCache
from trainpath.cache.names import ObjectName
from trainpath.errors import ClosedError, ConfigError, FetchError, ShardNotFoundError
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import StageRecorder, recording
from trainpath.testing import Fault


class DictStore:
    """An origin that is a dict; `error` is raised instead of an answer."""

    def __init__(self, objects):
        self.objects = objects
        self.error = None
        self.calls = 0

    def size(self, url):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return len(self.objects[url]), None

    def fetch(self, url, destination, *, etag):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return destination.write(self.objects[url])


class EvictAnything:
    """A policy that makes room at any price."""

    def victims(self, key, residents, *, in_use_since_ns):
        return [resident for resident in residents if resident.name.key != key]


def read(cache, url):
    """Return the bytes of `url` through `cache`."""
    with cache.open(url) as file:
        return file.read()


def damage(path, data, *, boot=None):
    """Replace a cached object by other bytes, as if published under another boot."""
    path.chmod(0o644)
    path.write_bytes(data)
    if boot is not None:
        name = ObjectName.parse(path.name)
        path.rename(path.with_name(str(name.under(boot))))


def test_second_open_needs_no_request(make, put, server):
    """The first open is one HEAD and one GET, the second one is a local file."""
    url, data = put()
    cache = make()

    assert read(cache, url) == data
    assert server.requests() == 2
    assert read(cache, url) == data

    assert server.requests() == 2
    assert cache.stats() == CacheStats(
        num_hits=1,
        num_misses=1,
        bytes_hit=len(data),
        bytes_fetched=len(data),
        bytes_used=len(data),
    )


def test_file_is_real_and_read_only(make, put):
    """What is handed out can be mapped and seeked, and not be written."""
    url, data = put()

    with make().open(url) as file:
        view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert view[:] == data
        view.close()
        file.seek(-3, os.SEEK_END)
        assert file.read() == data[-3:]
        with pytest.raises(OSError):
            os.write(file.fileno(), b"x")


def test_private_and_immutable(make, put, tmp_path, files):
    """A directory that the cache makes is its user's alone, and its objects are read-only."""
    url, _ = put()
    make().open(url).close()

    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert files("objects")[0].stat().st_mode & 0o222 == 0


def test_empty_object(make, put):
    """An object of no bytes is an object."""
    url, _ = put(size=0)
    cache = make()

    assert read(cache, url) == b""
    assert read(cache, url) == b""
    assert cache.stats().num_hits == 1


def test_local_files_are_opened_where_they_are(make, tmp_path, files):
    """A path or file URL is neither copied nor removed, and a missing one is an error."""
    path = tmp_path / "a b.tar"
    path.write_bytes(b"local")
    cache = make(max_bytes=1)

    for name in [str(path), path, path.as_uri(), f"trainpath::{path}"]:
        with cache.open(name) as file:
            assert file.read() == b"local"
            assert os.fstat(file.fileno()).st_ino == path.stat().st_ino
        assert cache.contains(name)

    assert files("objects") == []
    assert not cache.contains(tmp_path / "none")
    with pytest.raises(ShardNotFoundError, match="none does not exist"):
        cache.open(tmp_path / "none")


def test_names_stay_inside_and_apart(make, tmp_path, files):
    """`..`, NUL, long names, equal basenames, forms of unicode and queries do not collide."""
    urls = [
        "http://h/../../etc/passwd",
        "http://h/%2e%2e/etc/passwd",
        "http://h/train/000.tar",
        "http://h/val/000.tar",
        "http://h/000.tar?v=1",
        "http://h/000.tar?v=2",
        "http://h/\u00e9.tar",
        "http://h/e\u0301.tar",
        "http://h/a\0b.tar",
        f"http://h/{'x' * 4096}.tar",
        "s3://bucket/000.tar",
    ]
    store = DictStore({url: url.encode() for url in urls})
    cache = make(store=store)

    for url in urls:
        assert read(cache, url) == url.encode()
    calls = store.calls
    for url in urls:
        assert read(cache, url) == url.encode()

    assert store.calls == calls
    assert len(files("objects")) == len(urls)
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]


def test_no_secret_in_the_directory(make, put, server, tmp_path):
    """User, password and query of a URL are in no file name and in no file."""
    url, data = put()
    cache = make()

    assert read(cache, url.replace("//", "//user:passw0rd@") + "?token=t0ken") == data

    for entry in (tmp_path / "cache").rglob("*"):
        assert "passw0rd" not in entry.name
        assert "t0ken" not in entry.name
        if entry.is_file():
            assert b"t0ken" not in entry.read_bytes()


@pytest.mark.parametrize("revalidate", ["start", "never", "open"])
def test_versions(revalidate, make, put, server, files):
    """A changed object is noticed by the next job, by each open, or never, as asked for."""
    url, old = put(size=1000)
    cache = make(revalidate=revalidate)
    assert read(cache, url) == old
    time.sleep(0.02)
    new = b"new" * 500
    server.put("a/x.tar", new)

    assert read(cache, url) == (new if revalidate == "open" else old)
    cache.close()
    time.sleep(0.02)
    next_job = make(revalidate=revalidate)
    assert read(next_job, url) == (old if revalidate == "never" else new)

    assert len(files("objects")) == 1
    requests = server.requests()
    assert read(next_job, url) == (old if revalidate == "never" else new)
    assert server.requests() - requests == (1 if revalidate == "open" else 0)


def test_next_job_asks_once_for_what_is_unchanged(make, put, server):
    """A warm start costs one HEAD per shard, no bytes, and pickled copies ask no more."""
    url, data = put()
    with make() as cache:
        cache.open(url).close()
    time.sleep(0.02)
    sent = server.bytes_sent()
    job = make()

    assert read(job, url) == data
    assert job.stats().num_revalidated == 1
    with pickle.loads(pickle.dumps(job)) as copy:
        assert read(copy, url) == data
        assert copy.stats().num_hits == 1

    assert server.requests(method="HEAD") == 2
    assert server.bytes_sent() == sent


def test_origin_that_is_down_does_not_matter_to_what_is_here(make, caplog):
    """If the version cannot be asked for, the copy is used and a warning says so."""
    store = DictStore({"s3://b/a.tar": b"data"})
    with make(store=store) as cache:
        cache.open("s3://b/a.tar").close()
    time.sleep(0.02)
    store.error = FetchError("the origin is down")

    assert read(make(store=store), "s3://b/a.tar") == b"data"

    assert "using the copy" in caplog.text
    with pytest.raises(FetchError, match="down"):
        make(store=store).open("s3://b/other.tar")


def test_object_that_is_gone(make, put, server):
    """A shard that its origin has deleted is not served to the next job."""
    url, _ = put()
    with make() as cache:
        cache.open(url).close()
    time.sleep(0.02)
    server.delete("a/x.tar")

    with pytest.raises(ShardNotFoundError, match=r"a/x\.tar does not exist"):
        make().open(url)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind="cut", after_bytes=40_000),
        Fault(kind="status", status=500, times=2),
        Fault(kind="status", status=429, retry_after_s=0.1),
        Fault(kind="hang", after_bytes=40_000),
        Fault(kind="length", extra_bytes=7),
        Fault(kind="length", extra_bytes=-7),
        Fault(kind="changed"),
        Fault(kind="status", status=503, method="HEAD"),
    ],
    ids=lambda fault: f"{fault.kind}{fault.extra_bytes}",
)
def test_passing_faults(fault, make, put, server, files):
    """A passing fault of the origin is not seen by the reader, and leaves nothing behind."""
    url, _ = put()
    cache = make(timeout_s=0.3)
    server.inject("*", fault)

    got = read(cache, url)

    with cache.open(url) as file:
        assert file.read() == got
    store_says = read(make(directory=cache.directory + "2"), url)
    assert got == store_says
    assert files("downloads") == []
    assert cache.verify().removed == ()


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (Fault(kind="changed", times=None), FetchError, "changed while"),
        (Fault(kind="length", extra_bytes=-7, times=None), FetchError, "instead of the 100000"),
        (Fault(kind="status", status=404, times=None), ShardNotFoundError, "does not exist"),
        (Fault(kind="status", status=403, times=None), FetchError, "answered 403"),
    ],
    ids=["changed", "short", "404", "403"],
)
def test_lasting_faults(fault, error, message, make, put, server, files):
    """A lasting fault is one clear error; the cache is as before and works afterwards."""
    url, _ = put()
    cache = make(timeout_s=0.3)
    server.inject("*", fault)

    with pytest.raises(error, match=message):
        cache.open(url)

    assert files("objects") == []
    assert files("downloads") == []
    assert cache.stats().bytes_reserved == 0
    server.reset()
    read(cache, url)


def test_store_that_sends_too_much(make, files):
    """An origin that sends more than it announced cannot exceed the room taken for it."""
    store = DictStore({"s3://b/a": b"x" * 100})
    store.size = lambda _url: (10, None)

    with pytest.raises(FetchError, match="more than the 10 bytes"):
        make(store=store).open("s3://b/a")

    assert files("objects") == files("downloads") == []


def test_plain_os_errors_of_a_store(make):
    """A store's FileNotFoundError and OSError become the errors of this package."""
    store = DictStore({})
    cache = make(store=store)

    store.error = FileNotFoundError("x")
    with pytest.raises(ShardNotFoundError, match="s3://b/a does not exist"):
        cache.open("s3://b/a")
    store.error = ConnectionResetError("x")
    with pytest.raises(FetchError, match="s3://b/a: ConnectionResetError"):
        cache.open("s3://b/a")
    assert not cache.stats().degraded


def test_zeros_of_a_lost_boot(make, put, server, files, caplog):
    """A file of zeros under a final name of another boot is found out and fetched again."""
    url, data = put()
    make().open(url).close()
    damage(files("objects")[0], bytes(len(data)), boot="deadbeef")
    cache = make()

    assert read(cache, url) == data

    assert cache.stats().num_corrupt == 1
    assert server.gets() == 2
    assert "removed a damaged object" in caplog.text
    assert cache.verify().removed == ()


def test_good_object_of_another_boot(make, put, server, files):
    """A sound file of another boot is read once, then taken as proven, without a download."""
    url, data = put()
    make().open(url).close()
    path = files("objects")[0]
    damage(path, data, boot="deadbeef")

    assert read(make(), url) == data

    assert files("objects") == [path]
    assert server.gets() == 1


def test_what_cannot_be_opened(make, put, files, caplog):
    """An object that the disk refuses to open (here: a directory in its place) passes through."""
    url, data = put()
    cache = make()
    cache.open(url).close()
    path = files("objects")[0]
    path.unlink()
    path.mkdir()

    assert read(cache, url) == data

    assert cache.stats().degraded
    assert "Is a directory" in caplog.text


@pytest.mark.parametrize("size", [0, 99_999, 100_001])
def test_wrong_length(size, make, put, server, files):
    """A file that has not its length is never served, whatever its boot."""
    url, data = put()
    make().open(url).close()
    damage(files("objects")[0], bytes(size))
    cache = make()

    assert read(cache, url) == data

    assert cache.stats().num_corrupt == 1
    assert server.gets() == 2


def test_verify(make, put, files):
    """`verify()` reads everything and removes what has other bytes than it came with."""
    (one, data), (two, _) = put("1.tar", 1000), put("2.tar", 2000)
    cache = make()
    cache.open(one).close()
    cache.open(two).close()
    bad = next(path for path in files("objects") if path.stat().st_size == 1000)
    damage(bad, b"\0" + data[1:])

    report = cache.verify()

    assert (report.num_objects, report.num_bytes, report.removed) == (2, 3000, (bad.name,))
    assert not cache.contains(one)
    assert read(cache, one) == data


def test_object_over_the_budget_passes_through(make, put, files, caplog):
    """An object larger than the whole budget is read without the cache, at each open."""
    url, data = put(size=1000)
    cache = make(max_bytes=999)

    assert read(cache, url) == data
    with cache.open(url) as file:
        assert mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[:] == data

    stats = cache.stats()
    assert (stats.num_bypassed, stats.bytes_bypassed, stats.bytes_used) == (2, 2000, 0)
    assert files("objects") == files("downloads") == []
    assert caplog.text.count("no room") == 1


def test_keeps_what_it_has_when_full(make, put, server):
    """Without a known order the first shards stay, so that each epoch hits them again."""
    urls = [put(f"{index}.tar", 100)[0] for index in range(4)]
    cache = make(max_bytes=250)

    for _ in range(3):
        for url in urls:
            read(cache, url)

    assert [server.gets(f"{index}.tar") for index in range(4)] == [1, 1, 3, 3]
    assert cache.stats().num_evicted == 0


def test_data_of_the_last_job_makes_room(make, put, server, files):
    """What no running job has used is evicted, and only as much as is needed."""
    old = [put(f"old{index}.tar", 100)[0] for index in range(3)]
    with make(max_bytes=300) as cache:
        for url in old:
            cache.open(url).close()
    time.sleep(0.02)
    job = make(max_bytes=300)
    read(job, old[0])
    new, data = put("new.tar", 150)

    assert read(job, new) == data

    assert job.stats().num_evicted == 2
    assert job.contains(old[0])
    assert sorted(path.stat().st_size for path in files("objects")) == [100, 150]


def test_free_space_is_left(make, put):
    """With no room but what must stay free, nothing is cached and everything is read."""
    url, data = put()
    cache = make(min_free_bytes=1 << 62)

    assert read(cache, url) == data

    assert cache.stats().bytes_used == 0


def test_open_objects_are_not_evicted(make, put, files):
    """An open or mapped object stays, in the directory and in the budget, until it is closed."""
    (one, data), (two, other) = put("1.tar", 100), put("2.tar", 100)
    cache = make(max_bytes=150, policy=EvictAnything())
    file = cache.open(one)
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    file.close()

    assert read(cache, two) == other
    assert cache.stats().num_bypassed == 1
    assert view[:] == data
    view.close()
    assert read(cache, two) == other

    assert cache.stats().num_evicted == 1
    assert not cache.contains(one)
    assert len(files("objects")) == 1


def test_removed_object_stays_readable(make, put, files):
    """A reader keeps its bytes when somebody removes the file, the whole directory even."""
    url, data = put()
    cache = make()
    with cache.open(url) as file:
        files("objects")[0].unlink()
        assert file.read() == data
    assert read(cache, url) == data
    assert cache.stats().num_misses == 2


def test_locks_that_do_nothing(make, put, monkeypatch, files, caplog):
    """Where flock succeeds for everyone, racing readers still get the right bytes."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    shards = [put(f"{index}.tar", 20_000) for index in range(5)]
    caches = [make() for _ in range(4)]
    failed = []

    def read_all(cache):
        for url, data in shards:
            if read(cache, url) != data:
                failed.append(url)

    threads = [threading.Thread(target=read_all, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    assert len(files("objects")) == 5
    assert files("downloads") == []
    assert "locks do not work" in caplog.text


def test_comings_and_goings(tmp_path, put, files):
    """Processes' sessions that end while others look for dead ones disturb nobody."""
    url, data = put(size=100)
    failed = []

    def come_and_go():
        for _ in range(15):
            with ShardCache(tmp_path / "cache", min_free_bytes=0, revalidate="never") as cache:
                if read(cache, url) != data or cache.stats().degraded:
                    failed.append(cache)

    threads = [threading.Thread(target=come_and_go) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failed == []
    assert files("sessions") == files("downloads") == []


def test_threads_of_one_process(make, put, server):
    """Eight threads on one cache object fetch each shard once."""
    server.latency_s = 0.01
    shards = [put(f"{index}.tar", 20_000) for index in range(4)]
    cache = make()
    good = []

    def read_all():
        good.extend(read(cache, url) == data for url, data in shards)

    threads = [threading.Thread(target=read_all) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert good == [True] * 32
    assert server.gets() == 4


def wait_until(condition, *, timeout_s=20):
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_prefetch(make, put, server):
    """Prefetched shards are here when they are opened; what does not fit is skipped."""
    urls = [put(f"{index}.tar", 100)[0] for index in range(4)]
    cache = make(max_bytes=350)
    cache.prefetch(urls[:2])
    wait_until(lambda: cache.stats().num_misses == 2)
    cache.prefetch([*urls, __file__])
    wait_until(lambda: cache.stats().num_misses == 3 and server.requests(method="HEAD") == 4)

    names = {thread.name for thread in threading.enumerate()}
    here = [url for url in urls if cache.contains(url)]
    for url in here:
        read(cache, url)

    assert len(here) == 3
    assert cache.stats().num_hits == 3
    assert server.gets() == 3
    assert sum(name.startswith("trainpath-cache-prefetch") for name in names) <= 2


def test_error_of_a_prefetch_surfaces_once(make, put, server):
    """What a prefetch ran into is raised by the next call, then the cache goes on."""
    url, data = put()
    cache = make()
    cache.prefetch([server.url_for("none.tar")])

    with pytest.raises(ShardNotFoundError, match=r"none\.tar"):
        wait_until(lambda: cache.contains(url))

    assert read(cache, url) == data


def test_error_of_a_prefetch_surfaces_at_close(make, server):
    """If there is no further call, `close()` raises it; the second `close()` is quiet."""
    cache = make()
    cache.prefetch([server.url_for("none.tar")])
    wait_until(lambda: server.requests() == 1)

    with pytest.raises(ShardNotFoundError):
        cache.close()

    cache.close()


def test_close_ends_a_prefetch(make, put, server, files):
    """Closing in the middle of a background download ends it and leaves nothing."""
    server.rate_bytes_per_s = 200_000
    url, _ = put(size=1_000_000)
    cache = make()
    cache.prefetch([url])
    wait_until(lambda: server.bytes_sent() > 0)

    cache.close()

    assert files("downloads") == files("objects") == files("sessions") == []
    with pytest.raises(ClosedError, match="is closed"):
        cache.open(url)


def test_stages(make, put, server):
    """A miss is storage, network and cache; a hit is cache alone."""
    url, _ = put(size=100_000)
    server.latency_s = 0.05
    server.rate_bytes_per_s = 500_000
    cache = make()
    spent = []

    for _ in range(2):
        recorder = StageRecorder()
        with recording(recorder):
            cache.open(url).close()
        total = dict.fromkeys(range(len(S.SEGMENTS)), 0)
        for segment, begin, end in recorder.take():
            total[segment] += end - begin
        spent.append(total)

    miss, hit = spent
    assert miss[S.DATA_STORAGE] >= 100e6
    assert miss[S.DATA_NETWORK] >= 100e6
    assert miss[S.DATA_CACHE] > 0
    assert [segment for segment, time_ns in hit.items() if time_ns] == [S.DATA_CACHE]


def test_cache_that_nobody_closed(put, tmp_path, files):
    """A cache that is dropped without `close()` leaves no session and no connection."""
    url, _ = put()
    cache = ShardCache(tmp_path / "cache", min_free_bytes=0)
    cache.open(url).close()
    assert len(files("sessions")) == 1

    del cache
    gc.collect()

    assert files("sessions") == []


def test_pickle_keeps_the_settings(make):
    """A copy in another process has the same directory, limit and policy."""
    cache = make(max_bytes=123, timeout_s=4.0, policy=KeepUntilFull(), revalidate="open")

    with pickle.loads(pickle.dumps(cache)) as copy:
        assert repr(copy) == repr(cache)
        assert copy.max_bytes == 123
        assert copy.job_started_ns == cache.job_started_ns


@pytest.mark.parametrize(
    "options", [{"max_bytes": 0}, {"timeout_s": 0}, {"revalidate": "sometimes"}]
)
def test_bad_settings(options, make):
    """A setting without sense is refused when the cache is made."""
    with pytest.raises(ConfigError, match="must be"):
        make(**options)


def test_hit_is_three_system_calls(make, put, monkeypatch):
    """A hit opens, locks and stats one file: no directory is listed, no other file opened."""
    url, _ = put()
    cache = make()
    cache.open(url).close()
    cache.open(url).close()

    def refuse(*_args, **_kwargs):
        raise AssertionError("a hit must not do this")

    for name in ("listdir", "scandir", "open", "utime", "stat", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    file = cache.open(url)
    monkeypatch.undo()

    file.close()
    assert cache.stats().num_hits == 2
