"""What every test may rely on."""

from __future__ import annotations

import signal


def pytest_configure():
    """Take Ctrl-C as a terminal gives it, also where the tests were started with it ignored.

    A job in the background of a shell, or under nohup, ignores SIGINT, and its children would
    inherit that; tests that interrupt a process need the default.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
