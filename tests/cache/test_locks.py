"""File locks: exclusive, with a deadline that progress extends, released in children."""

from __future__ import annotations

import fcntl
import os
import threading
import time

import pytest

from trainpath.cache.locks import close_lock, file_lock, locks_work, open_locked
from trainpath.errors import DeadlineError


@pytest.fixture
def path(tmp_path):
    """Return where a lock file may be made."""
    return str(tmp_path / "lock")


def test_second_holder_waits(path):
    """The second holder enters only after the first has left, and knows that it waited."""
    order = []

    def second():
        with file_lock(path, timeout_s=20) as (_, waited):
            order.append(waited)

    with file_lock(path, timeout_s=1) as (_, waited):
        assert not waited
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)
        order.append("left")
    thread.join()

    assert order == ["left", True]


def test_deadline(path):
    """A holder without progress is waited for until the deadline, then the error names it."""
    with (
        file_lock(path, timeout_s=1),
        pytest.raises(DeadlineError, match=r"held .*lock for"),
        file_lock(path, timeout_s=0.05),
    ):
        pytest.fail("both hold it")


def test_progress_extends_the_deadline(path):
    """A holder that touches the lock file is waited for, ten times the time-out if need be."""
    begun = threading.Event()

    def first():
        with file_lock(path, timeout_s=1) as (fd, _):
            begun.set()
            for _ in range(50):
                time.sleep(0.02)
                os.utime(fd)

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait(5)
    with file_lock(path, timeout_s=0.3) as (_, waited):
        assert waited
    thread.join()


def test_locks_that_do_nothing_are_noticed(path, monkeypatch):
    """A file system on which flock succeeds for everyone is recognised."""
    assert locks_work(path)
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert not locks_work(path)


def test_closing_twice_is_harmless(path):
    """Closing a lock again does not close another file that got its number."""
    fd = open_locked(path, os.O_CREAT)
    close_lock(fd)
    other = os.open(path, os.O_RDONLY)
    close_lock(fd)

    assert other == fd
    os.close(other)
