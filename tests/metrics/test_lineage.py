"""Lineage: exclusive stages of a worker, and waits cut by them."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainpath.metrics import segments as S
from trainpath.metrics.lineage import StageRecorder, cut_wait, recording, stage

_spans = st.lists(
    st.tuples(st.integers(0, S.NUM_SEGMENTS - 1), st.integers(-50, 150), st.integers(0, 60)).map(
        lambda item: (item[0], item[1], item[1] + item[2])
    ),
    max_size=12,
)


@given(st.integers(-20, 120), st.integers(-20, 120), _spans)
def test_parts_sum_to_the_wait(asked, got, stages):
    """For any stages, overlapping or unsorted ones too, parts >= 0 sum to the wait exactly."""
    parts = cut_wait(asked, got, stages)

    assert sum(parts) == max(0, got - asked)
    assert min(parts) >= 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 9)), min_size=1))
def test_disjoint_stages_get_exactly_their_overlap(pieces):
    """Each stage of a serial worker gets the part of the wait that it covers."""
    stages = []
    time = 0
    for segment, gap, length in pieces:
        stages.append((segment, time + gap, time + gap + length))
        time += gap + length
    asked, got = time // 3, time + 4

    parts = cut_wait(asked, got, stages)

    expected = [0] * S.NUM_SEGMENTS
    for segment, begin, end in stages:
        expected[segment] += max(0, min(end, got) - max(begin, asked))
    expected[S.DATA_TRANSPORT] += 4
    expected[S.DATA_QUEUE] += (got - asked) - sum(expected)
    assert parts == expected


def test_no_lineage_is_queue():
    """A wait for a batch of unknown origin is data.queue."""
    assert cut_wait(10, 30, [])[S.DATA_QUEUE] == 20


def test_a_batch_that_was_ready_is_transport():
    """Where the worker was done before the step thread asked, only the hand-off is waited for."""
    parts = cut_wait(100, 140, [(S.DATA_DECODE, 0, 90)])

    assert parts[S.DATA_TRANSPORT] == sum(parts) == 40


def test_recorder_is_exclusive_and_merges():
    """Nested stages are charged to the innermost; neighbours of one segment become one."""
    now = iter(range(0, 1000, 10)).__next__
    recorder = StageRecorder(clock=now)
    with recording(recorder):
        with stage(S.DATA_DECODE):  # from 0
            with stage(S.DATA_STORAGE):  # 10 to 20
                pass
            recorder.switch(S.DATA_DECODE)  # 30
        with stage(S.DATA_COLLATE):  # 40 idle, 50
            pass

    assert recorder.take() == [
        (S.DATA_DECODE, 0, 10),
        (S.DATA_STORAGE, 10, 20),
        (S.DATA_DECODE, 20, 40),
        (S.DATA_COLLATE, 50, 60),
    ]
    assert recorder.take() == []


def test_recording_is_per_thread_and_ends():
    """A recorder hears only its own thread, and nothing after `recording` has ended."""
    recorder = StageRecorder()

    def elsewhere() -> None:
        with stage(S.DATA_DECODE):
            pass

    with recording(recorder):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    elsewhere()

    assert recorder.take() == []


def test_a_stage_that_raises_is_closed():
    """An exception inside a stage ends the stage."""
    recorder = StageRecorder(clock=iter(range(100)).__next__)
    with pytest.raises(OSError), recording(recorder), stage(S.DATA_NETWORK):
        raise OSError

    assert recorder.take() == [(S.DATA_NETWORK, 0, 1)]
    assert recorder.switch(-1) == -1
