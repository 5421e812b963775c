"""The step clock: one exclusive account of what the step thread does.

`switch(segment)` charges the time since the last switch to the segment that was
current. There is no nesting and there are no gaps, so the parts of a step sum to its
wall time by construction.
"""

from __future__ import annotations

import gc
import threading
import time
from array import array
from collections import deque
from dataclasses import dataclass
from operator import sub
from typing import TYPE_CHECKING, Any

from trainpath.metrics.lineage import cut_wait
from trainpath.metrics.segments import (
    COMM_TRANSFER,
    DATA_QUEUE,
    DATA_TRANSPORT,
    NUM_SEGMENTS,
    PYTHON,
    PYTHON_GC,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainpath.metrics.lineage import Stage

__all__ = ["NULL_CLOCK", "NullClock", "Span", "StepClock", "StepRecord"]

# A wait shorter than this is the hand-off itself; cutting it by lineage would cost more
# than it tells. It is still charged, to data.transport.
_SHORT_WAIT_NS = 20_000

_NUM_HEAD = 5  # step, start, wall, arrive, depart
# A row: the head, the segments, and the segments as they were at the departure.
_BEFORE = _NUM_HEAD + NUM_SEGMENTS
_WIDTH = _BEFORE + NUM_SEGMENTS
_QUEUE = _NUM_HEAD + DATA_QUEUE
_TRANSPORT = _NUM_HEAD + DATA_TRANSPORT
_GC = _NUM_HEAD + PYTHON_GC
_NO_SEGMENTS = (0,) * NUM_SEGMENTS
_MAX_LANES = 4096


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One finished step of one rank; all times are CLOCK_MONOTONIC nanoseconds.

    Attributes:
        step: Index of the step, from 0.
        start_ns: When the step began (the end of the one before).
        wall_ns: Its length; equals `sum(segments_ns)`.
        segments_ns: Foreground, exclusive nanoseconds per segment.
        arrive_ns: When this rank was ready to wait for the others' gradients (0: never).
        depart_ns: When the gradients of all ranks were there (0: never).
        busy_ns: Background nanoseconds per segment that ended during this step.
        after_ns: The part of `segments_ns` that came after the departure; it can only make
            this rank late for the next one (all zero if there was no departure).
    """

    step: int
    start_ns: int
    wall_ns: int
    segments_ns: tuple[int, ...]
    arrive_ns: int
    depart_ns: int
    busy_ns: tuple[int, ...]
    after_ns: tuple[int, ...] = _NO_SEGMENTS


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of background work, for timelines and busy time.

    Attributes:
        lane: Who did it ("worker 0", "bucket", "ckpt writer"): one serial resource, so that
            overlapping spans of a lane count once as busy time.
        segment: Index of the segment on whose behalf it was done.
        start_ns: Start, CLOCK_MONOTONIC nanoseconds.
        end_ns: End.
        name: What it was ("batch 12", "bucket 3"), for the timeline only.
    """

    lane: str
    segment: int
    start_ns: int
    end_ns: int
    name: str = ""


class StepClock:
    """Charges every moment of the step thread to exactly one segment.

    Args:
        capacity: How many finished steps and switches are kept until drained; older ones
            are dropped and counted in `num_dropped` (spans: `num_spans_dropped`).
        now_ns: The nanosecond clock; CLOCK_MONOTONIC so that workers share it.

    Attributes:
        step: Index of the current step.
        step_count: Steps finished.
        num_switches: Switches made.
        num_dropped: Finished steps that were overwritten before anybody drained them.
        num_spans_dropped: Spans lost in the same way.

    Cost:
        About 0.5 us a switch, no allocation that outlives it, no lock, no thread. See
        `bench/clock_cost.py`.

    Guarantee:
        For every step, `sum(segments_ns) == wall_ns`, and the walls of successive steps
        leave no gap.
    """

    def __init__(
        self, *, capacity: int = 8192, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._now = now_ns
        self._capacity = capacity
        # One more than is kept: the row that the step thread may be writing is never read.
        self._ring = capacity + 1
        self._rows = array("q", bytes(8 * _WIDTH * self._ring))
        self._stamps = array("q", bytes(16 * capacity))
        self._head = array("q", bytes(8 * _WIDTH))
        self._zeros = array("q", bytes(8 * _WIDTH))
        self._busy: deque[Span] = deque(maxlen=16 * capacity)
        self._waiting: list[Span] = []
        self._covered: dict[tuple[str, int], int] = {}
        self._parallelism = [1] * NUM_SEGMENTS
        self._thread = threading.get_ident()
        self._watching_gc = False
        self._gc_began = 0
        self._gc_ended = 0
        self._gc_pending = 0
        self._drained_rows = 0
        self._drained_stamps = 0
        self.num_switches = 0
        self.num_dropped = 0
        self.num_spans_dropped = 0
        self.step = 0
        self.step_count = 0
        self._asked = 0
        self._queue_before = 0
        self._segment = PYTHON
        self._last = self._now()
        self._head[1] = self._last

    def start(self, step: int = 0) -> None:
        """Begin step `step` now, on the calling thread; what was charged since is dropped."""
        self._thread = threading.get_ident()
        self._head[:] = self._zeros
        self.step = step
        self._segment = PYTHON
        self._gc_pending = 0
        self._last = self._now()
        self._head[1] = self._last
        self._asked = self._last
        self._queue_before = 0

    def switch(self, segment: int) -> int:
        """Charge the time since the last switch and enter `segment`.

        Returns:
            The segment that was left, so that the caller can restore it.
        """
        now = self._now()
        previous = self._segment
        elapsed = now - self._last
        if self._gc_pending:
            elapsed -= self._charge_gc(now, elapsed)
        self._head[_NUM_HEAD + previous] += elapsed
        self._segment = segment
        self._last = now
        slot = 2 * (self.num_switches % self._capacity)
        self._stamps[slot] = now
        self._stamps[slot + 1] = segment
        self.num_switches += 1
        return previous

    def ask(self) -> None:
        """The step thread asks for a batch and waits: enter `data.queue`."""
        self.switch(DATA_QUEUE)
        self._asked = self._last
        self._queue_before = self._head[_QUEUE]

    def got(self, stages: Sequence[Stage], then: int = PYTHON) -> None:
        """The batch is here: cut the wait by its lineage and enter `then`.

        Args:
            stages: What the worker that produced the batch did, oldest first, the tail of
                its earlier batches included (see `cut_wait`).
            then: The segment to enter.
        """
        self.switch(then)
        head = self._head
        asked, got = self._asked, self._last
        waited = head[_QUEUE] - self._queue_before
        self._asked = got
        if waited < _SHORT_WAIT_NS:
            head[_QUEUE] -= waited
            head[_TRANSPORT] += waited
            self._queue_before = head[_QUEUE]
            return
        parts = cut_wait(asked, got, stages)
        head[_QUEUE] -= waited
        # What was charged elsewhere inside the wait (a collection, stages marked on this
        # thread) is charged already: take it out of the parts, oldest segment first.
        elsewhere = got - asked - waited
        for segment, part in enumerate(parts):
            if part:
                taken = min(elsewhere, part)
                elsewhere -= taken
                head[_NUM_HEAD + segment] += part - taken
        self._queue_before = head[_QUEUE]

    def now_ns(self) -> int:
        """Return the clock's current time in nanoseconds."""
        return self._now()

    def arrive(self) -> int:
        """This rank is ready and waits for the others: stamp it and enter `comm.transfer`.

        Returns:
            The segment that was left.
        """
        previous = self.switch(COMM_TRANSFER)
        self._head[3] = self._last
        return previous

    def depart(self, segment: int = PYTHON) -> None:
        """The gradients of all ranks are here: stamp it and enter `segment`."""
        self.switch(segment)
        head = self._head
        head[4] = self._last
        head[_BEFORE:] = head[_NUM_HEAD:_BEFORE]

    def end_step(self) -> None:
        """Close the current step; the next one begins at the same instant."""
        self.switch(PYTHON)
        head = self._head
        now = self._last
        head[0] = self.step
        head[2] = now - head[1]
        base = _WIDTH * (self.step_count % self._ring)
        self._rows[base : base + _WIDTH] = head
        self.step_count += 1
        self.step += 1
        head[:] = self._zeros
        head[1] = now
        # A wait that spans the boundary is cut in the step it ends in, from here on.
        self._asked = now
        self._queue_before = 0

    def add_span(self, span: Span) -> None:
        """Record background work; callable from any thread."""
        if len(self._busy) == self._busy.maxlen:
            self.num_spans_dropped += 1
        self._busy.append(span)

    def set_parallelism(self, segment: int, parallelism: int) -> None:
        """Say how many units work on `segment` at once (its service period is busy / this)."""
        self._parallelism[segment] = max(1, parallelism)

    @property
    def parallelism(self) -> tuple[int, ...]:
        """Units that work on each segment at once."""
        return tuple(self._parallelism)

    def watch_gc(self) -> None:
        """Charge garbage collections on the step thread to `python.gc` until `close()`."""
        if not self._watching_gc:
            self._watching_gc = True
            gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: str, _info: dict[str, Any]) -> None:
        # May run in the middle of `switch`: only note what the collection took; the next
        # switch charges it.
        if threading.get_ident() != self._thread:
            return
        now = self._now()
        if phase == "start":
            self._gc_began = now
        elif self._gc_began:
            self._gc_pending += now - self._gc_began
            self._gc_ended = now
            self._stamp(self._gc_began, PYTHON_GC)
            self._stamp(now, self._segment)
            self._gc_began = 0

    def _stamp(self, time_ns: int, segment: int) -> None:
        slot = 2 * (self.num_switches % self._capacity)
        self._stamps[slot] = time_ns
        self._stamps[slot + 1] = segment
        self.num_switches += 1

    def _charge_gc(self, now: int, elapsed: int) -> int:
        if self._gc_ended > now:
            return 0  # it ran after this switch had read the time: the next one charges it
        taken = min(self._gc_pending, elapsed)
        self._gc_pending -= taken
        self._head[_GC] += taken
        return taken

    def drain(self, *, final: bool = False) -> tuple[list[StepRecord], list[Span]]:
        """Return the steps and spans finished since the last call (one draining thread).

        Each span is counted in `busy_ns` of the step in which it ended, or of the first
        step drained after it was added. Spans wait for such a step, unless `final`.
        """
        rows = self._take_rows()
        spans, self._waiting = self._waiting, []
        while self._busy:
            spans.append(self._busy.popleft())
        if not final:
            last_end = rows[-1][1] + rows[-1][2] if rows else 0
            self._waiting = [span for span in spans if span.end_ns > last_end]
            spans = [span for span in spans if span.end_ns <= last_end]
        spans.sort(key=lambda span: span.start_ns)
        pieces = sorted((span.end_ns, span.segment, self._uncovered(span)) for span in spans)
        records = []
        position = 0
        for row in rows:
            busy = [0] * NUM_SEGMENTS
            step_end = row[1] + row[2]
            while position < len(pieces) and pieces[position][0] <= step_end:
                busy[pieces[position][1]] += pieces[position][2]
                position += 1
            records.append(_record(row, tuple(busy)))
        return records, spans

    def _take_rows(self) -> list[array[int]]:
        ring = self._ring
        end = self.step_count
        rows = []
        for index in range(max(self._drained_rows, end - self._capacity), end):
            base = _WIDTH * (index % ring)
            row = self._rows[base : base + _WIDTH]
            # If the step thread came round meanwhile, this may be a newer row: drop it.
            if index > self.step_count - ring:
                rows.append(row)
        self.num_dropped += end - self._drained_rows - len(rows)
        self._drained_rows = end
        return rows

    def _uncovered(self, span: Span) -> int:
        """Return the length of `span` that no earlier span of its lane has covered."""
        key = (span.lane, span.segment)
        covered = self._covered.get(key, 0)
        if span.end_ns <= covered:
            return 0
        if len(self._covered) >= _MAX_LANES:
            self._covered.clear()
        self._covered[key] = span.end_ns
        return span.end_ns - max(span.start_ns, covered)

    def stamps(self) -> list[tuple[int, int]]:
        """Return (time_ns, segment entered) of the most recent switches, oldest first."""
        end = self.num_switches
        first = max(0, end - self._capacity)
        stamps = self._stamps
        slots = (2 * (index % self._capacity) for index in range(first, end))
        return [(stamps[slot], stamps[slot + 1]) for slot in slots]

    def close(self) -> None:
        """Stop watching the garbage collector; safe to call twice."""
        if self._watching_gc:
            self._watching_gc = False
            gc.callbacks.remove(self._on_gc)


def _record(row: array[int], busy_ns: tuple[int, ...]) -> StepRecord:
    segments = tuple(row[_NUM_HEAD:_BEFORE])
    after = _NO_SEGMENTS
    if row[4] > 0:
        after = tuple(map(sub, segments, row[_BEFORE:]))
        if min(after) < 0:  # a data wait that was cut after the departure in its middle
            after = tuple(max(0, part) for part in after)
    return StepRecord(
        step=row[0],
        start_ns=row[1],
        wall_ns=row[2],
        segments_ns=segments,
        arrive_ns=row[3],
        depart_ns=row[4],
        busy_ns=busy_ns,
        after_ns=after,
    )


class NullClock(StepClock):
    """A clock that charges nothing: what components use when nobody measures."""

    def __init__(self) -> None:
        super().__init__(capacity=1)

    def start(self, step: int = 0) -> None:
        """Do nothing."""

    def switch(self, segment: int) -> int:
        """Do nothing; return `segment`."""
        return segment

    def ask(self) -> None:
        """Do nothing."""

    def got(self, stages: Sequence[Stage], then: int = PYTHON) -> None:
        """Do nothing."""

    def arrive(self) -> int:
        """Do nothing."""
        return PYTHON

    def depart(self, segment: int = PYTHON) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""

    def add_span(self, span: Span) -> None:
        """Do nothing."""

    def watch_gc(self) -> None:
        """Do nothing."""


NULL_CLOCK = NullClock()
