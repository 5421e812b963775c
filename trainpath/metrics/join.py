"""The cross-rank join: who made the others wait in each step, by how much and why.

Every wait for gradients is split at the arrival of the last rank. What came before is
straggler wait: it is charged to that rank, and there to the segment in which it exceeded
the others most since the previous departure. What came after is transfer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from trainpath.metrics.segments import COMM_STRAGGLER, COMM_TRANSFER, NUM_SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from trainpath.metrics.records import RankLog

    Array = npt.NDArray[np.int64]

__all__ = ["Joined", "Late", "join"]

# A rank is called late when it arrives this much after the median of the others ...
_LATE_NS = 1_000_000
_LATE_SHARE = 0.01  # ... and by this share of the step: less is jitter, nobody's fault.
_COMM = (COMM_TRANSFER, COMM_STRAGGLER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """One step in which one rank made the others wait.

    Attributes:
        step: The step.
        rank: The rank that arrived last.
        segment: The segment that made it late (largest excess over the others' median).
        lateness_ns: How long after the median of the others it arrived.
        explained_ns: The excess of that segment.
        waited_ns: What all other ranks waited for it together.
    """

    step: int
    rank: int
    segment: int
    lateness_ns: int
    explained_ns: int
    waited_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The steps that every rank has, as arrays of shape [ranks, steps, ...].

    Attributes:
        ranks: The ranks, in order.
        steps: The steps.
        start_ns: Start of each step, on the rank's own clock.
        wall_ns: Wall time.
        segments_ns: Segments; `comm.transfer` no longer holds the straggler wait.
        busy_ns: Background time.
        late: The steps with a late rank.
        clock_error_ns: How far arrivals of ranks on different hosts may be misjudged.
    """

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    start_ns: Array  # [ranks, steps]
    wall_ns: Array  # [ranks, steps]
    segments_ns: Array  # [ranks, steps, segments]
    busy_ns: Array  # [ranks, steps, segments]
    late: tuple[Late, ...]
    clock_error_ns: int


def join(logs: Sequence[RankLog], *, warmup: int = 0) -> Joined:
    """Join the steps that all of `logs` hold.

    Args:
        logs: The ranks, at least one.
        warmup: Steps with an index below this are left out (but may explain lateness).

    Returns:
        The joined steps; none at all if the ranks have none in common.
    """
    by_step = [{record.step: record for record in log.steps} for log in logs]
    common = sorted(set(by_step[0]).intersection(*by_step[1:]))
    rows = [[steps[step] for step in common] for steps in by_step]
    shape = (len(logs), len(common), NUM_SEGMENTS)

    def table(name: str) -> Array:
        return np.array([[getattr(r, name) for r in row] for row in rows], dtype=np.int64)

    segments = table("segments_ns").reshape(shape)
    start, wall = table("start_ns"), table("wall_ns")
    arrive, depart = table("arrive_ns"), table("depart_ns")
    error = 0
    late: list[Late] = []
    if len(logs) > 1 and common:
        work = _work_before_arrival(common, segments, table("after_ns").reshape(shape))
        offsets, error = _clock_offsets([_host(log) for log in logs], depart)
        aligned = np.where(arrive > 0, arrive + offsets[:, None], 0)
        # A rank without an arrival (no_sync, or no reducer) has nothing to be compared with.
        aligned[:, arrive.min(axis=0) <= 0] = 0
        _split(aligned, segments)
        late = [
            Late(step=common[index], rank=logs[culprit].rank, **late_by)
            for index, culprit, late_by in _late_ranks(aligned, segments, work, wall)
        ]
    kept = slice(sum(step < warmup for step in common), None)
    return Joined(
        ranks=tuple(log.rank for log in logs),
        steps=tuple(common[kept]),
        start_ns=start[:, kept],
        wall_ns=wall[:, kept],
        segments_ns=segments[:, kept],
        busy_ns=table("busy_ns").reshape(shape)[:, kept],
        late=tuple(item for item in late if item.step >= warmup),
        clock_error_ns=error,
    )


def _host(log: RankLog) -> str:
    return log.info.boot_id if log.info is not None else ""


def _work_before_arrival(steps: list[int], segments: Array, after: Array) -> Array:
    """Return, per rank and step, the segments between the previous departure and the arrival.

    Without a departure in the step before, that is the step itself up to its arrival.
    """
    work = segments - after
    follows = [later == earlier + 1 for earlier, later in pairwise(steps)]
    work[:, 1:] += after[:, :-1] * np.array(follows, dtype=np.int64).reshape(1, -1, 1)
    work[:, :, _COMM] = 0
    return work


def _split(arrive: Array, segments: Array) -> None:
    """Move the wait before the last arrival from `comm.transfer` to `comm.straggler`."""
    waits = np.clip(arrive.max(axis=0) - arrive, 0, segments[:, :, COMM_TRANSFER])
    segments[:, :, COMM_TRANSFER] -= waits
    segments[:, :, COMM_STRAGGLER] += waits


def _late_ranks(
    arrive: Array, segments: Array, work: Array, wall: Array
) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Yield (step index, culprit's index, what `Late` says) for steps with a late rank."""
    culprits = arrive.argmax(axis=0).tolist()
    for index, culprit in enumerate(culprits):
        others_arrive = np.delete(arrive[:, index], culprit)
        lateness = int(arrive[culprit, index] - np.median(others_arrive))
        if lateness < max(_LATE_NS, _LATE_SHARE * float(wall[:, index].mean())):
            continue
        others = np.delete(work[:, index], culprit, axis=0)
        excess = work[culprit, index] - np.median(others, axis=0)
        segment = int(excess.argmax())
        yield (
            index,
            culprit,
            {
                "segment": segment,
                "lateness_ns": lateness,
                "explained_ns": int(min(lateness, max(0, excess[segment]))),
                "waited_ns": int(segments[:, index, COMM_STRAGGLER].sum()),
            },
        )


def _clock_offsets(hosts: list[str], depart: Array) -> tuple[Array, int]:
    """Return what to add to each rank's times to compare them, and the error of that.

    Ranks of one host share CLOCK_MONOTONIC. Hosts are aligned by the departures, which all
    ranks see within one network hop: median over the steps; the error is half the width of
    the middle 90 %.
    """
    offsets = np.zeros(len(hosts), dtype=np.int64)
    if len(set(hosts)) == 1:
        return offsets, 0
    departed = depart[:, depart.min(axis=0) > 0]
    error = 0
    reference = None
    for host in Counter(hosts):
        mine = np.array([other == host for other in hosts])
        if departed.shape[1] == 0:
            continue
        middle = np.median(departed[mine], axis=0)
        if reference is None:
            reference = middle
            continue
        differences = reference - middle
        offsets[mine] = int(np.median(differences))
        low, high = np.percentile(differences, [5, 95])
        error = max(error, int((high - low) / 2))
    return offsets, error
