"""Which store serves a URL, and the store for everything that fsspec can open."""

from __future__ import annotations

import io

import fsspec
import pytest

from trainpath.cache import FsspecStore, HttpStore
from trainpath.cache.download import ObjectChangedError
from trainpath.cache.fetch import store_for
from trainpath.errors import ConfigError, FetchError, MissingDependencyError, ShardNotFoundError


@pytest.fixture
def memory():
    """An fsspec file system in memory with one object."""
    system = fsspec.filesystem("memory")
    system.pipe_file("/bucket/a.tar", b"data" * 1000)
    yield system
    system.rm("/bucket", recursive=True)


@pytest.mark.parametrize(
    ("url", "options", "kind"),
    [
        ("http://h/a", None, HttpStore),
        ("HTTPS://h/a", {"headers": {"a": "b"}}, HttpStore),
        ("http://h/a", {"client_kwargs": {}}, FsspecStore),
        ("memory://a", None, FsspecStore),
    ],
)
def test_store_for(url, options, kind):
    """HTTP goes by the standard library unless fsspec's own options are given."""
    assert type(store_for(url, storage_options=options, timeout_s=1)) is kind


def test_size_and_fetch(memory):
    """Any fsspec URL can be measured and downloaded."""
    store = FsspecStore()
    destination = io.BytesIO()

    size, version = store.size("memory://bucket/a.tar")

    assert (size, version is None) == (4000, False)
    assert store.fetch("memory://bucket/a.tar", destination, etag=version) == 4000
    assert destination.getvalue() == b"data" * 1000


def test_through_the_cache(memory, make):
    """An fsspec origin is asked once per shard, too."""
    cache = make()
    for _ in range(2):
        with cache.open("memory://bucket/a.tar") as file:
            assert file.read() == b"data" * 1000
    memory.rm("/bucket/a.tar")
    with cache.open("memory://bucket/a.tar") as file:
        assert file.read(4) == b"data"
    memory.pipe_file("/bucket/a.tar", b"")


def test_change(memory):
    """A change between length and body is an error."""
    store = FsspecStore()
    _, version = store.size("memory://bucket/a.tar")
    memory.pipe_file("/bucket/a.tar", b"other")

    with pytest.raises(ObjectChangedError, match="changed while"):
        store.fetch("memory://bucket/a.tar", io.BytesIO(), etag=version)


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("memory://bucket/none.tar", ShardNotFoundError, "does not exist"),
        ("memory://bucket", ShardNotFoundError, "is a directory"),
        ("nonsense://bucket/a", ConfigError, "nonsense"),
    ],
)
def test_errors(url, error, message, memory):
    """Missing objects, directories and unknown schemes are clear errors."""
    with pytest.raises(error, match=message):
        FsspecStore().size(url)


def test_missing_package(monkeypatch):
    """A scheme whose package is not installed names the extra to install."""

    def url_to_fs(*_args, **_kwargs):
        raise ImportError("s3fs")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with pytest.raises(MissingDependencyError, match=r"pip install 'trainpath\[s3\]'"):
        FsspecStore().size("s3://bucket/a")


def test_os_errors_are_retried(memory, monkeypatch):
    """A passing OSError of the file system costs another try; a lasting one is a FetchError."""
    real, failures = type(memory).info, []

    def info(self, path, **kwargs):
        if failures:
            raise failures.pop()
        return real(self, path, **kwargs)

    monkeypatch.setattr(type(memory), "info", info)
    failures[:] = [OSError("x"), OSError("y")]
    assert FsspecStore().size("memory://bucket/a.tar")[0] == 4000
    failures[:] = [OSError("x")] * 3
    with pytest.raises(FetchError, match=r"a\.tar: OSError"):
        FsspecStore().size("memory://bucket/a.tar")
