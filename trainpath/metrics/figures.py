"""The figures a report is made of, each computed from joined steps."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainpath.metrics.predict import Prediction, service_periods, without
from trainpath.metrics.records import CKPT_SEGMENTS
from trainpath.metrics.segments import (
    BACKWARD,
    CKPT_CAPTURE,
    COMM_STRAGGLER,
    COMM_TRANSFER,
    FORWARD,
    NUM_SEGMENTS,
    OPTIMIZER,
    SEGMENTS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainpath.metrics.clock import Span
    from trainpath.metrics.join import Joined
    from trainpath.metrics.records import RankLog

__all__ = [
    "CheckpointCost",
    "OwnCost",
    "SegmentFigures",
    "StragglerFigures",
    "checkpoint_cost",
    "own_cost",
    "segment_figures",
    "straggler_figures",
]


_COMPUTE = (FORWARD, BACKWARD, OPTIMIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentFigures:
    """One segment, over all ranks and steps of a report; seconds per step.

    Attributes:
        name: The segment.
        exposed_s: Mean time that the step thread spent in it.
        p50_s: Median of it.
        p95_s: 95th percentile.
        max_s: Largest.
        share: `exposed_s` over the mean step; the shares of all segments sum to 1.
        busy_s: Mean background work on its behalf.
        hidden_s: What of that work no step waited for: `busy_s - exposed_s`, at least 0.
        period_s: Service period: `busy_s` over the units that share the work.
        caused_s: Mean wait of the other ranks that it caused by making one rank late.
        gone: The step without this segment; None for compute.
    """

    name: str
    exposed_s: float
    p50_s: float
    p95_s: float
    max_s: float
    share: float
    busy_s: float
    hidden_s: float
    period_s: float
    caused_s: float
    gone: Prediction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFigures:
    """One rank that made the others wait.

    Attributes:
        rank: The rank.
        num_late: Steps in which it was the late one.
        lateness_s: By how much, on average, after the median of the others.
        waited_s: What all others waited for it together, over the whole report.
        share: `waited_s` over the time of all ranks together.
        cause: The segment that made it late, for most of that wait.
        cause_share: The share of its wait that has this cause.
        explained: How much of the lateness the causes explain, 0 to 1.
    """

    rank: int
    num_late: int
    lateness_s: float
    waited_s: float
    share: float
    cause: str
    cause_share: float
    explained: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """What one checkpoint costs; none of the three figures means anything without the others.

    Attributes:
        num_saves: Checkpoints seen.
        blocking_s: Step-thread time in `ckpt.*` per checkpoint.
        interference_s: Added time of the steps while staging and writing ran, per
            checkpoint (None: no undisturbed step to compare with, or no background work).
        durable_s: From the begin of staging until all is on disk (None: no background work
            seen; then the checkpoint was written inside `blocking_s`).
    """

    num_saves: int
    blocking_s: float
    interference_s: float | None
    durable_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCost:
    """What measuring cost, as shares of the time measured (the worst rank).

    Attributes:
        clock: Step-thread time in the clock.
        helper: CPU time of the helper thread.
    """

    clock: float
    helper: float


def segment_figures(joined: Joined, parallelism: Sequence[int]) -> dict[str, SegmentFigures]:
    """Return the figures of every segment, in the order of `SEGMENTS`."""
    seconds = joined.segments_ns.reshape(-1, NUM_SEGMENTS) / 1e9
    step_s = float(joined.wall_ns.mean()) / 1e9
    exposed = seconds.mean(axis=0).tolist()
    p50, p95 = np.percentile(seconds, [50, 95], axis=0).tolist()
    largest = seconds.max(axis=0).tolist()
    busy = (joined.busy_ns.reshape(-1, NUM_SEGMENTS).mean(axis=0) / 1e9).tolist()
    periods = service_periods(busy, parallelism)
    # A bucket in flight waits for the late rank too; that part is no work of the link.
    periods[COMM_TRANSFER] = max(0.0, periods[COMM_TRANSFER] - exposed[COMM_STRAGGLER])
    caused = [0.0] * NUM_SEGMENTS
    for late in joined.late:
        explained = late.explained_ns / late.lateness_ns
        caused[late.segment] += late.waited_ns * explained / joined.wall_ns.size / 1e9
    return {
        name: SegmentFigures(
            name=name,
            exposed_s=exposed[i],
            p50_s=p50[i],
            p95_s=p95[i],
            max_s=largest[i],
            share=exposed[i] / step_s if step_s else 0.0,
            busy_s=busy[i],
            hidden_s=max(0.0, busy[i] - exposed[i]),
            period_s=periods[i],
            caused_s=caused[i],
            gone=None
            if i in _COMPUTE or not step_s
            else without(i, step_s, exposed=exposed, periods=periods, caused_s=caused[i]),
        )
        for i, name in enumerate(SEGMENTS)
    }


def straggler_figures(joined: Joined) -> tuple[StragglerFigures, ...]:
    """Return the ranks that were late, the most expensive first."""
    total = float(joined.wall_ns.sum())
    rows = []
    for rank in {late.rank for late in joined.late}:
        mine = [late for late in joined.late if late.rank == rank]
        waited = sum(late.waited_ns for late in mine)
        lateness = sum(late.lateness_ns for late in mine)
        causes: Counter[int] = Counter()
        for late in mine:
            causes[late.segment] += late.waited_ns
        ((cause, charged),) = causes.most_common(1)
        rows.append(
            StragglerFigures(
                rank=rank,
                num_late=len(mine),
                lateness_s=lateness / len(mine) / 1e9,
                waited_s=waited / 1e9,
                share=waited / total,
                cause=SEGMENTS[cause],
                cause_share=charged / waited if waited else 1.0,
                explained=sum(late.explained_ns for late in mine) / lateness,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.waited_s))


def checkpoint_cost(joined: Joined, logs: Sequence[RankLog]) -> CheckpointCost | None:
    """Return what a checkpoint cost in these steps; None if there was none."""
    blocking_ns = joined.segments_ns[:, :, CKPT_SEGMENTS].sum(axis=2)
    first_ns = joined.start_ns[:, 0].tolist()
    durable: list[int] = []
    added: list[float] = []
    num_saves = 0
    for index, log in enumerate(logs):
        saves = [save for save in _saves(log.spans) if save[1] > first_ns[index]]
        durable += [end - begin for begin, end in saves]
        num_saves = max(num_saves, len(saves))
        begins = joined.start_ns[index]
        ends = begins + joined.wall_ns[index]
        disturbed = np.zeros(len(begins), dtype=bool)
        for begin, end in saves:
            disturbed |= (begins < end) & (ends > begin)
        if disturbed.any() and not disturbed.all():
            steps = joined.wall_ns[index] - blocking_ns[index]
            usual = float(steps[~disturbed].mean())
            added.append(float((steps[disturbed] - usual).sum()) / len(saves))
    if num_saves == 0:
        captured = joined.segments_ns[:, :, CKPT_CAPTURE] > 0
        num_saves = int(captured.sum(axis=1).max())
    if num_saves == 0:
        return None
    return CheckpointCost(
        num_saves=num_saves,
        blocking_s=float(blocking_ns.sum(axis=1).mean()) / num_saves / 1e9,
        interference_s=sum(added) / len(added) / 1e9 if added else None,
        durable_s=max(durable) / 1e9 if durable else None,
    )


def _saves(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Group checkpoint spans by the number in their name: (begin, end) of each checkpoint."""
    groups: dict[str, list[Span]] = defaultdict(list)
    for index, span in enumerate(spans):
        number = re.search(r"\d+", span.name)
        groups[number.group() if number else f"span {index}"].append(span)
    return [
        (min(span.start_ns for span in group), max(span.end_ns for span in group))
        for group in groups.values()
    ]


def own_cost(logs: Sequence[RankLog]) -> OwnCost:
    """Return what measuring cost on the rank where it cost most."""
    known = [log.status for log in logs if log.status is not None and log.status.elapsed_ns > 0]
    return OwnCost(
        clock=max((status.clock_ns / status.elapsed_ns for status in known), default=0.0),
        helper=max((status.helper_ns / status.elapsed_ns for status in known), default=0.0),
    )
