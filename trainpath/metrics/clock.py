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
from typing import TYPE_CHECKING, Any

from trainpath.metrics.lineage import cut_wait
from trainpath.metrics.segments import (
    COMM_TRANSFER,
    DATA_QUEUE,
    DATA_SEGMENTS,
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
_WIDTH = _NUM_HEAD + NUM_SEGMENTS


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
    """

    step: int
    start_ns: int
    wall_ns: int
    segments_ns: tuple[int, ...]
    arrive_ns: int
    depart_ns: int
    busy_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of background work, for timelines and busy time.

    Attributes:
        lane: Who did it ("worker 0", "bucket", "ckpt writer").
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
            are dropped and counted in `num_dropped`.
        now_ns: The nanosecond clock; CLOCK_MONOTONIC so that workers share it.

    Cost:
        About 0.3 us a switch, no allocation that outlives it, no lock, no thread. See
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
        self._rows = array("q", bytes(8 * _WIDTH * capacity))
        self._stamps = array("q", bytes(16 * capacity))
        self._head = array("q", bytes(8 * _WIDTH))
        self._zeros = array("q", bytes(8 * _WIDTH))
        self._busy: deque[Span] = deque(maxlen=16 * capacity)
        self._parallelism = [1] * NUM_SEGMENTS
        self._thread = threading.get_ident()
        self._watching_gc = False
        self._gc_previous = PYTHON
        self._drained_rows = 0
        self._drained_stamps = 0
        self.num_switches = 0
        self.num_dropped = 0
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
        self._last = self._now()
        self._head[1] = self._last

    def switch(self, segment: int) -> int:
        """Charge the time since the last switch and enter `segment`.

        Returns:
            The segment that was left, so that the caller can restore it.
        """
        now = self._now()
        previous = self._segment
        self._head[_NUM_HEAD + previous] += now - self._last
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
        self._queue_before = self._head[_NUM_HEAD + DATA_QUEUE]

    def got(self, stages: Sequence[Stage], then: int = PYTHON) -> None:
        """The batch is here: cut the wait by its lineage and enter `then`.

        Args:
            stages: What the worker that produced the batch did, oldest first, the tail of
                its earlier batches included (see `cut_wait`).
            then: The segment to enter.
        """
        self.switch(then)
        head = self._head
        waited = head[_NUM_HEAD + DATA_QUEUE] - self._queue_before
        head[_NUM_HEAD + DATA_QUEUE] = self._queue_before
        if waited < _SHORT_WAIT_NS:
            head[_NUM_HEAD + DATA_TRANSPORT] += waited
            return
        parts = cut_wait(self._asked, self._last, stages)
        # A collection inside the wait was charged to python.gc already.
        elsewhere = self._last - self._asked - waited
        for segment in DATA_SEGMENTS:
            taken = min(elsewhere, parts[segment])
            elsewhere -= taken
            head[_NUM_HEAD + segment] += parts[segment] - taken

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
        self._head[4] = self._last

    def end_step(self) -> None:
        """Close the current step; the next one begins at the same instant."""
        self.switch(PYTHON)
        head = self._head
        now = self._last
        head[0] = self.step
        head[2] = now - head[1]
        base = _WIDTH * (self.step_count % self._capacity)
        self._rows[base : base + _WIDTH] = head
        self.step_count += 1
        self.step += 1
        head[:] = self._zeros
        head[1] = now

    def add_span(self, span: Span) -> None:
        """Record background work; callable from any thread."""
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
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._gc_previous = self.switch(PYTHON_GC)
        elif self._segment == PYTHON_GC:
            self.switch(self._gc_previous)

    def drain(self) -> tuple[list[StepRecord], list[Span]]:
        """Return the steps and spans finished since the last call (one draining thread).

        The spans are assigned to the step in which they ended, in `busy_ns`.
        """
        rows: list[array[int]] = []
        end = self.step_count
        first = max(self._drained_rows, end - self._capacity)
        self.num_dropped += first - self._drained_rows
        for index in range(first, end):
            base = _WIDTH * (index % self._capacity)
            rows.append(self._rows[base : base + _WIDTH])
        self._drained_rows = end
        spans: list[Span] = []
        while self._busy:
            spans.append(self._busy.popleft())
        spans.sort(key=lambda span: span.end_ns)
        records = []
        position = 0
        for row in rows:
            busy = [0] * NUM_SEGMENTS
            step_end = row[1] + row[2]
            while position < len(spans) and spans[position].end_ns <= step_end:
                span = spans[position]
                busy[span.segment] += span.end_ns - span.start_ns
                position += 1
            records.append(
                StepRecord(
                    step=row[0],
                    start_ns=row[1],
                    wall_ns=row[2],
                    segments_ns=tuple(row[_NUM_HEAD:]),
                    arrive_ns=row[3],
                    depart_ns=row[4],
                    busy_ns=tuple(busy),
                )
            )
        if rows:
            self._busy.extendleft(reversed(spans[position:]))
            spans = spans[:position]
        return records, spans

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
