"""Two ranks write halves of one checkpoint, without a collective in `save()`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainpath.checkpoint import CheckpointManager, RandomState
from trainpath.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    StateMismatchError,
)
from trainpath.testing import spawn


class Position:
    """A `Stateful`: where a loader is."""

    def __init__(self, position=0):
        self.position = position

    def state_dict(self):
        return {"position": self.position, "tensor": torch.tensor([self.position])}

    def load_state_dict(self, state_dict):
        assert state_dict["tensor"].item() == state_dict["position"]
        self.position = state_dict["position"]


def _make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Linear(32, 32)
    )
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _train(model, optimizer, steps=2):
    for step in range(steps):
        x = torch.full((4, 32), 0.1 + dist.get_rank() + step) * torch.arange(4.0)[:, None]
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _tensors(model, optimizer):
    tensors = {f"model.{key}": value.clone() for key, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        for key, value in optimizer.state[param].items():
            tensors[f"optimizer.state.{name}.{key}"] = value.clone()
    return tensors


def _save_on_two(directory):
    """Train under DDP, save, restore into other objects; then try what must be refused."""
    rank = dist.get_rank()
    model, optimizer = _make()
    wrapped = DistributedDataParallel(model)
    shared, own = Position(5), Position(rank)
    with CheckpointManager(directory, timeout_s=20) as manager:
        _train(wrapped, optimizer)
        torch.manual_seed(100 + rank)
        state = {
            "model": wrapped,
            "optimizer": optimizer,
            "shared": shared,
            "own": own,
            "rng": RandomState(),
        }
        saved = _tensors(model, optimizer)
        handle = manager.save(2, state)
        drawn = torch.rand(3)
        _train(wrapped, optimizer, 1)
        handle.durable.wait(20)
        other, other_optimizer = _make(seed=9)
        fresh = {
            "model": other,
            "optimizer": other_optimizer,
            "shared": Position(),
            "own": Position(),
            "rng": RandomState(),
        }
        assert manager.restore(fresh) == 2
        assert torch.equal(torch.rand(3), drawn)
        assert fresh["shared"].position == 5
        assert fresh["own"].position == rank
        for key, value in _tensors(other, other_optimizer).items():
            if not key.startswith("model.1."):  # buffers of BatchNorm are those of rank 0
                assert torch.equal(value, saved[key]), key
        _refusals(manager, directory)
    return saved, handle.stats.bytes


def _refusals(manager, directory):
    """Errors are raised on both ranks, whichever has the problem."""
    rank = dist.get_rank()
    with pytest.raises(CheckpointNotFoundError, match="no step 9"):
        manager.restore({}, 9)
    model, _ = _make()
    odd = nn.Linear(3, 3) if rank == 1 else model
    with pytest.raises(StateMismatchError, match="missing"):
        manager.restore({"model": odd})
    # Other tensors on one rank: told instead of saved by halves.
    handle = manager.save(3, {"model": odd})
    with pytest.raises(CheckpointWriteError, match=r"other names, shapes|gave this checkpoint up"):
        handle.durable.wait(20)
    with pytest.raises(CheckpointWriteError):
        manager.wait_until_finished()
    # A rank that cannot write: nobody waits for it until the deadline.
    began = time.monotonic()
    if rank == 1:
        manager._saver.writer._exchange = _no_answer
    handle = manager.save(4, {"model": model})
    with pytest.raises(CheckpointWriteError):
        handle.durable.wait(20)
    assert time.monotonic() - began < 15
    with pytest.raises(CheckpointWriteError):
        manager.wait_until_finished()
    if rank == 1:
        del manager._saver.writer._exchange
    dist.barrier()
    manager.save(4, {"model": model}).durable.wait(20)
    dist.barrier()
    if rank == 0:
        path = Path(directory, "step-00000004", "__1_0.distcp")
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointCorruptError, match="ends early"):
        manager.restore({"model": model}, 4)
    assert manager.restore({"model": model}) == 2
    with pytest.raises(CheckpointWriteError, match="in use"):
        CheckpointManager(directory, timeout_s=20)


def _no_answer(job, fds, deadline):
    raise EOFError


def test_two_ranks_write_halves_that_one_or_two_can_read(tmp_path, stock, assert_same):
    """Each rank writes half; stock torch, one rank and two ranks read the whole."""
    directory = tmp_path / "ckpt"
    (first, bytes_0), (_, bytes_1) = spawn(_save_on_two, 2, args=(str(directory),))

    folder = directory / "step-00000002"
    loaded = stock(folder)
    assert_same(loaded, first)
    assert loaded["shared.position"] == 5
    assert [loaded[f"own.rank_0000{rank}.position"] for rank in (0, 1)] == [0, 1]
    assert "rng.rank_00001.torch" in loaded
    sizes = [(folder / f"__{rank}_0.distcp").stat().st_size for rank in (0, 1)]
    assert bytes_0 > sizes[0]
    assert bytes_1 > sizes[1]
    assert 0.9 < sizes[0] / sizes[1] < 1.12
    manifest = json.loads((folder / "trainpath.manifest.json").read_text())
    assert manifest["rank_local"] == ["own", "rng"]
    assert not [path.name for path in directory.glob(".*")]
    names = {path.name for path in folder.iterdir()}
    assert names == manifest["files"].keys() | {"trainpath.manifest.json"}

    model, optimizer = _make(seed=3)
    shared, rng = Position(), RandomState()
    with CheckpointManager(directory) as manager:
        state = {"model": model, "optimizer": optimizer, "shared": shared, "rng": rng}
        assert manager.restore(state, 2) == 2
        with pytest.raises(StateMismatchError, match="2 ranks differ"):
            manager.restore({"own": Position()}, 2)
    assert_same(_tensors(model, optimizer), first)
    assert shared.position == 5


def _restore_on_two(directory):
    """Restore what one process saved."""
    model, optimizer = _make(seed=4)
    position, rng = Position(), RandomState()
    torch.manual_seed(50 + dist.get_rank())
    before = torch.get_rng_state()
    with CheckpointManager(directory) as manager:
        state = {"model": model, "optimizer": optimizer, "position": position, "rng": rng}
        assert manager.restore(state) == 1
    kept = torch.equal(torch.get_rng_state(), before)
    return _tensors(model, optimizer), position.position, kept


def test_one_rank_saves_and_two_restore(tmp_path, assert_same):
    """A checkpoint of one process continues on two; the new rank keeps its generators."""
    model, optimizer = _make()
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(
            1,
            {
                "model": model,
                "optimizer": optimizer,
                "position": Position(7),
                "rng": RandomState(),
            },
        )
    saved = _tensors(model, optimizer)
    results = spawn(_restore_on_two, 2, args=(str(tmp_path),))
    for tensors, position, _ in results:
        assert_same(tensors, saved)
        assert position == 7
    assert [kept for *_, kept in results] == [False, True]


def _refuse_on_two(path):
    try:
        CheckpointManager(path)
    except CheckpointWriteError as error:
        return str(error)
    return None


def test_an_unwritable_directory_is_refused_on_every_rank(tmp_path):
    """Rank 0 finds out and every rank raises; nobody is left waiting."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    first, second = spawn(_refuse_on_two, 2, args=(str(blocked / "ckpt"),))
    assert "cannot be written" in first
    assert first == second


def _lose_a_rank(directory):
    """Rank 1 dies before it has staged its half of step 2."""
    import os
    import signal

    model, _ = _make()
    manager = CheckpointManager(directory, timeout_s=20)
    manager._saver._common["orphan_s"] = 0.5
    manager.save(1, {"model": model}).durable.wait(20)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    manager.save(2, {"model": model})
    manager._current.handle.staged.wait(20)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_step_that_lost_a_rank_never_appears(tmp_path):
    """Without the half of rank 1, the writer of rank 0 gives up; step 1 restores."""
    directory = tmp_path / "ckpt"
    with pytest.raises(RuntimeError, match="2 of 2 ranks"):
        spawn(_lose_a_rank, 2, args=(str(directory),))
    with CheckpointManager(directory, timeout_s=20) as manager:
        assert manager.all_steps() == [1]
        assert manager.restore({"model": _make(seed=1)[0]}) == 1
    assert {path.name for path in directory.iterdir()} == {"step-00000001", "latest"}
