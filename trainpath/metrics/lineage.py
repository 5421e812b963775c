"""Lineage: which stage of the data path each moment of a batch's production went to.

A worker (process or thread) owns a `StageRecorder` and makes it current with
`recording()`. Code that reads, fetches, decodes or collates marks what it does with
`stage(segment)`; where nothing records, that costs one thread-local look-up.
All stamps are CLOCK_MONOTONIC nanoseconds, shared by every process of a host.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from trainpath.metrics.segments import DATA_QUEUE, DATA_TRANSPORT, NUM_SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Stage", "StageRecorder", "cut_wait", "recording", "stage"]

Stage = tuple[int, int, int]
"""(segment, start_ns, end_ns) of one contiguous piece of work."""

_current = threading.local()


class _Switch(Protocol):
    def switch(self, segment: int) -> int: ...


class StageRecorder:
    """Records, exclusively and in order, what one worker does.

    Args:
        clock: Nanosecond clock; must be the one of the step thread (CLOCK_MONOTONIC).
    """

    __slots__ = ("_clock", "_last", "_segment", "_stages")

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._segment = -1
        self._last = 0
        self._stages: list[Stage] = []

    def switch(self, segment: int) -> int:
        """Charge the time since the last switch to the current segment and enter `segment`.

        A negative segment means idle: the time until the next switch is not recorded.
        Returns the segment that was left, to be restored afterwards.
        """
        now = self._clock()
        previous = self._segment
        if previous >= 0 and now > self._last:
            stages = self._stages
            if stages and stages[-1][0] == previous and stages[-1][2] == self._last:
                stages[-1] = (previous, stages[-1][1], now)
            else:
                stages.append((previous, self._last, now))
        self._segment = segment
        self._last = now
        return previous

    def take(self) -> list[Stage]:
        """Return the stages recorded since the last call and forget them."""
        stages, self._stages = self._stages, []
        return stages


@contextmanager
def recording(recorder: _Switch) -> Iterator[None]:
    """Make `recorder` (a `StageRecorder` or a `StepClock`) current in this thread."""
    previous = getattr(_current, "recorder", None)
    _current.recorder = recorder
    try:
        yield
    finally:
        _current.recorder = previous


@contextmanager
def stage(segment: int) -> Iterator[None]:
    """Mark the enclosed code as `segment` for whoever records in this thread."""
    recorder = getattr(_current, "recorder", None)
    if recorder is None:
        yield
        return
    previous = recorder.switch(segment)
    try:
        yield
    finally:
        recorder.switch(previous)


def cut_wait(asked_ns: int, got_ns: int, stages: Sequence[Stage]) -> list[int]:
    """Split the wait `[asked_ns, got_ns]` by what the producing worker did meanwhile.

    Args:
        asked_ns: When the step thread asked for the batch.
        got_ns: When it got it.
        stages: Stages of the worker that produced the batch, in the order in which they
            ended: those of the batch itself and of what the worker did just before. Where
            two overlap, the later one has the time.

    Returns:
        Nanoseconds per segment; they sum to `got_ns - asked_ns` exactly. Time before and
        between stages is `data.queue`, time after the last one `data.transport`.
    """
    parts = [0] * NUM_SEGMENTS
    wait = got_ns - asked_ns
    if wait <= 0:
        return parts
    if not stages:
        parts[DATA_QUEUE] = wait
        return parts
    cursor = max(asked_ns, min(got_ns, stages[-1][2]))
    parts[DATA_TRANSPORT] = got_ns - cursor
    # Backwards: a wait overlaps only the newest stages, and there may be many old ones.
    for segment, begin, end in reversed(stages):
        if begin >= asked_ns and end <= cursor:  # nearly all of them: wholly inside
            parts[segment] += end - begin
            cursor = begin
        elif end <= asked_ns:
            break
        else:
            until = min(end, cursor)
            since = max(begin, asked_ns)
            if until > since:
                parts[segment] += until - since
                cursor = since
    parts[DATA_QUEUE] += wait - sum(parts)
    return parts
