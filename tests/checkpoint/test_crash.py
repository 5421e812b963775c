"""kill -9 of trainer or writer, at any operation on the disk, costs at most the newest step."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from trainpath.checkpoint import CheckpointManager
from trainpath.checkpoint.reader import verify
from trainpath.errors import CheckpointWriteError
from trainpath.testing import SpawnError, spawn


def _model(value):
    model = nn.Linear(5, 4)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def _num_steps(directory):
    """Return how many operations on the disk one save makes."""
    with CheckpointManager(directory) as manager:
        replies = []
        real = manager._saver.writer.write
        manager._saver.writer.write = lambda *a, **k: replies.append(real(*a, **k)) or replies[-1]
        manager.save(1, {"model": _model(1), "step": 1}).durable.wait(30)
        manager.save(2, {"model": _model(2), "step": 2}).durable.wait(30)
    shutil.rmtree(directory)
    assert replies[1]["num_steps"] >= 25
    return replies[1]["num_steps"]


def _check_directory(directory, steps):
    """Assert that the newest step is one of `steps`, complete, and alone by its values."""
    with CheckpointManager(directory, timeout_s=20) as manager:
        state = {"model": _model(0), "step": 0}
        step = manager.restore(state)
        assert step in steps
        assert state["step"] == step
        assert all(bool((param == step).all()) for param in state["model"].parameters())
    names = {path.name for path in directory.iterdir()}
    assert not [name for name in names if name.startswith(".")], names
    return step


def test_a_killed_writer_is_replaced_and_writes_again(tmp_path, stock):
    """Killed at each operation in turn, the writer is started anew and the save succeeds."""
    num_steps = _num_steps(tmp_path / "count")
    directory = tmp_path / "ckpt"
    with CheckpointManager(directory, timeout_s=20) as manager:
        for at in range(1, num_steps + 1):
            manager._saver.writer.fault = {"at": at, "kill": "writer"}
            manager.save(at, {"model": _model(at), "step": at}).durable.wait(30)
            assert manager._saver.writer.num_started == at + 1
            state = {"model": _model(0), "step": 0}
            assert manager.restore(state) == state["step"] == at
            assert all(bool((param == at).all()) for param in state["model"].parameters())
            if at % 8 == 0:
                assert stock(directory / f"step-{at:08d}")["step"] == at
    names = {path.name for path in directory.iterdir()}
    assert names == {"latest", *(f"step-{at:08d}" for at in (num_steps - 1, num_steps))}


def test_a_writer_that_always_dies_is_given_up(tmp_path):
    """After three deaths over one save, the save fails and the next one is tried afresh."""
    with CheckpointManager(tmp_path, timeout_s=20) as manager:
        manager.save(1, {"step": 1}).durable.wait(30)
        real, jobs = manager._saver.writer._exchange, []

        def die(job, fds, deadline):
            jobs.append(job)
            return real({**job, "fault": {"at": 4, "kill": "writer"}}, fds, deadline)

        manager._saver.writer._exchange = die
        with pytest.raises(CheckpointWriteError, match="died 3 times"):
            manager.save(2, {"step": 2}).durable.wait(30)
        assert len(jobs) == 3
        manager._saver.writer._exchange = real
        with pytest.raises(CheckpointWriteError):
            manager.save(3, {"step": 3})
        manager.save(3, {"step": 3}).durable.wait(30)
        assert manager.all_steps() == [1, 3]


def _train_and_die(directory, at, kill):
    """Save steps 1 and 2; at one operation of the second, trainer (and writer) are killed."""
    manager = CheckpointManager(directory, timeout_s=20)
    manager.save(1, {"model": _model(1), "step": 1}).durable.wait(30)
    Path(directory, "..", "pid").write_text(str(manager._saver.writer.pid))
    manager._saver.writer.fault = {"at": at, "kill": kill}
    manager.save(2, {"model": _model(2), "step": 2}).durable.wait(30)
    time.sleep(30)


def _run_until_killed(directory, at, kill):
    with pytest.raises(SpawnError, match=r"SIGKILL|signal 9|killed"):
        spawn(_train_and_die, 1, args=(str(directory), at, kill), backend=None)


def _kill_everything_at_each(root, num_steps):
    """Let one process after another die with its writer; return what the next run finds."""
    found = []
    for at in range(1, num_steps + 1):
        directory = Path(root, str(at), "ckpt")
        directory.parent.mkdir()
        pid = os.fork()
        if pid == 0:
            try:
                _train_and_die(str(directory), at, "both")
            finally:
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        found.append(_check_directory(directory, {1, 2}))
    return found


def test_everything_killed_at_each_operation(tmp_path, stock):
    """With trainer and writer gone, the next run finds step 1 or 2, whole, and cleans up."""
    num_steps = _num_steps(tmp_path / "count")
    (found,) = spawn(_kill_everything_at_each, 1, args=(str(tmp_path), num_steps), backend=None)
    assert found == sorted(found), "the rename is the only commit point"
    assert set(found) == {1, 2}
    for at in range(1, num_steps + 1, 8):
        step = found[at - 1]
        assert stock(tmp_path / str(at) / "ckpt" / f"step-0000000{step}")["step"] == step


@pytest.mark.parametrize("at", [1, 5, 20])
def test_the_writer_outlives_its_trainer(tmp_path, at):
    """Killed once staging is over, the trainer leaves a writer that commits, then ends."""
    directory = tmp_path / "ckpt"
    _run_until_killed(directory, at, "trainer")
    assert _check_directory(directory, {2}) == 2, "the next run waits for the writer"
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists(), "the writer ends by itself"


def _save_forever(directory):
    """Save one step after another, as fast as it goes."""
    manager = CheckpointManager(directory, timeout_s=20)
    for step in range(1, 100_000):
        manager.save(step, {"model": _model(step), "step": step})
        if step == 2:
            Path(directory, "..", "pid").write_text(f"{os.getpid()} {manager._saver.writer.pid}")


@pytest.mark.parametrize("victim", [0, 1])
def test_kills_at_random_moments(tmp_path, victim):
    """A trainer or writer killed from outside leaves a newest step that is whole."""
    directory = tmp_path / "ckpt"
    delay = random.random() * 0.2

    def kill():
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(delay)
        pids = [int(pid) for pid in (tmp_path / "pid").read_text().split()]
        os.kill(pids[victim], signal.SIGKILL)
        time.sleep(0.3)
        if victim == 1:
            os.kill(pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(SpawnError):
        spawn(_save_forever, 1, args=(str(directory),), backend=None)
    killer.join(30)
    step = _check_directory(directory, range(1, 100_000))
    verify(directory / f"step-{step:08d}")


def test_a_save_that_died_halfway_is_cleaned_up_by_the_next_run(tmp_path):
    """Leftovers of dead runs go; a step that was being replaced comes back."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"step": 1}).durable.wait(30)
    (tmp_path / "step-00000001").rename(tmp_path / ".trash-step-00000001-99-replaced")
    (tmp_path / ".tmp-step-00000002-dead-0").mkdir()
    (tmp_path / ".tmp-step-00000002-dead-0" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "mine.txt").write_text("not yours")
    (tmp_path / "step-00000009").mkdir()
    with CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [1]
        state = {"step": 0}
        assert manager.restore(state) == 1
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-00000001", "step-00000009", "latest", "mine.txt"}
