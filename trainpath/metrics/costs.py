"""What measuring costs the job: calibrated, counted, and kept in bounds."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from trainpath.metrics.clock import StepClock
from trainpath.metrics.segments import PYTHON

__all__ = ["Costs"]

_ENOUGH_STEPS = 32


class Costs:
    """What the measuring itself costs, and how much of it a run can afford.

    Args:
        clock: The clock whose switches and steps are counted.
        steps_per_s: Most steps a second that are to be recorded.
    """

    def __init__(self, clock: StepClock, steps_per_s: float) -> None:
        self._clock = clock
        self._shortest_ns = 1e9 / steps_per_s
        self._begin_ns = time.monotonic_ns()
        self._switches = clock.num_switches
        self._steps = clock.step_count
        self._switch_ns, self._step_ns = _calibrate()
        self._stall_us = self._stall_now_us = _cpu_stall_us()
        self._stall_read_ns = self._begin_ns
        self._helper_ns = 0
        self._seen = (self._begin_ns, self._steps)

    def affordable(self, every: int) -> int:
        """Return of how many steps one may be recorded, at the pace of the last ones.

        Args:
            every: What holds now; it stays while too few steps were made to tell.
        """
        then_ns, steps = self._seen
        now_ns, made = time.monotonic_ns(), self._clock.step_count - steps
        if made < _ENOUGH_STEPS:
            return every
        self._seen = (now_ns, steps + made)
        step_ns = (now_ns - then_ns) / made
        every = 1
        while every * step_ns < self._shortest_ns:
            every *= 2  # powers of two: the ranks share the steps of the coarsest
        return every

    def elapsed_ns(self) -> int:
        """Return the time since the recorder began."""
        return time.monotonic_ns() - self._begin_ns

    def clock_ns(self) -> int:
        """Return what the step thread has spent on the clock, by calibration."""
        switches = self._clock.num_switches - self._switches
        steps = self._clock.step_count - self._steps
        return int(switches * self._switch_ns + steps * self._step_ns)

    def helper_ns(self, thread: threading.Thread) -> int:
        """Return the CPU time of the helper thread, as of when it last asked."""
        if threading.current_thread() is thread:
            self._helper_ns = time.thread_time_ns()
        return self._helper_ns

    def cpu_stall_us(self, *, fresh: bool) -> int:
        """Return for how long tasks of this machine waited for a core meanwhile; -1: unknown."""
        # The kernel takes 0.2 ms to answer: asked every ten seconds, and for a report.
        now_ns = time.monotonic_ns()
        if fresh or now_ns - self._stall_read_ns > 10**10:
            self._stall_read_ns = now_ns
            self._stall_now_us = _cpu_stall_us()
        known = self._stall_us >= 0 and self._stall_now_us >= 0
        return self._stall_now_us - self._stall_us if known else -1


def _calibrate() -> tuple[float, float]:
    """Return nanoseconds of a switch and of an end of step, the best of three."""
    clock = StepClock(capacity=64)
    switches, steps = [], []
    for _ in range(3):
        begin = time.thread_time_ns()
        for _ in range(200):
            clock.switch(PYTHON)
        middle = time.thread_time_ns()
        for _ in range(50):
            clock.end_step()
        switches.append((middle - begin) / 200)
        steps.append((time.thread_time_ns() - middle) / 50)
    return min(switches), max(0.0, min(steps) - min(switches))


def _cpu_stall_us() -> int:
    """Return `some total` of /proc/pressure/cpu in microseconds; -1 where there is none."""
    try:
        text = Path("/proc/pressure/cpu").read_text(encoding="ascii")
        return int(text.splitlines()[0].rpartition("total=")[2])
    except (OSError, ValueError, IndexError):
        return -1
