"""Background work: spans and batches, counted as busy time of the steps they ended in."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from trainpath.metrics.segments import NUM_SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainpath.metrics.lineage import Stage

__all__ = ["Background", "Batch", "Span"]

Batch = tuple[str, "Sequence[Stage]", str]
"""(lane, stages, name) of one batch."""

_MAX_LANES = 4096
_RECENT_BATCHES = 1024
_start = attrgetter("start_ns")


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


class Background:
    """What was done beside the step thread and is not counted yet.

    Args:
        max_spans: Spans kept until counted; older ones are dropped.
        max_batches: The same of batches.

    Attributes:
        num_dropped: Spans lost.
        recent: The newest batches counted.
    """

    def __init__(self, max_spans: int, max_batches: int) -> None:
        self.num_dropped = 0
        self.recent: deque[Batch] = deque(maxlen=_RECENT_BATCHES)
        self.batches: deque[Batch] = deque(maxlen=max_batches)
        self._max_spans = max_spans
        self._spans: deque[Span] = deque(maxlen=max_spans)
        self._waiting: list[Span] = []
        self._covered: dict[tuple[str, int], int] = {}

    def add_span(self, span: Span) -> None:
        """Take a span; callable from any thread."""
        if len(self._spans) == self._spans.maxlen:
            self.num_dropped += 1
        self._spans.append(span)

    def count(
        self, ends: list[int], *, begins: list[int] | None = None, final: bool
    ) -> tuple[list[list[int]], list[Span]]:
        """Return busy nanoseconds per step and segment, and the spans counted.

        Args:
            ends: When the steps ended, in order. Spans that ended later wait.
            begins: When they began, if there are others between them: what ended in those
                is counted for none.
            final: No step will follow: return the waiting spans too.
        """
        spans, self._waiting = self._waiting, []
        while self._spans:
            spans.append(self._spans.popleft())
        if not final and spans:
            last_end = ends[-1] if ends else 0
            self._waiting = [span for span in spans if span.end_ns > last_end]
            surplus = max(0, len(self._waiting) - self._max_spans)
            self.num_dropped += surplus
            del self._waiting[:surplus]
            spans = [span for span in spans if span.end_ns <= last_end]
        busy = [[0] * NUM_SEGMENTS for _ in ends]
        spans.sort(key=_start)
        for span in spans:
            length = self._uncovered(span)
            index = bisect_left(ends, span.end_ns)
            if index < len(busy) and (begins is None or span.end_ns > begins[index]):
                busy[index][span.segment] += length
        if ends:
            self._count_batches(ends, begins, busy)
        return busy, spans

    def _count_batches(
        self, ends: list[int], begins: list[int] | None, busy: list[list[int]]
    ) -> None:
        """Count the stages of a batch as busy time of the step in which the batch was done."""
        batches = self.batches
        last_end = ends[-1]
        index = 0
        while batches and (done := batches[0][1][-1][2]) <= last_end:
            batch = batches.popleft()
            self.recent.append(batch)
            while ends[index] < done:
                index += 1
            if begins is not None and done <= begins[index]:
                continue
            counted = busy[index]
            for segment, start, end in batch[1]:
                counted[segment] += end - start

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
