"""CheckpointManager saves what there was at `save()`, in stock form, and never harms training."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from trainpath.checkpoint import CheckpointManager, RandomState
from trainpath.checkpoint import manager as manager_module
from trainpath.checkpoint import staging as staging_module
from trainpath.errors import (
    CheckpointWriteError,
    ClosedError,
    ConfigError,
    DeadlineError,
    PeerError,
)
from trainpath.metrics import StepClock
from trainpath.metrics import segments as S

GLOBAL_NUMPY = np.random.rand

OPTIMIZERS = {
    "sgd-momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd-plain": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw-fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "lr-tensor": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
}


class Counter:
    """A `Stateful` of nested values."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value, "nested": {"empty": {}, "list": [1, {"a": torch.ones(2)}]}}

    def load_state_dict(self, state_dict):
        assert state_dict["nested"]["empty"] == {}
        assert torch.equal(state_dict["nested"]["list"][1]["a"], torch.ones(2))
        self.value = state_dict["value"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saves_load_with_stock_torch_and_restore_to_the_bit(
    name, tmp_path, training, stock, assert_same
):
    """Every tensor of model and optimizer comes back equal, by dcp.load and by restore."""
    first = training(OPTIMIZERS[name])
    with CheckpointManager(tmp_path) as manager:
        for _ in range(2):
            first.step()
        saved = first.snapshot()
        manager.save(2, first.state).durable.wait(30)
        after = [first.step() for _ in range(2)]
        assert_same(stock(tmp_path / "step-00000002"), saved)

        other = training(OPTIMIZERS[name], seed=1)
        other._batches.set_state(torch.Generator().manual_seed(0).get_state())
        for _ in range(2):
            other.step()
        torch.manual_seed(5)
        assert manager.restore(other.state) == 2
        assert_same(other.snapshot(), saved)
        assert other.optimizer.param_groups[0]["lr"] == first.optimizer.param_groups[0]["lr"]
        fresh = training(OPTIMIZERS[name], seed=2)
        assert manager.restore(fresh.state, 2) == 2
        assert_same(fresh.snapshot(), saved)
        assert len(after) == 2


def test_keys_are_those_of_torch(tmp_path, training, stock):
    """Model and optimizer are named as torch's own state dict helpers name them."""
    first = training()
    first.step()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {**first.state, "note": "hello"})
    loaded = stock(tmp_path / "step-00000001")
    theirs = get_optimizer_state_dict(first.model, first.optimizer)
    expected = {f"model.{key}" for key in first.model.state_dict()}
    for name, values in theirs["state"].items():
        expected |= {f"optimizer.state.{name}.{key}" for key in values}
    for key in theirs["param_groups"][0]:
        expected.add(f"optimizer.param_groups.0.{key}")
    assert loaded.keys() == expected | {"note"}
    assert loaded["note"] == "hello"
    assert loaded["optimizer.param_groups.0.params"] == theirs["param_groups"][0]["params"]


def test_saving_every_step_changes_no_loss(tmp_path, training):
    """Fifteen steps with a save after each give bitwise the losses without any."""
    plain = training()
    torch.manual_seed(7)
    expected = [plain.step() for _ in range(15)]
    saving = training()
    torch.manual_seed(7)
    losses = []
    with CheckpointManager(tmp_path) as manager:
        for step in range(15):
            losses.append(saving.step())
            manager.save(step, saving.state | {"rng": RandomState()})
        manager.wait_until_finished(30)
        assert manager.all_steps() == [13, 14]
    assert losses == expected


