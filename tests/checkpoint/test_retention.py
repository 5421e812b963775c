"""Retention keeps the newest steps and never the wrong one."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainpath.checkpoint.lease import Lease
from trainpath.checkpoint.retention import MANIFEST, list_steps, prune, step_name
from trainpath.errors import CheckpointWriteError


def _make(directory, steps):
    for step in steps:
        (directory / step_name(step)).mkdir()
        (directory / step_name(step) / MANIFEST).write_text("{}")


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(0, 50), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_the_newest_and_the_committed_stay(tmp_path_factory, steps, keep, data):
    """`keep` steps remain: the one just committed and the newest of the others."""
    directory = tmp_path_factory.mktemp("retention")
    _make(directory, steps)
    committed = data.draw(st.sampled_from(sorted(steps)))
    gone = prune(directory, keep=keep, committed=committed)
    left = list_steps(directory)
    assert committed in left
    assert len(left) == min(keep, len(steps))
    others = sorted(steps - {committed}, reverse=True)[: keep - 1]
    assert left == sorted({committed, *others})
    assert sorted(gone + left) == sorted(steps)


def test_only_committed_steps_are_listed(tmp_path):
    """Directories without a manifest, temporary ones and strangers are no steps."""
    _make(tmp_path, [3, 123456789])
    (tmp_path / "step-00000004").mkdir()
    (tmp_path / ".tmp-step-00000005-run-0").mkdir()
    (tmp_path / "step-final").mkdir()
    assert list_steps(tmp_path) == [3, 123456789]
    assert list_steps(tmp_path / "nowhere") == []


def test_a_lease_has_one_holder_and_leaves_no_file(tmp_path):
    """The second lease is refused with the holder's process; after close() it is free."""
    first = Lease(tmp_path, timeout_s=5)
    with pytest.raises(CheckpointWriteError, match=f"process {os.getpid()}"):
        Lease(tmp_path, timeout_s=5)
    first.close()
    first.close()
    Lease(tmp_path, timeout_s=5).close()
    assert list(tmp_path.iterdir()) == []
