"""Background downloads: order, bound, errors, end."""

from __future__ import annotations

import threading

import pytest

from trainpath.cache.prefetch import Prefetcher


def test_two_at_a_time_also_over_several_calls():
    """A second call does not wait behind the download of the first; a third one does."""
    both, release = threading.Barrier(3), threading.Event()
    seen = []

    def download(url):
        seen.append(url)
        if url != "c":
            both.wait(10)
            release.wait(10)

    prefetcher = Prefetcher(download)
    for url in "abc":
        prefetcher.add([url])
    both.wait(10)
    assert sorted(seen) == ["a", "b"]
    release.set()
    prefetcher.close(timeout_s=10)
    prefetcher.close(timeout_s=10)


def test_error_drops_the_rest_and_is_raised_once():
    """What a download raised surfaces at the next call, and nothing behind it is begun."""
    seen = []
    queued = threading.Event()

    def download(url):
        seen.append(url)
        if url == "bad":
            queued.wait(10)
        raise LookupError(url)

    prefetcher = Prefetcher(download)
    prefetcher.add(["bad", "bad"])  # both threads are busy
    prefetcher.add(["never"])
    queued.set()
    for thread in list(prefetcher._threads):
        thread.join(10)
    with pytest.raises(LookupError, match="bad"):
        prefetcher.raise_error()
    prefetcher.raise_error()
    assert "never" not in seen
