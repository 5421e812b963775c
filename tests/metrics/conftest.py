"""Synthetic logs with exactly known steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainpath.metrics import StepRecord
from trainpath.metrics import segments as S
from trainpath.metrics.records import RankInfo, RankLog, RankStatus

MS = 1_000_000


def segments(**milliseconds):
    """Return a tuple of nanoseconds; names as the constants in lower case."""
    row = [0] * S.NUM_SEGMENTS
    for name, value in milliseconds.items():
        row[getattr(S, name.upper())] = int(value * MS)
    return tuple(row)


def info(rank=0, world_size=1, mode="on", boot_id="host a"):
    """Return a header."""
    return RankInfo(
        rank=rank,
        world_size=world_size,
        mode=mode,
        host="host",
        boot_id=boot_id,
        pid=1,
        versions={},
        started="2026-01-01T00:00:00Z",
    )


def log_of(steps, *, rank=0, world_size=1, boot_id="host a", mode="on", **status):
    """Return the log of one rank with `steps`."""
    log = RankLog.empty(rank, window=4096)
    log.begin(info(rank, world_size, mode, boot_id))
    log.add(steps, [])
    log.status = RankStatus(num_steps=len(steps), elapsed_ns=10**9, reason="end", **status)
    return log


def chain(parts, *, start_ns=10**9, busy=None, first=0):
    """Return successive steps with the segments in `parts` (one tuple a step)."""
    records = []
    for index, row in enumerate(parts):
        wall = sum(row)
        records.append(
            StepRecord(
                step=first + index,
                start_ns=start_ns,
                wall_ns=wall,
                segments_ns=row,
                arrive_ns=0,
                depart_ns=0,
                busy_ns=busy or (0,) * S.NUM_SEGMENTS,
            )
        )
        start_ns += wall
    return records


def synchronous(work, *, transfer_ms=2.0, optimizer_ms=1.0, start_ns=10**9, offsets=None):
    """Return the steps of ranks that wait for each other, as real ones do.

    Args:
        work: Per step, per rank: the segments before the arrival (tuples).
        transfer_ms: Transfer after the last arrival.
        optimizer_ms: After the departure.
        start_ns: Common start.
        offsets: What each rank's clock shows more than the true time.

    Returns:
        Per rank a list of records, waits still all in `comm.transfer`.
    """
    num_ranks = len(work[0])
    offsets = offsets or [0] * num_ranks
    ranks = [[] for _ in range(num_ranks)]
    begin = start_ns
    for step, rows in enumerate(work):
        arrivals = [begin + sum(row) for row in rows]
        depart = max(arrivals) + int(transfer_ms * MS)
        end = depart + int(optimizer_ms * MS)
        after = segments(optimizer=optimizer_ms)
        for rank, row in enumerate(rows):
            parts = list(row)
            parts[S.COMM_TRANSFER] += depart - arrivals[rank]
            parts[S.OPTIMIZER] += int(optimizer_ms * MS)
            ranks[rank].append(
                StepRecord(
                    step=step,
                    start_ns=begin + offsets[rank],
                    wall_ns=end - begin,
                    segments_ns=tuple(parts),
                    arrive_ns=arrivals[rank] + offsets[rank],
                    depart_ns=depart + offsets[rank],
                    busy_ns=(0,) * S.NUM_SEGMENTS,
                    after_ns=after,
                )
            )
        begin = end
    return ranks


@pytest.fixture
def logs():
    """The builders of this file."""
    return SimpleNamespace(
        chain=chain, info=info, log_of=log_of, segments=segments, synchronous=synchronous
    )
