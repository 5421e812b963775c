"""Many processes on one cache directory: once per node, never over budget, kill -9."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time

import pytest

from trainpath.cache.locks import file_lock


def shards_on(put, count, size):
    """Put shards on the server; returns name -> [URL, size]."""
    shards = {}
    for index in range(count):
        name = f"set/{index:03}.tar"
        url, _ = put(name, size + index)
        shards[name] = [url, size + index]
    return shards


def say(process, line):
    """Send a line to a program."""
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def hear(process):
    """Wait for a line of a program."""
    return process.stdout.readline().strip()


def test_four_processes_fetch_each_shard_once(make, put, server, tmp_path, start, result):
    """2 ranks x 2 workers get each shard from the origin once, and ask nothing in epoch two."""
    shards = shards_on(put, 6, 50_000)
    server.latency_s = 0.02
    pickled = tmp_path / "cache.pickle"
    pickled.write_bytes(pickle.dumps(make(max_bytes=1_000_000)))
    processes = [start("reader", pickled=str(pickled), shards=shards) for _ in range(4)]
    assert [hear(process) for process in processes] == ["ready"] * 4

    for process in processes:
        say(process, "epoch 0")
    assert [hear(process) for process in processes] == ["read"] * 4
    assert {name: server.gets(name) for name in shards} == dict.fromkeys(shards, 1)
    assert server.bytes_sent() == sum(size for _, size in shards.values())
    before = server.requests()
    for process in processes:
        say(process, "epoch 1")
    assert [hear(process) for process in processes] == ["read"] * 4

    assert server.requests() == before
    stats = [result(process) for process in processes]
    assert sum(one["num_misses"] for one in stats) == 6
    assert sum(one["num_hits"] + one["num_waits"] for one in stats) == 4 * 6 * 2 - 6


@pytest.mark.parametrize("evict", [False, True])
def test_never_over_budget(evict, put, tmp_path, start, result):
    """Four processes over a cache with room for 2 of 6 shards never exceed its limit."""
    shards = shards_on(put, 6, 100_000)
    root = tmp_path / "cache"
    limit = 250_000
    processes = [
        start("reader", directory=str(root), max_bytes=limit, shards=shards, evict=evict)
        for _ in range(4)
    ]
    assert [hear(process) for process in processes] == ["ready"] * 4
    samples = []
    stop = threading.Event()

    def sample():
        while not stop.is_set():
            with file_lock(str(root / "v1" / "index"), timeout_s=30):
                held = [entry for entry in (root / "v1").rglob("*") if entry.is_file()]
                samples.append(sum(entry.stat().st_size for entry in held))
            time.sleep(0.004)  # let the others have the lock, too

    sampler = threading.Thread(target=sample)
    sampler.start()
    for epoch in range(2):
        for process in processes:
            say(process, f"epoch {epoch}")
    stats = [result(process) for process in processes]
    stop.set()
    sampler.join()

    assert len(samples) > 20
    assert max(samples) <= limit
    assert max(samples) > 200_000
    assert all(one["bytes_used"] <= limit for one in stats)
    assert not any(one["degraded"] for one in stats)
    opens = ("num_hits", "num_waits", "num_misses", "num_bypassed")
    assert sum(one[name] for one in stats for name in opens) == 4 * 2 * 6
    if not evict:  # with eviction the processes may happen to find room every time
        assert sum(one["num_bypassed"] for one in stats) > 0
    assert (sum(one["num_evicted"] for one in stats) > 0) == evict


def test_kill_9_of_downloaders(make, put, server, tmp_path, start, result, files):
    """After SIGKILL of a downloader at 20 random moments, others have the right bytes."""
    shards = shards_on(put, 20, 60_000)
    server.rate_bytes_per_s = 600_000
    directory = tmp_path / "cache"
    program = start(
        "killer",
        directory=str(directory),
        shards=shards,
        longest_s=0.12,
        seed=7,
        max_bytes=2_000_000,
    )

    outcomes = result(program)

    killed = [first for first, _, _ in outcomes]
    assert [other for _, other, _ in outcomes] == [0] * 20
    assert [good for _, _, good in outcomes] == [True] * 20
    assert killed.count(-signal.SIGKILL) >= 10  # the others were done before
    assert set(killed) <= {0, -signal.SIGKILL}
    cache = make(directory)
    assert files("downloads") == []
    assert len(files("sessions")) == 1
    assert len(files("objects")) == 20
    assert cache.verify().removed == ()
    assert cache.stats().bytes_reserved == 0


def test_room_of_a_dead_process_is_free_again(make, put, server, tmp_path, start, files):
    """The reservation of a process that was killed counts as free for the next download."""
    server.rate_bytes_per_s = 100_000
    shards = shards_on(put, 1, 90_000)
    directory = str(tmp_path / "cache")
    process = start("reader", directory=directory, max_bytes=100_000, shards=shards)
    assert hear(process) == "ready"
    cache = make(max_bytes=100_000)
    say(process, "epoch 0")
    deadline = time.monotonic() + 20
    while cache.stats().bytes_reserved == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert cache.stats().bytes_reserved == 90_000
    process.kill()
    process.wait()
    server.rate_bytes_per_s = None
    url, data = put("other.tar", 80_000)

    with cache.open(url) as file:
        assert file.read() == data

    assert cache.stats().num_misses == 1
    assert [path.stat().st_size for path in files("objects")] == [80_000]
    assert files("downloads") == []


def test_second_process_waits_for_the_first(make, put, server, tmp_path, start, result):
    """A process that wants a shard in flight gets it without a request of its own."""
    server.rate_bytes_per_s = 200_000
    shards = shards_on(put, 1, 100_000)
    (url, size) = shards["set/000.tar"]
    process = start("reader", directory=str(tmp_path / "cache"), shards=shards)
    assert hear(process) == "ready"
    cache = make()
    say(process, "epoch 0")
    deadline = time.monotonic() + 20
    while server.gets() == 0 and time.monotonic() < deadline:
        time.sleep(0.002)

    with cache.open(url) as file:
        assert len(file.read()) == size

    assert cache.stats().num_waits == 1
    assert server.gets() == 1
    assert result(process)["num_misses"] == 1


def test_stopped_holder_is_not_waited_for(make, put, server, tmp_path, start, caplog):
    """A holder that makes no progress (SIGSTOP) delays others only up to their deadline."""
    server.rate_bytes_per_s = 100_000
    shards = shards_on(put, 1, 200_000)
    (url, size) = shards["set/000.tar"]
    process = start("reader", directory=str(tmp_path / "cache"), shards=shards)
    assert hear(process) == "ready"
    cache = make(timeout_s=0.1)
    say(process, "epoch 0")
    deadline = time.monotonic() + 20
    while cache.stats().bytes_reserved == 0 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGSTOP)
    server.rate_bytes_per_s = None

    with cache.open(url) as file:
        assert len(file.read()) == size

    assert cache.stats().num_bypassed == 1
    assert "without any progress" in caplog.text


def _open_in_child(cache, url, queue):
    with cache.open(url) as file:
        queue.put((file.read(), cache.stats().num_hits))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_used_across_fork_and_spawn(method, make, put, server):
    """A cache used in the parent works in a child made by fork or spawn, without a request."""
    url, data = put()
    cache = make()
    cache.open(url).close()
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    child = context.Process(target=_open_in_child, args=(cache, url, queue))
    before = server.requests()

    child.start()
    got = queue.get()
    child.join(20)

    assert got == (data, 1)
    assert child.exitcode == 0
    assert server.requests() == before
    queue.close()
    with cache.open(url) as file:
        assert file.read() == data


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_locks(make, put, server, files):
    """A fork in the middle of a download neither breaks it nor keeps its room after it."""
    server.rate_bytes_per_s = 100_000
    url, data = put(size=50_000)
    cache = make(max_bytes=60_000)
    cache.prefetch([url])
    while cache.stats().bytes_reserved == 0:
        time.sleep(0.002)
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    try:
        with cache.open(url) as file:
            assert file.read() == data
        cache.close()
        again = make(max_bytes=60_000)
        assert again.stats().bytes_reserved == 0
        assert len(files("sessions")) == 1
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
