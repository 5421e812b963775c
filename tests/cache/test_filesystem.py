"""The fsspec protocol: `trainpath::URL` for fsspec.open, pandas and friends."""

from __future__ import annotations

import subprocess
import sys

import fsspec
import pytest

from trainpath.cache import TrainpathFileSystem, environment


@pytest.fixture(autouse=True)
def cached(monkeypatch, tmp_path):
    """Set the cache of the environment to the test's directory."""
    monkeypatch.setenv("TRAINPATH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINPATH_CACHE_STARTED_NS", "")
    monkeypatch.delenv("TRAINPATH_MODE", raising=False)
    caches = {}
    monkeypatch.setattr(environment, "_caches", caches)
    TrainpathFileSystem.clear_instance_cache()
    yield
    for cache in caches.values():
        cache.close()
    fsspec.filesystem("memory").store.clear()


def test_open_reads_through(put, server):
    """`fsspec.open("trainpath::http://...")` asks the origin once, for two readers."""
    url, data = put()

    for _ in range(2):
        with fsspec.open(f"trainpath::{url}", "rb") as file:
            assert file.read() == data
            assert file.fileno() > 0

    assert server.gets() == 1


def test_text_and_compression(server):
    """Text mode and compression are fsspec's own, on top of the cache."""
    import gzip

    server.put("a.txt.gz", gzip.compress(b"one\ntwo\n"))
    url = server.url_for("a.txt.gz")

    with fsspec.open(f"trainpath::{url}", "rt", compression="gzip") as file:
        assert file.readlines() == ["one\n", "two\n"]


def test_options(put, tmp_path, server):
    """Directory and limit may be given as storage options."""
    url, data = put(size=1000)
    options = {"directory": str(tmp_path / "other"), "max_bytes": 1500}

    with fsspec.open(f"trainpath::{url}", trainpath=options) as file:
        assert file.read() == data

    assert len(list((tmp_path / "other" / "v1" / "objects").rglob("*-*"))) == 1
    assert next(iter(environment._caches.values())).max_bytes == 1500


@pytest.mark.parametrize("mode", ["off", "observe", None])
def test_pass_through(mode, put, server, monkeypatch, tmp_path):
    """In the baseline modes and without a directory the origin is read at each open."""
    _, data = put()
    if mode is None:
        monkeypatch.delenv("TRAINPATH_CACHE_DIR")
    else:
        monkeypatch.setenv("TRAINPATH_MODE", mode)
    fsspec.filesystem("memory").pipe_file("/b/a", data)

    for _ in range(2):
        with fsspec.open("trainpath::memory://b/a") as file:
            assert file.read() == data

    assert not (tmp_path / "cache").exists()


def test_other_file_systems(tmp_path):
    """Paths of other file systems, `ls`, `info`, `glob` and `cat` work; writing does not."""
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/b/1.tar", b"one")
    memory.pipe_file("/b/2.tar", b"two")

    system, path = fsspec.core.url_to_fs("trainpath::memory://b/1.tar")

    assert isinstance(system, TrainpathFileSystem)
    assert system.cat_file(path) == b"one"
    assert system.info(path)["size"] == 3
    assert system.exists(path)
    assert system.isfile(path)
    assert system.isdir("/b")
    assert system.ukey(path)
    assert system.ls("/b", detail=False) == ["/b/1.tar", "/b/2.tar"]
    assert system.glob("/b/*.tar") == ["/b/1.tar", "/b/2.tar"]
    assert system.cat(["/b/1.tar", "/b/2.tar"]) == {"/b/1.tar": b"one", "/b/2.tar": b"two"}
    assert len(list((tmp_path / "cache" / "v1" / "objects").rglob("*-*"))) == 2
    with pytest.raises(NotImplementedError, match="read-only"):
        system.open(path, "wb")


def test_local_file_is_not_copied(tmp_path):
    """A local file behind the protocol is opened where it is."""
    path = tmp_path / "a.tar"
    path.write_bytes(b"local")

    with fsspec.open(f"trainpath::file://{path}") as file:
        assert file.read() == b"local"

    assert list((tmp_path / "cache" / "v1" / "objects").rglob("*-*")) == []


def test_archive_behind(tmp_path):
    """A chain with an archive in it is read by fsspec, not cached under a wrong name."""
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("member", b"inside")

    with fsspec.open(f"trainpath::zip://member::file://{tmp_path}/a.zip") as file:
        assert file.read() == b"inside"


def test_pickle(put):
    """The file system can be sent to a worker."""
    import pickle

    url, data = put()
    system, path = fsspec.core.url_to_fs(f"trainpath::{url}")

    assert pickle.loads(pickle.dumps(system)).cat_file(path) == data


def test_found_without_importing_us(put, tmp_path):
    """The entry point makes the protocol known to a program that only imports fsspec."""
    url, data = put(size=100)
    code = (
        "import fsspec, sys;"
        f"file = fsspec.open('trainpath::{url}').open();"
        "sys.stdout.buffer.write(file.read())"
    )

    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)

    assert done.stdout == data
