"""Disks that are full, read-only or missing: training goes on, with one warning."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import pytest

from trainpath.cache import ShardCache
from trainpath.errors import CacheWriteError


@pytest.fixture
def disk(tmp_path):
    """Mount a small file system of its own; needs root."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    root = tmp_path / "disk"
    root.mkdir()
    mounted = []

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.decode().strip()}")
        mounted.append(root)
        return root

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", path], check=True)


def read(cache, url):
    """Return the bytes of `url` through `cache`."""
    with cache.open(url) as file:
        return file.read()


def test_full_disk(disk, put, caplog):
    """On a full disk hits go on, misses pass through, and room that comes back is used."""
    root = disk("size=1m")
    (one, first), (two, second) = put("1.tar", 300_000), put("2.tar", 300_000)
    with ShardCache(root / "cache", min_free_bytes=0) as cache:
        assert read(cache, one) == first
        filler = root / "filler"
        with filler.open("wb") as file, pytest.raises(OSError, match="No space"):
            file.write(bytes(1 << 20))

        assert read(cache, two) == second
        assert read(cache, two) == second
        assert read(cache, one) == first

        assert cache.stats().num_bypassed == 2
        assert cache.stats().num_hits == 1
        assert caplog.text.count("WARNING") == 1
        filler.unlink()
        assert read(cache, two) == second
        assert cache.stats().num_misses == 2


def test_disk_that_fills_up_during_the_download(disk, put, caplog, monkeypatch):
    """A write that fails in the middle gives the room back; the bytes come all the same."""
    disk("size=1m")
    url, data = put(size=300_000)
    root = disk("size=1m")
    # As on a file system that cannot allocate in advance.
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)
    written = []

    def pwrite(fd, view, offset, real=os.pwrite):
        written.append(offset)
        if offset > 0 and len(written) < 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, view, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with ShardCache(root / "cache", min_free_bytes=0) as cache:
        assert read(cache, url) == data

        assert cache.stats().degraded
        assert list((root / "cache" / "v1" / "downloads").iterdir()) == []
        assert list((root / "cache" / "v1" / "objects").rglob("*-*")) == []
    assert caplog.text.count("WARNING") == 1
    assert "No space left" in caplog.text


def test_no_inodes_left(disk, put, caplog):
    """A disk without inodes, where not even a lock file can be made, is passed by."""
    root = disk("size=1m,nr_inodes=30")
    url, data = put(size=1000)
    with ShardCache(root / "cache", min_free_bytes=0) as cache:
        with pytest.raises(OSError, match="No space"):
            for index in range(30):
                (root / str(index)).touch()

        assert read(cache, url) == data
        assert read(cache, url) == data

        assert cache.stats().num_bypassed == 2
        assert cache.stats().degraded
    assert caplog.text.count("WARNING") == 1


def test_disk_that_turns_read_only(disk, put, caplog):
    """On a disk that turned read-only hits go on and misses pass through."""
    root = disk("size=1m")
    (one, first), (two, second) = put("1.tar", 1000), put("2.tar", 1000)
    with ShardCache(root / "cache", min_free_bytes=0) as cache:
        assert read(cache, one) == first
        subprocess.run(["mount", "-o", "remount,ro", root], check=True)

        assert read(cache, one) == first
        assert read(cache, two) == second
        assert read(cache, two) == second

        assert cache.stats().num_hits == 1
        assert cache.stats().num_bypassed == 2
    assert caplog.text.count("WARNING") == 1
    assert "Read-only" in caplog.text


def test_read_only_from_the_start(disk):
    """A directory that cannot be written when the cache is made is an error that names it."""
    root = disk("size=1m,ro")

    with pytest.raises(CacheWriteError, match=r"disk/cache cannot be used.*Read-only") as caught:
        ShardCache(root / "cache")

    assert isinstance(caught.value, OSError)


def test_directory_that_is_a_file(tmp_path):
    """A path that is a file is an error that names it and leaves the file alone."""
    path = tmp_path / "file"
    path.write_bytes(b"mine")

    with pytest.raises(CacheWriteError, match="file cannot be used"):
        ShardCache(path)

    assert path.read_bytes() == b"mine"


def test_directory_that_is_removed(make, put, tmp_path):
    """A directory that somebody removes in the middle is made again."""
    (one, first), (two, second) = put("1.tar", 1000), put("2.tar", 1000)
    cache = make()
    assert read(cache, one) == first
    shutil.rmtree(tmp_path / "cache")

    assert read(cache, two) == second
    assert read(cache, one) == first

    assert cache.contains(one)


def test_no_room_in_the_temporary_directory(make, put, tmp_path, monkeypatch):
    """Without a usable temporary directory what passes through is kept in memory."""
    url, data = put(size=1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))

    with make(max_bytes=10).open(url) as file:
        assert file.read() == data
        assert os.fstat(file.fileno()).st_nlink == 0
