"""The step clock: one exclusive account of what the step thread does.

`switch(segment)` charges the time since the last switch to the segment that was
current. There is no nesting and there are no gaps, so the parts of a step sum to its
wall time by construction.
"""

from __future__ import annotations

import gc
import threading
import time
from bisect import bisect_left
from collections import deque
from operator import attrgetter, sub
from typing import TYPE_CHECKING, Any, NamedTuple

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

_NO_SEGMENTS = (0,) * NUM_SEGMENTS
_MAX_LANES = 4096
_RECENT_BATCHES = 1024

# index, step, start, wall, arrive, depart, parts, parts at the departure
_Row = tuple[int, int, int, int, int, int, list[int], "list[int] | None"]
_Wait = tuple[int, int, int, int, "Sequence[Stage]"]  # index, asked, got, waited, stages
_Batch = tuple[str, "Sequence[Stage]", str]  # lane, stages, name
_start = attrgetter("start_ns")


class StepRecord(NamedTuple):
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


class Span(NamedTuple):
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
            are dropped and counted in `num_dropped` (spans: `num_spans_dropped`; of waits
            too many to keep the lineage is lost, and they stay `data.queue`).
        now_ns: The nanosecond clock; CLOCK_MONOTONIC so that workers share it.

    Attributes:
        step: Index of the current step.
        step_count: Steps finished.
        num_dropped: Finished steps that were overwritten before anybody drained them.
        num_spans_dropped: Spans lost in the same way.

    Cost:
        About 0.3 us a switch in a warm loop, 2 us between cold ones; no lock, no thread, and
        of allocations one list a step: whatever can wait (cutting waits by lineage, adding
        up background work) is done by the thread that drains. See `bench/clock_cost.py`.

    Guarantee:
        For every step, `sum(segments_ns) == wall_ns`, and the walls of successive steps
        leave no gap.
    """

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_asked",
        "_batches",
        "_before",
        "_began",
        "_busy",
        "_capacity",
        "_covered",
        "_departed",
        "_drained_rows",
        "_end",
        "_gc_began",
        "_gc_ended",
        "_gc_pending",
        "_laps",
        "_last",
        "_now",
        "_parallelism",
        "_parts",
        "_queue_before",
        "_recent_batches",
        "_rows",
        "_segment",
        "_slot",
        "_stamps",
        "_thread",
        "_waiting",
        "_waits",
        "_watching_gc",
        "num_dropped",
        "num_spans_dropped",
        "step",
        "step_count",
    )

    def __init__(
        self, *, capacity: int = 8192, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._now = now_ns
        self._capacity = capacity
        # Handing a list over costs a third of copying it into a preallocated table.
        self._rows: deque[_Row] = deque(maxlen=capacity)
        self._waits: deque[_Wait] = deque(maxlen=4 * capacity)
        self._batches: deque[_Batch] = deque(maxlen=4 * capacity)
        self._recent_batches: deque[_Batch] = deque(maxlen=_RECENT_BATCHES)
        self._stamps = [0] * (2 * capacity)  # time, segment entered, time, ...
        self._slot = 0
        self._end = 2 * capacity
        self._laps = 0
        self._parts = [0] * NUM_SEGMENTS
        self._before: list[int] | None = None  # the parts at the departure
        self._arrived = 0
        self._departed = 0
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
        self.num_dropped = 0
        self.num_spans_dropped = 0
        self.step = 0
        self.step_count = 0
        self._asked = 0
        self._queue_before = 0
        self._segment = PYTHON
        self._last = self._now()
        self._began = self._last

    def start(self, step: int = 0) -> None:
        """Begin step `step` now, on the calling thread; what was charged since is dropped."""
        self._thread = threading.get_ident()
        self.step = step
        self._segment = PYTHON
        self._gc_pending = 0
        self._last = self._now()
        while self._waits and self._waits[-1][0] == self.step_count:
            self._waits.pop()
        self._begin()

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
        self._parts[previous] += elapsed
        self._segment = segment
        self._last = now
        # Between cold caches each C function costs a microsecond: nothing here leaves the
        # interpreter's own loop (no modulo, no shift, no array).
        slot = self._slot
        stamps = self._stamps
        stamps[slot] = now
        stamps[slot + 1] = segment
        slot += 2
        self._slot = slot if slot < self._end else self._wrap()
        return previous

    def _wrap(self) -> int:
        self._laps += 1
        return 0

    @property
    def num_switches(self) -> int:
        """Switches made so far."""
        return (self._laps * self._end + self._slot) // 2

    def ask(self) -> None:
        """The step thread asks for a batch and waits: enter `data.queue`."""
        self.switch(DATA_QUEUE)
        self._asked = self._last
        self._queue_before = self._parts[DATA_QUEUE]

    def got(self, stages: Sequence[Stage], then: int = PYTHON) -> None:
        """The batch is here: cut the wait by its lineage and enter `then`.

        Args:
            stages: What the worker that produced the batch did, oldest first, the tail of
                its earlier batches included (see `cut_wait`).
            then: The segment to enter.
        """
        self.switch(then)
        parts = self._parts
        waited = parts[DATA_QUEUE] - self._queue_before
        if waited < _SHORT_WAIT_NS:
            parts[DATA_QUEUE] -= waited
            parts[DATA_TRANSPORT] += waited
        else:
            self._waits.append((self.step_count, self._asked, self._last, waited, stages))
        self._asked = self._last
        self._queue_before = parts[DATA_QUEUE]

    def now_ns(self) -> int:
        """Return the clock's current time in nanoseconds."""
        return self._now()

    def arrive(self) -> int:
        """This rank is ready and waits for the others: stamp it and enter `comm.transfer`.

        Returns:
            The segment that was left.
        """
        previous = self.switch(COMM_TRANSFER)
        self._arrived = self._last
        return previous

    def depart(self, segment: int = PYTHON) -> None:
        """The gradients of all ranks are here: stamp it and enter `segment`."""
        self.switch(segment)
        self._departed = self._last
        self._before = self._parts.copy()

    def end_step(self) -> None:
        """Close the current step; the next one begins at the same instant."""
        self.switch(PYTHON)
        self._rows.append(
            (
                self.step_count,
                self.step,
                self._began,
                self._last - self._began,
                self._arrived,
                self._departed,
                self._parts,
                self._before,
            )
        )
        self.step_count += 1
        self.step += 1
        self._begin()

    def _begin(self) -> None:
        self._began = self._last
        self._parts = [0] * NUM_SEGMENTS
        self._before = None
        self._arrived = self._departed = 0
        # A wait that spans the boundary is cut in the step it ends in, from here on.
        self._asked = self._last
        self._queue_before = 0

    def add_span(self, span: Span) -> None:
        """Record background work; callable from any thread."""
        if len(self._busy) == self._busy.maxlen:
            self.num_spans_dropped += 1
        self._busy.append(span)

    def add_stages(self, lane: str, stages: Sequence[Stage], name: str = "") -> None:
        """Record the stages of one batch, all done by `lane`; callable from any thread.

        The same as a span each, but one call; the list is kept, not copied.
        """
        if stages:
            self._batches.append((lane, stages, name))

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
        slot = self._slot
        self._stamps[slot] = time_ns
        self._stamps[slot + 1] = segment
        slot += 2
        self._slot = slot if slot < self._end else self._wrap()

    def _charge_gc(self, now: int, elapsed: int) -> int:
        if self._gc_ended > now:
            return 0  # it ran after this switch had read the time: the next one charges it
        taken = min(self._gc_pending, elapsed)
        self._gc_pending -= taken
        self._parts[PYTHON_GC] += taken
        return taken

    def drain(self, *, final: bool = False) -> tuple[list[StepRecord], list[Span]]:
        """Return the steps and spans finished since the last call (one draining thread).

        Each span is counted in `busy_ns` of the step in which it ended, or of the first
        step drained after it was added. Spans wait for such a step, unless `final`.
        """
        rows = self._take_rows()
        self._cut_waits(rows)
        spans, self._waiting = self._waiting, []
        while self._busy:
            spans.append(self._busy.popleft())
        if not final:
            last_end = rows[-1][2] + rows[-1][3] if rows else 0
            self._waiting = [span for span in spans if span.end_ns > last_end]
            surplus = max(0, len(self._waiting) - 16 * self._capacity)
            self.num_spans_dropped += surplus
            del self._waiting[:surplus]
            spans = [span for span in spans if span.end_ns <= last_end]
        ends = [row[2] + row[3] for row in rows]
        busy = [[0] * NUM_SEGMENTS for _ in rows]
        spans.sort(key=_start)
        for span in spans:
            length = self._uncovered(span)
            index = bisect_left(ends, span.end_ns)
            if index < len(busy):
                busy[index][span.segment] += length
        if rows:
            self._count_batches(ends, busy)
        return list(map(_record, rows, busy)), spans

    def _take_rows(self) -> list[_Row]:
        rows = []
        while self._rows:
            rows.append(self._rows.popleft())
        if rows:
            end = rows[-1][0] + 1
            self.num_dropped += end - self._drained_rows - len(rows)
            self._drained_rows = end
        return rows

    def _cut_waits(self, rows: list[_Row]) -> None:
        """Move data waits from `data.queue` to what their batches were waiting for."""
        if not rows:
            return
        by_index = {row[0]: row for row in rows}
        waits = self._waits
        while waits and waits[0][0] <= rows[-1][0]:
            index, asked, got, waited, stages = waits.popleft()
            row = by_index.get(index)
            if row is not None:
                _, _, _, _, _, departed, parts, before = row
                moved = _cut(asked, got, waited, stages)
                if before is not None and got <= departed:
                    _move(before, waited, moved)
                _move(parts, waited, moved)

    def _count_batches(self, ends: list[int], busy: list[list[int]]) -> None:
        """Count the stages of a batch as busy time of the step in which the batch was done."""
        batches = self._batches
        index = 0
        while batches and (done := batches[0][1][-1][2]) <= ends[-1]:
            batch = batches.popleft()
            self._recent_batches.append(batch)
            while ends[index] < done:
                index += 1
            counted = busy[index]
            for segment, start, end in batch[1]:
                counted[segment] += end - start

    def batches(self) -> list[tuple[str, Sequence[Stage], str]]:
        """Return (lane, stages, name) of the newest batches that `drain` has counted."""
        return list(self._recent_batches)

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
        slot = self._slot
        old = self._stamps[slot:] if self._laps else []
        row = old + self._stamps[:slot]
        return list(zip(row[::2], row[1::2], strict=True))

    def close(self) -> None:
        """Stop watching the garbage collector; safe to call twice."""
        if self._watching_gc:
            self._watching_gc = False
            gc.callbacks.remove(self._on_gc)


