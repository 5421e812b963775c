"""The cache of the environment, and opening any URL as a file."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainpath.cache import environment, open_url, shared_cache
from trainpath.errors import ConfigError, ShardNotFoundError


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Let each test begin without settings and shared caches."""
    for name in ("DIR", "MAX_BYTES", "STARTED_NS"):
        monkeypatch.setenv(f"TRAINPATH_CACHE_{name}", "")
        monkeypatch.delenv(f"TRAINPATH_CACHE_{name}")
    monkeypatch.delenv("TRAINPATH_MODE", raising=False)
    caches = {}
    monkeypatch.setattr(environment, "_caches", caches)
    yield
    for cache in caches.values():
        cache.close()


def test_no_directory_no_cache():
    """Without a directory there is no cache."""
    assert shared_cache() is None


def test_one_cache_per_settings(tmp_path, monkeypatch):
    """The same settings give the same cache, from the environment or from arguments."""
    monkeypatch.setenv("TRAINPATH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINPATH_CACHE_MAX_BYTES", "2e9")

    cache = shared_cache()

    assert cache is shared_cache(tmp_path, max_bytes=2_000_000_000)
    assert cache is not shared_cache(max_bytes=5)
    assert cache.max_bytes == 2_000_000_000


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_mode(mode, tmp_path, monkeypatch):
    """The baseline modes have no cache; `on` has."""
    monkeypatch.setenv("TRAINPATH_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINPATH_MODE", mode)
    assert shared_cache() is None
    monkeypatch.setenv("TRAINPATH_MODE", "on")
    assert shared_cache() is not None


def test_bad_limit(tmp_path, monkeypatch):
    """A limit that is no number is an error that names the variable."""
    monkeypatch.setenv("TRAINPATH_CACHE_MAX_BYTES", "2 GB")
    with pytest.raises(ConfigError, match="TRAINPATH_CACHE_MAX_BYTES"):
        shared_cache(tmp_path)


def test_processes_of_a_job_share_its_start(tmp_path):
    """A process started by the first one has its start, so that it asks nothing again."""
    cache = shared_cache(tmp_path)
    code = (
        "import os; from trainpath.cache import shared_cache;"
        f"print(shared_cache({str(tmp_path)!r}).job_started_ns)"
    )

    child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)

    assert int(child.stdout) == cache.job_started_ns


def test_open_url(put, tmp_path, monkeypatch, server):
    """A path is opened in place, a URL as a private copy, `trainpath::` through the cache."""
    url, data = put()
    path = tmp_path / "local"
    path.write_bytes(b"local")

    with open_url(path) as file:
        assert file.read() == b"local"
    with open_url(url) as file:
        assert file.read() == data
    with open_url(f"trainpath::{url}") as file:
        assert file.read() == data
    assert server.gets() == 2
    monkeypatch.setenv("TRAINPATH_CACHE_DIR", str(tmp_path / "cache"))
    for _ in range(2):
        with open_url(f"trainpath::{url}") as file:
            assert file.read() == data
    assert server.gets() == 3
    with open_url(url, cache=shared_cache()) as file:
        assert file.read() == data
    assert server.gets() == 3
    with pytest.raises(ShardNotFoundError):
        open_url(server.url_for("none"))


def test_import_is_cheap():
    """Importing the cache loads neither torch, webdataset, tenacity nor aiohttp."""
    code = (
        "import sys, trainpath.cache;"
        "heavy = {'torch', 'webdataset', 'aiohttp', 'tenacity'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