def test_the_values_are_those_of_the_call(tmp_path, training, stock, assert_same, monkeypatch):
    """With staging slowed down, the next step waits at the fence and changes nothing saved."""
    first = training()
    first.step()
    began = threading.Event()
    real = staging_module.copy_into

    def slow(view, tensor):
        if threading.current_thread() is not threading.main_thread():
            began.set()
            time.sleep(0.02)
        real(view, tensor)

    monkeypatch.setattr("trainpath.checkpoint.generation.copy_into", slow)
    clock = StepClock()
    with CheckpointManager(tmp_path, clock=clock) as manager:
        counter = Counter(1)
        saved = first.snapshot()
        clock.start()
        handle = manager.save(1, first.state | {"counter": counter})
        assert began.wait(10)
        assert not handle.staged.done
        counter.value = 2
        first.step()  # forward changes the buffers of BatchNorm at once, step() waits
        assert handle.staged.done
        clock.end_step()
        first.step()
        handle.durable.wait(30)
        stats = handle.stats
    loaded = stock(tmp_path / "step-00000001")
    assert_same(loaded, saved)
    assert loaded["counter.value"] == 1
    (record,), spans = clock.drain(final=True)
    assert record.segments_ns[S.CKPT_FENCE] > 0
    assert record.segments_ns[S.CKPT_CAPTURE] > 0
    assert {span.lane for span in spans} == {"ckpt staging", "ckpt writer"}
    assert 0 < stats.staged_s <= stats.durable_s
    assert stats.blocking_s > record.segments_ns[S.CKPT_FENCE] / 1e9
    folder = tmp_path / "step-00000001"
    assert stats.bytes == sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_what_no_fence_guards_is_copied_at_once(tmp_path, training, stock, assert_same):
    """A model without its optimizer, and plain tensors, may change right after `save()`."""
    first = training()
    saved = first.snapshot()
    average = torch.arange(5.0)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": first.model, "average": average})
        with torch.no_grad():
            for param in first.model.parameters():
                param.fill_(9)
            average.fill_(9)
        assert manager.restore({"average": average}) == 1
    loaded = stock(tmp_path / "step-00000001")
    assert_same(loaded, saved | {"average": torch.arange(5.0)})
    assert torch.equal(average, torch.arange(5.0))


