"""The Chrome trace format, for ui.perfetto.dev and chrome://tracing.

One process per rank, one thread per lane: the step thread first, then workers, gradient
buckets, checkpoint writer. Complete events (`X`), names (`M`), counters (`C`), microseconds.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from trainpath.metrics.segments import PYTHON, SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from trainpath.metrics.clock import Span, StepRecord
    from trainpath.metrics.lineage import Stage

__all__ = ["ChromeTrace"]

_STEP_THREAD = 1
_STEPS = 0


class ChromeTrace:
    """Collects events of one rank and writes them as one file; a `Sink`.

    Args:
        path: The file that `close` writes.
        rank: Shown as the process.

    Cost:
        About 300 bytes of memory an event until closed; at most `max_events` of them.

    Guarantee:
        The file appears complete, by rename, or not at all.
    """

    def __init__(self, path: Path, rank: int = 0, *, max_events: int = 200_000) -> None:
        self.path = path
        self.rank = rank
        self._max_events = max_events
        self.events: list[dict[str, Any]] = []
        self._lanes: dict[str, int] = {}
        self._closed = False
        self._name("process_name", 0, f"rank {rank}")
        self._name("thread_name", _STEPS, "steps")
        self._name("thread_name", _STEP_THREAD, "step thread")

    def _name(self, kind: str, tid: int, name: str) -> None:
        self.events.append(
            {"ph": "M", "name": kind, "pid": self.rank, "tid": tid, "args": {"name": name}}
        )

    def _complete(self, name: str, tid: int, start_ns: int, end_ns: int, **args: Any) -> None:
        if len(self.events) >= self._max_events or end_ns < start_ns:
            return
        event = {
            "ph": "X",
            "name": name,
            "cat": "step" if tid == _STEPS else name.partition(".")[0],
            "pid": self.rank,
            "tid": tid,
            "ts": start_ns / 1000,
            "dur": (end_ns - start_ns) / 1000,
        }
        if args:
            event["args"] = args
        self.events.append(event)

    def add_steps(self, steps: Iterable[StepRecord]) -> None:
        """Add one event a step."""
        for step in steps:
            parts = {
                name: round(nanoseconds / 1e6, 3)
                for name, nanoseconds in zip(SEGMENTS, step.segments_ns, strict=True)
                if nanoseconds
            }
            end_ns = step.start_ns + step.wall_ns
            self._complete(f"step {step.step}", _STEPS, step.start_ns, end_ns, ms=parts)

    def add_stamps(self, stamps: Sequence[tuple[int, int]], since_ns: int, end_ns: int) -> None:
        """Add the step thread's switches (time, segment entered) between two times."""
        ordered = sorted(stamps, key=lambda stamp: stamp[0])
        before = [segment for time_ns, segment in ordered if time_ns <= since_ns]
        # A clock begins in `python`, without a switch.
        ordered = [(since_ns, before[-1] if before else PYTHON), *ordered[len(before) :]]
        ends = [time_ns for time_ns, _ in ordered[1:]] + [end_ns]
        for (start_ns, segment), until_ns in zip(ordered, ends, strict=True):
            if since_ns <= start_ns < end_ns and until_ns > start_ns:
                self._complete(SEGMENTS[segment], _STEP_THREAD, start_ns, until_ns)

    def add_spans(self, spans: Iterable[Span]) -> None:
        """Add background work, each lane on a thread of its own."""
        for span in spans:
            tid = self._lane(span.lane)
            self._complete(SEGMENTS[span.segment], tid, span.start_ns, span.end_ns, what=span.name)

    def add_batch(self, lane: str, stages: Sequence[Stage], name: str) -> None:
        """Add the stages of one batch on its worker's thread."""
        tid = self._lane(lane)
        for segment, start_ns, end_ns in stages:
            self._complete(SEGMENTS[segment], tid, start_ns, end_ns, what=name)

    def _lane(self, lane: str) -> int:
        tid = self._lanes.get(lane)
        if tid is None:
            tid = self._lanes[lane] = _STEP_THREAD + 1 + len(self._lanes)
            self._name("thread_name", tid, lane)
        return tid

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of one step as counters."""
        if len(self.events) < self._max_events:
            now_us = time.monotonic_ns() / 1000
            for name, value in values.items():
                counter = {"ph": "C", "name": name, "pid": self.rank, "tid": 0, "ts": now_us}
                self.events.append({**counter, "args": {"value": value, "step": step}})

    def merge(self, path: Path) -> bool:
        """Take the events of another rank's file; return whether there was a readable one."""
        try:
            self.events += json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def close(self) -> None:
        """Write the file; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}.tmp")
        document = {"traceEvents": self.events, "displayTimeUnit": "ms"}
        try:
            temporary.write_text(json.dumps(document, separators=(",", ":")), encoding="utf-8")
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
