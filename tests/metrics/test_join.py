"""The cross-rank join: straggler and transfer, culprit and cause, clocks of hosts."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainpath.metrics import segments as S
from trainpath.metrics.join import join

MS = 1_000_000


def join_ranks(logs, ranks, **kwargs):
    """Join record lists of ranks on one host."""
    joined_logs = [
        logs.log_of(steps, rank=rank, world_size=len(ranks)) for rank, steps in enumerate(ranks)
    ]
    return join(joined_logs, **kwargs)


@pytest.mark.parametrize("segment", ["data_storage", "data_decode", "python", "python_gc"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_wait_is_charged_to_the_culprit_and_its_segment(logs, segment, culprit):
    """What delays one rank is straggler wait of the other, with that rank and segment named."""
    usual = logs.segments(forward=10, backward=10)
    slow = logs.segments(forward=10, backward=10, **{segment: 30})
    rows = [slow if rank == culprit else usual for rank in range(2)]

    joined = join_ranks(logs, logs.synchronous([rows] * 5))

    other = 1 - culprit
    assert joined.segments_ns[other, :, S.COMM_STRAGGLER].tolist() == [30 * MS] * 5
    assert joined.segments_ns[culprit, :, S.COMM_STRAGGLER].tolist() == [0] * 5
    assert joined.segments_ns[:, :, S.COMM_TRANSFER].tolist() == [[2 * MS] * 5] * 2
    assert {(late.rank, S.SEGMENTS[late.segment]) for late in joined.late} == {
        (culprit, segment.replace("_", ".", 1))
    }
    assert [late.lateness_ns for late in joined.late] == [30 * MS] * 5
    assert [late.explained_ns for late in joined.late] == [30 * MS] * 5
    assert [late.waited_ns for late in joined.late] == [30 * MS] * 5


def test_a_delay_after_the_departure_explains_the_next_step(logs):
    """What a rank does between departure and end of step makes it late in the next step."""
    usual = logs.segments(forward=10)
    ranks = logs.synchronous([[usual, usual]] * 3)
    # Rank 1 writes a checkpoint for 40 ms after the first departure; both arrive 40 ms later.
    first, second, third = ranks[1]
    fence = logs.segments(ckpt_fence=40)
    first = first._replace(
        wall_ns=first.wall_ns + 40 * MS,
        segments_ns=tuple(map(sum, zip(first.segments_ns, fence, strict=True))),
        after_ns=tuple(map(sum, zip(first.after_ns, fence, strict=True))),
    )
    later = [
        step._replace(
            start_ns=step.start_ns + 40 * MS,
            arrive_ns=step.arrive_ns + 40 * MS,
            depart_ns=step.depart_ns + 40 * MS,
        )
        for step in (second, third)
    ]
    waited = list(ranks[0][1].segments_ns)
    waited[S.COMM_TRANSFER] += 40 * MS
    ranks[0][1] = ranks[0][1]._replace(
        segments_ns=tuple(waited), depart_ns=later[0].depart_ns, wall_ns=sum(waited)
    )
    ranks[0][2] = later[1]

    joined = join_ranks(logs, [ranks[0], [first, *later]])

    (late,) = joined.late
    assert (late.step, late.rank, late.segment) == (1, 1, S.CKPT_FENCE)
    assert late.explained_ns == late.lateness_ns == 40 * MS


def test_jitter_is_nobodys_fault(logs):
    """A lead below one millisecond splits the wait but names no culprit."""
    rows = [logs.segments(forward=10), logs.segments(forward=10.5)]

    joined = join_ranks(logs, logs.synchronous([rows] * 3))

    assert joined.late == ()
    assert joined.segments_ns[0, :, S.COMM_STRAGGLER].tolist() == [500_000] * 3


def test_four_ranks(logs):
    """With four ranks, each of the others waits for the late one by its own arrival."""
    rows = [
        logs.segments(forward=f, data_decode=d) for f, d in [(10, 0), (11, 0), (12, 0), (10, 50)]
    ]

    joined = join_ranks(logs, logs.synchronous([rows] * 2))

    assert joined.segments_ns[:, 0, S.COMM_STRAGGLER].tolist() == [50 * MS, 49 * MS, 48 * MS, 0]
    assert [(late.rank, late.segment) for late in joined.late] == [(3, S.DATA_DECODE)] * 2
    assert joined.late[0].waited_ns == (50 + 49 + 48) * MS
    assert joined.late[0].lateness_ns == 49 * MS


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=3, max_size=3),
        min_size=1,
        max_size=6,
    )
)
def test_splitting_keeps_the_sum(logs, work):
    """The join moves time between the two comm segments only: each step still sums to its wall."""
    rows = [[logs.segments(forward=a, data_network=b) for a, b in step] for step in work]

    joined = join_ranks(logs, logs.synchronous(rows))

    assert (joined.segments_ns.sum(axis=2) == joined.wall_ns).all()
    assert (joined.segments_ns >= 0).all()
    assert (joined.segments_ns[:, :, S.COMM_TRANSFER] == 2 * MS).all()
    for late in joined.late:
        step = joined.steps.index(late.step)
        arrivals = [a + b for a, b in work[step]]
        assert arrivals[late.rank] == max(arrivals)
        others = arrivals[: late.rank] + arrivals[late.rank + 1 :]
        assert late.lateness_ns == (max(arrivals) - statistics.median(others)) * MS


def test_hosts_are_aligned_by_their_departures(logs):
    """Ranks of another host, with another clock, are compared all the same; the error is said."""
    usual, slow = logs.segments(forward=10), logs.segments(forward=10, data_storage=20)
    steps = logs.synchronous([[usual, slow]] * 20, offsets=[0, 987_654_321_000])
    jitter = [
        step._replace(depart_ns=step.depart_ns + (1000 if i % 2 else -1000))
        for i, step in enumerate(steps[1])
    ]
    joined = join(
        [
            logs.log_of(steps[0], rank=0, world_size=2, boot_id="a"),
            logs.log_of(jitter, rank=1, world_size=2, boot_id="b"),
        ]
    )

    assert {(late.rank, late.segment) for late in joined.late} == {(1, S.DATA_STORAGE)}
    assert all(abs(late.lateness_ns - 20 * MS) <= 2000 for late in joined.late)
    assert 0 < joined.clock_error_ns <= 2000


def test_steps_without_an_arrival_are_not_split(logs):
    """Steps in which some rank never waited (no_sync, no reducer) have no straggler."""
    ranks = logs.synchronous([[logs.segments(forward=10), logs.segments(forward=50)]] * 2)
    ranks[1] = [step._replace(arrive_ns=0, depart_ns=0) for step in ranks[1]]

    joined = join_ranks(logs, ranks)

    assert joined.late == ()
    assert joined.segments_ns[:, :, S.COMM_STRAGGLER].sum() == 0


def test_only_common_steps_are_joined(logs):
    """Steps that one rank lacks are left out, warm-up steps too."""
    ranks = logs.synchronous([[logs.segments(forward=10)] * 2] * 10)

    joined = join_ranks(logs, [ranks[0][2:], ranks[1][:8]], warmup=4)

    assert joined.steps == (4, 5, 6, 7)
    assert joined.wall_ns.shape == (2, 4)
    assert join_ranks(logs, [ranks[0][:2], ranks[1][5:]]).steps == ()
