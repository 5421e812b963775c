"""webdataset reads `trainpath::` URLs through the cache."""

from __future__ import annotations

import io

import fsspec
import pytest
import webdataset
from braceexpand import braceexpand
from webdataset.gopen import gopen, gopen_schemes

from trainpath.cache import environment, register_webdataset
from trainpath.errors import ConfigError


@pytest.fixture(autouse=True)
def cached(monkeypatch, tmp_path):
    """Set the cache of the environment and leave webdataset as it was."""
    monkeypatch.setenv("TRAINPATH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINPATH_CACHE_STARTED_NS", "")
    monkeypatch.delenv("TRAINPATH_MODE", raising=False)
    caches = {}
    monkeypatch.setattr(environment, "_caches", caches)
    before = dict(gopen_schemes)
    yield
    gopen_schemes.clear()
    gopen_schemes.update(before)
    for cache in caches.values():
        cache.close()


@pytest.fixture
def shards(server):
    """Put two shards of three samples on the server; returns the URL with braces."""
    for shard in range(2):
        packed = io.BytesIO()
        with webdataset.TarWriter(packed) as writer:
            for index in range(3):
                writer.write({"__key__": f"{shard}-{index}", "txt": f"{shard} {index}"})
        server.put(f"{shard:02}.tar", packed.getvalue())
    return server.url_for("") + "{00..01}.tar"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_two_epochs(shards, server):
    """Epochs over a brace URL and over a list of URLs read each shard from the origin once."""
    register_webdataset()
    texts = []

    listed = [f"trainpath::{url}" for url in braceexpand(shards)]
    for urls in [f"trainpath:{shards}", listed]:
        dataset = webdataset.WebDataset(urls, shardshuffle=False)
        texts += [sample["txt"] for sample in dataset]

    assert texts == [f"{shard} {index}".encode() for shard in range(2) for index in range(3)] * 2
    assert server.gets() == 2


def test_baseline(monkeypatch, tmp_path):
    """With TRAINPATH_MODE=observe webdataset opens the URL itself."""
    monkeypatch.setenv("TRAINPATH_MODE", "observe")
    register_webdataset()
    path = tmp_path / "a.tar"
    path.write_bytes(b"x")

    with gopen(f"trainpath::file:{path}", "rb") as file:
        assert file.read() == b"x"

    assert not (tmp_path / "cache").exists()


def test_read_only():
    """Writing is refused clearly."""
    register_webdataset()
    with pytest.raises(ConfigError, match="read-only"):
        gopen("trainpath::http://host/a.tar", "wb")


def test_fsspec_is_imported_for_the_entry_point():
    """The scheme of webdataset and the protocol of fsspec have one name."""
    register_webdataset()
    assert "trainpath" in gopen_schemes
    assert fsspec.get_filesystem_class("trainpath").protocol == "trainpath"