class Odd(nn.Module):
    """Every kind of tensor that is stored in its own way."""

    def __init__(self):
        super().__init__()
        self.brain = nn.Parameter(torch.randn(3, 4).bfloat16())
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.strided = nn.Parameter(torch.randn(6, 4).t()[::2])
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("eight", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_extra_state(self):
        return {"since": 3}

    def set_extra_state(self, state):
        self.since = state["since"]


def test_odd_tensors_round_trip(tmp_path, stock):
    """bf16, fp8, bool, complex, 0-dim, empty, strided and tied tensors come back equal."""
    torch.manual_seed(0)
    model = Odd()
    before = {
        key: value.clone() for key, value in model.state_dict().items() if key != "_extra_state"
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": model, "optimizer": optimizer})
        other = Odd()
        assert manager.restore({"model": other}) == 1
    assert other.since == 3
    assert other.second.weight is other.first.weight
    loaded = stock(tmp_path / "step-00000001")
    for key, value in before.items():
        for found in (other.state_dict()[key], loaded[f"model.{key}"]):
            assert found.dtype == value.dtype
            assert torch.equal(found.cpu().resolve_conj(), value.resolve_conj()) or torch.equal(
                found.view(torch.uint8), value.view(torch.uint8)
            ), key
    size = (tmp_path / "step-00000001" / "__0_0.distcp").stat().st_size
    assert size < sum(1800 + value.nbytes for value in before.values()), "tied weights once"


def test_stateful_values_and_generators_return(tmp_path):
    """Counters, nested values and all global random generators continue where they were."""
    state = {"counter": Counter(5), "rng": RandomState(), "epoch": 3, "settings": {"a": [1, 2]}}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        drawn = random.random(), GLOBAL_NUMPY(), torch.rand(1).item()
        state["counter"].value = 0
        state |= {"epoch": 0, "settings": None}
        assert manager.restore(state) == 1
    assert (random.random(), GLOBAL_NUMPY(), torch.rand(1).item()) == drawn
    assert state["counter"].value == 5
    assert state["epoch"] == 3
    assert state["settings"] == {"a": [1, 2]}


def test_schedulers_and_a_changed_model_are_saved(tmp_path, training, stock, assert_same):
    """A scheduler is `Stateful`; new, replaced or grown parameters are planned afresh."""
    first = training()
    scheduler = torch.optim.lr_scheduler.StepLR(first.optimizer, 2)
    with CheckpointManager(tmp_path, keep=3) as manager:
        first.step()
        scheduler.step()
        manager.save(1, first.state | {"scheduler": scheduler})
        manager.wait_until_finished(30)
        first.model[0].weight = nn.Parameter(torch.randn(16, 6))
        manager.save(2, first.state)
        saved = {f"model.{key}": value.clone() for key, value in first.model.state_dict().items()}
        manager.wait_until_finished(30)
        scheduler.step()
        manager.restore({"scheduler": scheduler}, 1)
        assert scheduler.last_epoch == 1
    assert_same(stock(tmp_path / "step-00000002"), saved)


def test_two_models_and_two_optimizers(tmp_path):
    """An optimizer is named by the module that holds its parameters, or by both."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    both = torch.optim.Adam([*one.parameters(), *two.parameters()])
    only = torch.optim.SGD(two.parameters(), momentum=0.9, lr=0.1)
    (one(torch.ones(1, 2)).sum() + two(torch.ones(1, 2)).sum()).backward()
    both.step()
    only.step()
    moments = [both.state[param]["exp_avg"].clone() for param in two.parameters()]
    state = {"one": one, "two": two, "both": both, "only": only}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        both.step()
        only.step()
        manager.restore(state)
    for param, moment in zip(two.parameters(), moments, strict=True):
        assert torch.equal(both.state[param]["exp_avg"], moment)


def test_a_failed_write_is_told_once_and_harms_nothing(tmp_path, training, stock, assert_same):
    """When the writer cannot write, handle and next call raise; the older step stays valid."""
    first = training()
    with CheckpointManager(tmp_path) as manager:
        saved = first.snapshot()
        manager.save(1, first.state).durable.wait(30)
        (tmp_path / f".tmp-step-00000002-{manager._run_id}-0").write_text("in the way")
        handle = manager.save(2, first.state)
        first.step()
        with pytest.raises(CheckpointWriteError, match="step 2"):
            handle.durable.wait(30)
        with pytest.raises(CheckpointWriteError, match="step 2"):
            manager.save(3, first.state)
        assert manager.all_steps() == [1]
        manager.save(3, first.state).durable.wait(30)
        assert manager.latest_step() == 3
    assert_same(stock(tmp_path / "step-00000001"), saved)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small tmpfs")
def test_a_full_disk_is_named(tmp_path):
    """On a full disk the error says so; the older step restores and nothing is left over."""
    import subprocess

    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs here")
    try:
        model = nn.Linear(300, 300)
        with CheckpointManager(small) as manager:
            manager.save(1, {"model": model}).durable.wait(30)
            handle = manager.save(2, {"model": model})
            with pytest.raises(CheckpointWriteError, match="no space left") as caught:
                handle.durable.wait(30)
            assert caught.value.errno == 28
            with pytest.raises(CheckpointWriteError):
                manager.wait_until_finished(30)
            names = {path.name for path in small.iterdir()}
            assert names == {"step-00000001", "latest"}
            assert manager.restore({"model": nn.Linear(300, 300)}) == 1
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_memory_descriptors_and_threads_stay_constant(tmp_path, training):
    """Thirty saves leave as many descriptors, mappings and threads as three."""
    first = training()

    def descriptors(pid):
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    def held():
        lines = Path("/proc/self/maps").read_text().splitlines()
        maps = sum("trainpath-ckpt" in line for line in lines)
        return descriptors("self"), maps, threading.active_count()

    with CheckpointManager(tmp_path) as manager:
        seen = []
        for step in range(30):
            first.step()
            manager.save(step, first.state | {"rng": RandomState()})
            if step % 10 == 2:
                manager.wait_until_finished(30)
                seen.append(held())
        manager.wait_until_finished(30)
        assert seen[0] == seen[-1]
        pid = manager._saver.writer.pid
        before = descriptors(pid)
        manager.save(30, first.state).durable.wait(30)
        assert descriptors(pid) == before
        assert manager._saver.writer.num_started == 1
    assert threading.active_count() < seen[0][2]
    assert not Path(f"/proc/{pid}").exists()


def test_retention_keeps_the_newest_and_points_to_the_last(tmp_path, training):
    """`keep` steps stay; a step saved again is replaced; `latest` names the last commit."""
    first = training()
    with CheckpointManager(tmp_path, keep=3) as manager:
        assert manager.latest_step() is None
        for step in (1, 2, 3, 4, 5):
            manager.save(step, {"model": first.model, "value": step})
        manager.wait_until_finished(30)
        assert manager.all_steps() == [3, 4, 5]
        manager.save(4, {"model": first.model, "value": "again"}).durable.wait(30)
        assert manager.all_steps() == [3, 4, 5]
        state = {"value": None}
        assert manager.restore(state, 4) == 4
        assert state["value"] == "again"
        assert (tmp_path / "latest").read_text() == "step-00000004\n"
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"latest", *(f"step-{step:08d}" for step in (3, 4, 5))}


def test_a_busy_manager_waits_or_raises(tmp_path, training):
    """While a write goes on, save() waits up to its deadline or, if asked to, raises at once."""
    first = training()
    with CheckpointManager(tmp_path, on_busy="raise", timeout_s=30) as manager:
        manager._saver.writer.fault = {"at": 3, "kill": "stop"}
        handle = manager.save(1, first.state)
        with pytest.raises(DeadlineError, match="step 1"):
            manager.save(2, first.state)
        with pytest.raises(DeadlineError, match="step 1"):
            manager.wait_until_finished(0.05)
        with pytest.raises(DeadlineError, match="durable"):
            handle.durable.wait(0.05)
        status = Path(f"/proc/{manager._saver.writer.pid}/stat")
        deadline = time.monotonic() + 20
        while status.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.005)
        os.kill(manager._saver.writer.pid, signal.SIGCONT)
        handle.durable.wait(30)
        assert manager.latest_step() == 1


def test_a_hanging_writer_is_ended_at_the_deadline(tmp_path, training, monkeypatch):
    """A writer that stops answering costs that save only; the next one has a new writer."""
    monkeypatch.setattr("trainpath.checkpoint.saver.MARGIN_S", 0.2)
    first = training()
    with CheckpointManager(tmp_path, timeout_s=0.5) as manager:
        manager._saver.writer.fault = {"at": 3, "kill": "stop"}
        handle = manager.save(1, first.state)
        with pytest.raises(CheckpointWriteError, match="deadline"):
            handle.durable.wait(30)
        with pytest.raises(CheckpointWriteError):
            manager.wait_until_finished(30)
        manager.save(2, first.state).durable.wait(30)
        assert manager.all_steps() == [2]
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000002", "latest"}


def test_bad_use_is_refused_clearly(tmp_path, training):
    """Unwritable directory, second manager, closed manager, bad arguments: one error each."""
    first = training()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(CheckpointWriteError, match="cannot be written"):
        CheckpointManager(blocked / "inside")
    with pytest.raises(ConfigError, match="keep"):
        CheckpointManager(tmp_path / "a", keep=0)
    manager = CheckpointManager(tmp_path / "a")
    with pytest.raises(CheckpointWriteError, match=f"in use.*process {os.getpid()}"):
        CheckpointManager(tmp_path / "a")
    with pytest.raises(ConfigError, match="negative"):
        manager.save(-1, first.state)
    with pytest.raises(ConfigError, match=r"a\.b"):
        manager.save(1, {"a": {"b": 1}, "a.b": 2})
    manager.close()
    manager.close()
    with pytest.raises(ClosedError):
        manager.save(1, first.state)
    with pytest.raises(ClosedError):
        manager.restore(first.state)
    CheckpointManager(tmp_path / "a").close()


def test_close_removes_the_fence_and_raises_what_nobody_was_told(tmp_path, training):
    """After close() the optimizer has no hook of ours; a pending error comes out of it."""
    first = training()
    manager = CheckpointManager(tmp_path)
    manager.attach(first.optimizer)
    manager.attach(first.optimizer)
    assert len(first.optimizer._optimizer_step_pre_hooks) == 1
    (tmp_path / f".tmp-step-00000001-{manager._run_id}-0").write_text("in the way")
    manager.save(1, first.state)
    with pytest.raises(CheckpointWriteError, match="step 1"):
        manager.close()
    assert not first.optimizer._optimizer_step_pre_hooks
    with pytest.raises(ValueError, match="the script's own"), CheckpointManager(tmp_path):
        raise ValueError("the script's own")


def test_the_writer_ends_at_once_beside_forked_workers(tmp_path):
    """Workers forked meanwhile hold copies of its socket; close() must not wait for them."""
    with CheckpointManager(tmp_path) as manager:
        process = manager._saver.writer._process
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
    alive = worker.is_alive()
    worker.kill()
    worker.join(10)

    assert alive
    assert process.returncode == 0  # by itself: not killed after a wait


def test_close_does_not_wait_for_a_rank_that_is_gone(tmp_path, training, monkeypatch):
    """Where the script ends by a PeerError, a write under way is given up soon and cleaned up."""
    monkeypatch.setattr(manager_module, "_LOST_PEER_S", 0.2)
    monkeypatch.setattr(manager_module, "MARGIN_S", 0.5)
    manager = CheckpointManager(tmp_path, timeout_s=600)
    manager._saver.writer.fault = {"at": 3, "kill": "stop"}
    manager.save(1, training().state)
    began = time.monotonic()
    with pytest.raises(CheckpointWriteError, match="step 1"), contextlib.ExitStack() as stack:
        stack.callback(manager.close)
        raise PeerError("rank 1 is gone")

    assert time.monotonic() - began < 15
    assert not list(tmp_path.iterdir())
