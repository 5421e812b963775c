"""The background thread: order, bounds, and errors that are never lost."""

from __future__ import annotations

import threading

import pytest

from trainpath.errors import ClosedError, DeadlineError
from trainpath.overlap import Background


def test_calls_run_in_the_order_submitted():
    """Ten queued calls run one after another on one thread of the given name."""
    seen = []
    with Background("trainpath-test", depth=10) as background:
        for index in range(10):
            background.submit(lambda i=index: seen.append((i, threading.current_thread().name)))

    assert seen == [(index, "trainpath-test") for index in range(10)]


def test_error_surfaces_at_the_next_submit():
    """An error nobody looked at is raised by the next call into the component."""
    background = Background("trainpath-test")
    failed = background.submit(lambda: 1 / 0)
    done = threading.Event()
    failed.add_done_callback(lambda _: done.set())
    assert done.wait(10)

    with pytest.raises(ZeroDivisionError):
        background.submit(int)
    background.close()


def test_error_already_taken_is_not_raised_again():
    """Whoever took the error from the future has handled it."""
    background = Background("trainpath-test")
    with pytest.raises(ZeroDivisionError):
        background.submit(lambda: 1 / 0).result(10)

    assert background.submit(lambda: 7).result(10) == 7
    background.close()


def test_error_surfaces_at_close():
    """The last call's error is raised by close(), once."""
    background = Background("trainpath-test")
    background.submit(lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        background.close()
    background.close()


def test_no_error_hides_another():
    """Of two calls that failed, each is raised once, the older one first."""
    background = Background("trainpath-test")
    both = threading.Event()
    background.submit(lambda: both.wait() / 0)
    background.submit(lambda: {}["missing"])
    both.set()

    with pytest.raises(ZeroDivisionError):
        background.close()
    with pytest.raises(KeyError):
        background.close()
    background.close()


def test_close_has_a_deadline_behind_a_full_queue():
    """close() gives up by its deadline, by name, when a call hangs and others wait."""
    release = threading.Event()
    background = Background("trainpath-test", depth=1)
    started = threading.Event()
    background.submit(lambda: (started.set(), release.wait()))
    assert started.wait(10)
    background.submit(int)
    with pytest.raises(DeadlineError, match="trainpath-test did not finish"):
        background.close(timeout_s=0.01)
    release.set()


def test_full_queue_has_a_deadline():
    """A call that cannot be queued in time is refused by name, not waited for forever."""
    release = threading.Event()
    background = Background("trainpath-test", depth=1)
    background.submit(release.wait)
    with pytest.raises(DeadlineError, match="trainpath-test"):
        for _ in range(3):
            background.submit(int, timeout_s=0.01)
    release.set()
    background.close()


def test_closed_takes_no_work():
    """submit() after close() is an error that says so."""
    background = Background("trainpath-test")
    background.close()

    with pytest.raises(ClosedError, match="trainpath-test"):
        background.submit(int)