def _cut(asked_ns: int, got_ns: int, waited: int, stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Return (segment, nanoseconds) of the `waited` ones inside a wait."""
    parts = [item for item in enumerate(cut_wait(asked_ns, got_ns, stages)) if item[1]]
    # What was charged elsewhere inside the wait (a collection, stages marked on the step
    # thread itself) is charged already: take it out of the cut, oldest segment first.
    elsewhere = got_ns - asked_ns - waited
    if elsewhere == 0:
        return parts
    moved = []
    for segment, part in parts:
        taken = min(elsewhere, part)
        elsewhere -= taken
        moved.append((segment, part - taken))
    return moved


def _move(parts: list[int], waited: int, moved: list[tuple[int, int]]) -> None:
    parts[DATA_QUEUE] -= waited
    for segment, part in moved:
        parts[segment] += part


def _record(row: _Row, busy: list[int]) -> StepRecord:
    _, step, began, wall, arrived, departed, parts, before = row
    after = _NO_SEGMENTS
    if before is not None:
        after = tuple(map(sub, parts, before))
        if min(after) < 0:  # a data wait that was cut after the departure in its middle
            after = tuple(max(0, part) for part in after)
    return StepRecord(step, began, wall, tuple(parts), arrived, departed, tuple(busy), after)


class NullClock(StepClock):
    """A clock that charges nothing: what components use when nobody measures."""

    __slots__ = ()

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

    def add_stages(self, lane: str, stages: Sequence[Stage], name: str = "") -> None:
        """Do nothing."""

    def watch_gc(self) -> None:
        """Do nothing."""


NULL_CLOCK = NullClock()
