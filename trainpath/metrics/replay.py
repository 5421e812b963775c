"""Replay: turns the events that a step thread has noted into finished steps.

The step thread only notes when it entered which segment. Replaying the events in order
charges the time between each two of them to the segment entered by the first, so parts
of a step sum to its wall time by construction. All of it runs on the draining thread.

An event is a tuple: time in nanoseconds, segment entered plus kind, payload. Between cold
caches that is cheaper to make than anything that needs arithmetic.
"""

from __future__ import annotations

from collections import deque
from operator import sub
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from trainpath.metrics.lineage import cut_wait
from trainpath.metrics.segments import (
    DATA_QUEUE,
    DATA_TRANSPORT,
    FORWARD,
    NUM_SEGMENTS,
    PYTHON,
    PYTHON_GC,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainpath.metrics.lineage import Stage

__all__ = ["Event", "Replay", "StepRecord"]

Event = tuple[Any, ...]

ASK: Final = 1 * 32
GOT: Final = 2 * 32  # payload: stages
ARRIVE: Final = 3 * 32
DEPART: Final = 4 * 32
END: Final = 5 * 32  # payload: step, index of the step since the clock was made
START: Final = 6 * 32  # payload: the same
NOTE: Final = 7 * 32  # no switch; segment `python.gc`: a collection, payload its start;
#                       segment `forward`: CPU time of the loss function, payload nanoseconds

# A wait shorter than this is the hand-off itself; cutting it by lineage would cost more
# than it tells. It is still charged, to data.transport.
_SHORT_WAIT_NS = 20_000

_NO_SEGMENTS = (0,) * NUM_SEGMENTS


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


class Replay:
    """The state of the step thread at the last event replayed.

    Args:
        start_ns: When the clock began, in `python`.
        num_stamps: How many of the newest switches are kept for timelines.

    Attributes:
        every: Only steps whose number is a multiple of this are replayed and returned, the
            same ones on every rank; the others are passed over at a tenth of the cost.
        num_skipped: Steps passed over.
        num_dropped: Steps of which events were lost; none of those is returned.
        stamps: (time_ns, segment entered) of the newest switches.
    """

    def __init__(self, start_ns: int, num_stamps: int) -> None:
        self.every = 1
        self.num_skipped = 0
        self.num_dropped = 0
        self.stamps: deque[tuple[int, int]] = deque(maxlen=num_stamps)
        self._segment = PYTHON
        self._last = start_ns
        self._index = 0  # of the current step
        self._skipping = False  # the current step
        self._torn = False
        self._collections: list[tuple[int, int]] = []
        self._begin(start_ns)

    def _begin(self, now: int) -> None:
        self._began = now
        self._parts = [0] * NUM_SEGMENTS
        self._before: list[int] | None = None  # the parts at the departure
        self._moved = False  # after the departure, time that it had found elsewhere
        self._arrived = self._departed = 0
        # A wait that spans the boundary is cut in the step it ends in, from here on.
        self._asked = now
        self._queue_before = 0
        self._python_before = 0  # the part of python when forward was left

    def lose(self) -> None:
        """Say that events were lost: the current step is torn and will be dropped."""
        self._torn = True

    def replay(self, events: Iterable[Event]) -> list[StepRecord]:
        """Replay `events` and return the steps that they finished, without busy time."""
        records: list[StepRecord] = []
        stamp = self.stamps.append
        parts, last, segment = self._parts, self._last, self._segment
        for event in events:
            now, kind = event[0], event[1]
            if self._skipping and not END <= kind < NOTE:
                continue
            if kind >= NOTE:
                self._note(now, kind - NOTE, event[2])
                continue
            # Another thread's hook may have read the time before this one's last event.
            if now < last:  # noqa: PLR1730
                now = last
            if self._collections:
                # In two lines: the segment that is current may be python.gc itself.
                taken = self._charge_collections(now, now - last, segment)
                parts[segment] -= taken
            parts[segment] += now - last
            if segment == FORWARD:
                self._python_before = parts[PYTHON]
            last = now
            if kind < 32:
                segment = kind
                stamp(event)
            else:
                segment = kind & 31
                stamp((now, segment))
                self._act(now, kind - segment, event, records)
                parts = self._parts
        self._last, self._segment = last, segment
        return records

    def _act(self, now: int, kind: int, event: Event, records: list[StepRecord]) -> None:
        """Do what `event` means beyond the switch."""
        if kind == ASK:
            self._asked = now
            self._queue_before = self._parts[DATA_QUEUE]
        elif kind == GOT:
            self._cut_wait(now, event[2])
        elif kind == ARRIVE:
            self._arrived = now
        elif kind == DEPART:
            self._departed = now
            self._before = self._parts.copy()
            self._moved = False
        else:
            _, _, step, index = event
            if kind == END:
                self._end(now, step, index, records)
            else:
                self._start(now, step, index)

    def _end(self, now: int, step: int, index: int, records: list[StepRecord]) -> None:
        if self._torn or index != self._index:
            self.num_dropped += index + 1 - self._index
            self._torn = False
        elif self._skipping:
            self.num_skipped += 1
        else:
            after = _NO_SEGMENTS
            if self._before is not None:
                after = tuple(map(sub, self._parts, self._before))
                if self._moved and min(after) < 0:
                    after = tuple([max(0, part) for part in after])
            began = self._began
            records.append(
                StepRecord(
                    step,
                    began,
                    now - began,
                    tuple(self._parts),
                    self._arrived,
                    self._departed,
                    _NO_SEGMENTS,
                    after,
                )
            )
        self._index = index + 1
        self._skip_or_not(step + 1)
        self._begin(now)

    def _skip_or_not(self, step: int) -> None:
        self._skipping = step % self.every != 0
        if self._skipping:
            self._collections.clear()

    def _start(self, now: int, step: int, index: int) -> None:
        self.num_dropped += index - self._index
        self._index = index
        self._torn = False
        self._collections.clear()
        self._skip_or_not(step)
        self._begin(now)

    def _cut_wait(self, now: int, stages: Sequence[Stage]) -> None:
        """Move a data wait from `data.queue` to what its batch was waiting for."""
        parts = self._parts
        waited = parts[DATA_QUEUE] - self._queue_before
        self._moved = True
        if waited < _SHORT_WAIT_NS:
            parts[DATA_TRANSPORT] += waited
            parts[DATA_QUEUE] -= waited
        else:
            # What was charged elsewhere inside the wait (a collection, stages marked on the
            # step thread itself) is charged already: take it out, oldest segment first.
            elsewhere = now - self._asked - waited
            parts[DATA_QUEUE] -= waited
            for segment, part in enumerate(cut_wait(self._asked, now, stages)):
                if part:
                    taken = elsewhere if elsewhere < part else part  # noqa: FURB136
                    elsewhere -= taken
                    parts[segment] += part - taken
        self._asked = now
        self._queue_before = parts[DATA_QUEUE]

    def _note(self, now: int, segment: int, value: int) -> None:
        if segment == PYTHON_GC:
            self._collections.append((value, now))
            return
        self._moved = True
        python = self._parts[PYTHON]
        moved = max(0, min(value, python - self._python_before))
        self._parts[PYTHON] = python - moved
        self._parts[FORWARD] += moved

    def _charge_collections(self, now: int, elapsed: int, segment: int) -> int:
        """Charge the collections that ended until `now`; return what that is of `elapsed`."""
        taken = 0
        later = []
        for began, ended in self._collections:
            if ended > now:  # it ran after this switch had read the time
                later.append((began, ended))
            else:
                taken += ended - began
                self.stamps.append((began, PYTHON_GC))
                self.stamps.append((ended, segment))
        taken = min(taken, elapsed)
        self._parts[PYTHON_GC] += taken
        self._collections = later
        return taken
