"""The step clock: one exclusive account of what the step thread does.

The step thread notes when it enters which segment, and nothing else; the draining thread
makes steps of that (`replay`). There is no nesting and there are no gaps, so the parts of
a step sum to its wall time by construction.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from trainpath.metrics.background import Background, Span
from trainpath.metrics.replay import (
    ARRIVE,
    ASK,
    DEPART,
    END,
    GOT,
    NOTE,
    START,
    Event,
    Replay,
    StepRecord,
)
from trainpath.metrics.segments import (
    COMM_TRANSFER,
    DATA_QUEUE,
    FORWARD,
    NUM_SEGMENTS,
    PYTHON,
    PYTHON_GC,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainpath.metrics.background import Batch
    from trainpath.metrics.lineage import Stage

__all__ = ["NULL_CLOCK", "NullClock", "Span", "StepClock", "StepRecord"]

_EVENTS_A_STEP = 16


class StepClock:
    """Charges every moment of the step thread to exactly one segment.

    Args:
        capacity: How many finished steps are kept until drained, and how many switches for
            timelines; older ones are dropped and counted in `num_dropped` (spans:
            `num_spans_dropped`). Events of 16 switches for each such step are kept.
        now_ns: The nanosecond clock; CLOCK_MONOTONIC so that workers share it.

    Attributes:
        step: Index of the current step.
        step_count: Steps finished.

    Cost:
        About 0.2 us a switch in a warm loop, 1 us between cold ones; no lock, no thread, one
        tuple of memory until drained (100 bytes; 13 MB at most). Adding up steps, cutting waits
        by lineage and counting background work are left to the thread that drains. See
        `bench/clock_cost.py`.

    Guarantee:
        For every step, `sum(segments_ns) == wall_ns`, and the walls of successive steps
        leave no gap but for steps that were dropped, which are counted.
    """

    __slots__ = (
        "__weakref__",
        "_append",
        "_background",
        "_capacity",
        "_events",
        "_gc_began",
        "_now",
        "_num_drained",
        "_num_overwritten",
        "_parallelism",
        "_replay",
        "_segment",
        "_thread",
        "_watching_gc",
        "step",
        "step_count",
    )

    def __init__(
        self, *, capacity: int = 8192, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._now = now_ns
        self._capacity = capacity
        self._events: deque[Event] = deque(maxlen=_EVENTS_A_STEP * capacity)
        self._append = self._events.append
        self._replay = Replay(now_ns(), num_stamps=2 * capacity)
        self._background = Background(16 * capacity, 4 * capacity)
        self._parallelism = [1] * NUM_SEGMENTS
        self._thread = threading.get_ident()
        self._watching_gc = False
        self._gc_began = 0
        self._num_drained = 0
        self._num_overwritten = 0
        self._segment = PYTHON
        self.step = 0
        self.step_count = 0

    # The step thread. Between cold caches every object that is touched costs: a switch
    # touches four. The time is read last, so that a collection is charged as late as it ran.

    def switch(self, segment: int) -> int:
        """Charge the time since the last switch and enter `segment`.

        Returns:
            The segment that was left, so that the caller can restore it.
        """
        previous = self._segment
        self._segment = segment
        self._append((self._now(), segment))
        return previous

    def start(self, step: int = 0) -> None:
        """Begin step `step` now, on the calling thread; what was charged since is dropped."""
        self._thread = threading.get_ident()
        self.step = step
        self._segment = PYTHON
        self._append((self._now(), START + PYTHON, step, self.step_count))

    def ask(self) -> None:
        """The step thread asks for a batch and waits: enter `data.queue`."""
        self._segment = DATA_QUEUE
        self._append((self._now(), ASK + DATA_QUEUE))

    def got(self, stages: Sequence[Stage], then: int = PYTHON) -> None:
        """The batch is here: cut the wait by its lineage and enter `then`.

        Args:
            stages: What the worker that produced the batch did, oldest first, the tail of
                its earlier batches included (see `cut_wait`); kept, not copied.
            then: The segment to enter.
        """
        self._segment = then
        self._append((self._now(), GOT + then, stages))

    def arrive(self) -> int:
        """This rank is ready and waits for the others: stamp it and enter `comm.transfer`.

        Returns:
            The segment that was left.
        """
        previous = self._segment
        self._segment = COMM_TRANSFER
        self._append((self._now(), ARRIVE + COMM_TRANSFER))
        return previous

    def depart(self, segment: int = PYTHON) -> None:
        """The gradients of all ranks are here: stamp it and enter `segment`."""
        self._segment = segment
        self._append((self._now(), DEPART + segment))

    def end_step(self) -> None:
        """Close the current step; the next one begins at the same instant."""
        self._segment = PYTHON
        step, index = self.step, self.step_count
        self._append((self._now(), END + PYTHON, step, index))
        self.step = step + 1
        self.step_count = index + 1

    def charge_loss(self, cpu_ns: int) -> None:
        """Move `cpu_ns` of `python` to `forward`: what the loss function computed.

        At most what was charged to `python` since `forward` was left is moved.
        """
        self._append((self._now(), NOTE + FORWARD, cpu_ns))

    def now_ns(self) -> int:
        """Return the clock's current time in nanoseconds."""
        return self._now()

    def watch_gc(self) -> None:
        """Charge garbage collections on the step thread to `python.gc` until `close()`."""
        if not self._watching_gc:
            self._watching_gc = True
            gc.callbacks.append(self._on_gc)

    def _on_gc(self, phase: str, _info: dict[str, Any]) -> None:
        # May run in the middle of `switch`: the replay finds out which came first.
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._gc_began = self._now()
        elif self._gc_began:
            self._append((self._now(), NOTE + PYTHON_GC, self._gc_began))
            self._gc_began = 0

    def close(self) -> None:
        """Stop watching the garbage collector; safe to call twice."""
        if self._watching_gc:
            self._watching_gc = False
            gc.callbacks.remove(self._on_gc)

    # Any thread.

    def add_span(self, span: Span) -> None:
        """Record background work; callable from any thread."""
        self._background.add_span(span)

    def add_stages(self, lane: str, stages: Sequence[Stage], name: str = "") -> None:
        """Record the stages of one batch, all done by `lane`; callable from any thread.

        The same as a span each, but one call; the list is kept, not copied.
        """
        if stages:
            self._background.batches.append((lane, stages, name))

    def set_parallelism(self, segment: int, parallelism: int) -> None:
        """Say how many units work on `segment` at once (its service period is busy / this)."""
        self._parallelism[segment] = max(1, parallelism)

    @property
    def parallelism(self) -> tuple[int, ...]:
        """Units that work on each segment at once."""
        return tuple(self._parallelism)

    @property
    def num_switches(self) -> int:
        """Switches made so far (of those lost undrained, only the steps are counted)."""
        return self._num_drained + len(self._events)

    # The draining thread.

    def drain(self, *, final: bool = False) -> tuple[list[StepRecord], list[Span]]:
        """Return the steps and spans finished since the last call (one draining thread).

        Each span is counted in `busy_ns` of the step in which it ended, or of the first
        step drained after it was added. Spans wait for such a step, unless `final`.
        """
        records = self._replay.replay(self._take_events())
        surplus = len(records) - self._capacity
        if surplus > 0:
            del records[:surplus]
            self._num_overwritten += surplus
        ends = [record.start_ns + record.wall_ns for record in records]
        begins = [record.start_ns for record in records] if self._replay.every > 1 else None
        busy, spans = self._background.count(ends, begins=begins, final=final)
        return [
            StepRecord(step, start, wall, parts, arrive, depart, tuple(row), after)
            for (step, start, wall, parts, arrive, depart, _, after), row in zip(
                records, busy, strict=True
            )
        ], spans

    def _take_events(self) -> list[Event]:
        events = self._events
        number = len(events)
        if number == events.maxlen:
            self._replay.lose()
        take = events.popleft
        taken = [take() for _ in range(number)]
        self._num_drained += number
        return taken

    @property
    def num_dropped(self) -> int:
        """Finished steps that were overwritten before anybody drained them."""
        return self._num_overwritten + self._replay.num_dropped

    @property
    def record_every(self) -> int:
        """Of how many steps one is recorded; settable by the draining thread."""
        return self._replay.every

    @record_every.setter
    def record_every(self, every: int) -> None:
        self._replay.every = every

    @property
    def num_skipped(self) -> int:
        """Finished steps that were not recorded because of `record_every`."""
        return self._replay.num_skipped

    @property
    def num_spans_dropped(self) -> int:
        """Spans lost in the same way."""
        return self._background.num_dropped

    def batches(self) -> list[Batch]:
        """Return (lane, stages, name) of the newest batches that `drain` has counted."""
        return list(self._background.recent)

    def stamps(self) -> list[tuple[int, int]]:
        """Return (time_ns, segment entered) of the most recent switches, oldest first."""
        waiting = [(now, kind & 31) for now, kind, *_ in self._events.copy() if kind < NOTE]
        return [*self._replay.stamps, *waiting][-self._capacity :]


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

    def charge_loss(self, cpu_ns: int) -> None:
        """Do nothing."""

    def add_span(self, span: Span) -> None:
        """Do nothing."""

    def add_stages(self, lane: str, stages: Sequence[Stage], name: str = "") -> None:
        """Do nothing."""

    def watch_gc(self) -> None:
        """Do nothing."""


NULL_CLOCK = NullClock()
