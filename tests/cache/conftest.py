"""What the tests of the cache share: a real server, shards, and programs in other processes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainpath.cache import ShardCache
from trainpath.testing import ObjectServer

PROGRAMS = Path(__file__).parent / "programs"


def content(name, size):
    """Return the bytes of the shard `name`: different for each name, never all zeros."""
    block = hashlib.blake2b(name.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


@pytest.fixture
def server():
    """An object server without any object."""
    with ObjectServer() as running:
        yield running


@pytest.fixture
def put(server):
    """Put a shard of `size` bytes on the server; returns its URL and its bytes."""

    def put_one(name="a/x.tar", size=100_000):
        data = content(name, size)
        server.put(name, data)
        return server.url_for(name), data

    return put_one


@pytest.fixture
def make(tmp_path):
    """Make a cache in the test's directory; all are closed at the end."""
    made = []

    def make_one(directory=None, **options):
        options.setdefault("min_free_bytes", 0)
        cache = ShardCache(directory or tmp_path / "cache", **options)
        made.append(cache)
        return cache

    yield make_one
    for cache in made:
        cache.close()


@pytest.fixture
def start():
    """Start a program of `programs/` with JSON arguments; all are ended after the test."""
    running = []

    def start_one(program, **arguments):
        process = subprocess.Popen(
            [sys.executable, PROGRAMS / f"{program}.py", json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start_one
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def result():
    """Wait for a program and return the JSON of its last line."""

    def wait(process, *, timeout_s=50):
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0
        return json.loads(output.splitlines()[-1])

    return wait


@pytest.fixture
def files(tmp_path):
    """List the files in a folder of the cache: objects, downloads, sessions, ..."""

    def list_files(folder, directory=None):
        root = (directory or tmp_path / "cache") / "v1" / folder
        return sorted(path for path in root.rglob("*") if path.is_file())

    return list_files
