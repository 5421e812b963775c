"""restore() takes the newest step that proves itself, compares first, and loads in place."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from trainpath.checkpoint import CheckpointManager, RandomState
from trainpath.checkpoint.reader import verify
from trainpath.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    StateMismatchError,
)


@pytest.fixture
def two_steps(tmp_path, training):
    """A directory with steps 1 and 2, and the values of step 1."""
    first = training()
    with CheckpointManager(tmp_path, keep=5) as manager:
        first.step()
        older = first.snapshot()
        manager.save(1, first.state)
        first.step()
        manager.save(2, first.state | {"note": "two"})
    return tmp_path, older


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def _append(path):
    path.write_bytes(path.read_bytes() + b"x")


def _swap_shard(folder):
    shutil.copy(folder.parent / "step-00000001" / "__0_0.distcp", folder / "__0_0.distcp")


def _swap_manifest(folder):
    name = "trainpath.manifest.json"
    shutil.copy(folder.parent / "step-00000001" / name, folder / name)


DAMAGES = {
    "bit in a payload": lambda folder: _flip(folder / "__0_0.distcp", 700),
    "bit in a header": lambda folder: _flip(folder / "__0_0.distcp", 3),
    "bit in a trailer": lambda folder: _flip(folder / "__0_0.distcp", -80),
    "bit in a value": lambda folder: _flip(folder / "__0_1.distcp", 50),
    "bit in metadata": lambda folder: _flip(folder / ".metadata", 100),
    "bit in the manifest": lambda folder: _flip(folder / "trainpath.manifest.json", 30),
    "truncated data": lambda folder: (folder / "__0_0.distcp").write_bytes(b"x"),
    "data too long": lambda folder: _append(folder / "__0_0.distcp"),
    "empty manifest": lambda folder: (folder / "trainpath.manifest.json").write_text(""),
    "manifest of nothing": lambda folder: (folder / "trainpath.manifest.json").write_text("[]"),
    "missing data": lambda folder: (folder / "__0_0.distcp").unlink(),
    "missing metadata": lambda folder: (folder / ".metadata").unlink(),
    "missing manifest": lambda folder: (folder / "trainpath.manifest.json").unlink(),
    "shard of another step": _swap_shard,
    "manifest of another step": _swap_manifest,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_is_skipped(damage, two_steps, training, assert_same, caplog):
    """Any damage is found: the older step is taken, and the damaged one refused by name."""
    directory, older = two_steps
    DAMAGES[damage](directory / "step-00000002")
    other = training(seed=3)
    with CheckpointManager(directory) as manager:
        assert manager.restore(other.state) == 1
        assert_same(other.snapshot(), older)
        with pytest.raises(CheckpointCorruptError, match="step-00000002"):
            manager.restore(other.state, 2)
        assert_same(other.snapshot(), older)
        assert damage == "missing manifest" or "skipping step 2" in caplog.text
        # Training goes on and saves the damaged step anew.
        manager.save(2, other.state).durable.wait(30)
    verify(directory / "step-00000002")


def test_nothing_valid_is_an_error_that_says_why(two_steps, training):
    """No step, no such step, or none that proves itself: one clear error each."""
    directory, _ = two_steps
    other = training()
    with CheckpointManager(directory) as manager:
        with pytest.raises(CheckpointNotFoundError, match=r"no step 7.*\[1, 2\]"):
            manager.restore(other.state, 7)
        for step in (1, 2):
            _flip(directory / f"step-0000000{step}" / ".metadata", 9)
        with pytest.raises(CheckpointNotFoundError, match=r"no valid.*differs from its checksum"):
            manager.restore(other.state)
    with CheckpointManager(directory / "new") as manager, pytest.raises(CheckpointNotFoundError):
        manager.restore(other.state)


def test_another_model_is_refused_before_anything_is_touched(two_steps, training, assert_same):
    """The error is one table of what is missing, unexpected and mismatched."""
    directory, _ = two_steps
    other = training()
    other.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(17), nn.ReLU())
    other.model.add_module("head", nn.Linear(16, 3))
    other.model[0].double()
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    before = {key: value.clone() for key, value in other.model.state_dict().items()}
    with (
        CheckpointManager(directory) as manager,
        pytest.raises(StateMismatchError) as caught,
    ):
        manager.restore({"model": other.model, "optimizer": other.optimizer, "other": 1})
    lines = [line.split() for line in str(caught.value).splitlines()]
    assert ["missing", "model.head.bias", "-", "float32[3]"] in lines
    assert ["unexpected", "model.4.bias", "float32[3]", "-"] in lines
    assert ["mismatched", "model.0.bias", "float32[16]", "float64[16]"] in lines
    assert ["mismatched", "model.1.bias", "float32[16]", "float32[17]"] in lines
    assert ["missing", "optimizer.state.head.bias", "-", "float32[3]"] in lines
    assert ["missing", "other", "-", "int"] in lines
    assert_same(other.model.state_dict(), before)


def test_parameter_groups_must_fit(two_steps, training):
    """Another number of parameter groups is refused."""
    directory, _ = two_steps
    other = training()
    groups = [{"params": [param]} for param in other.model.parameters()]
    optimizer = torch.optim.AdamW(groups)
    with (
        CheckpointManager(directory) as manager,
        pytest.raises(StateMismatchError, match="1 groups"),
    ):
        manager.restore({"model": other.model, "optimizer": optimizer})


def test_state_from_before_the_first_step_clears_the_moments(tmp_path, training):
    """A checkpoint without optimizer state leaves none behind."""
    first = training()
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, first.state)
        first.step()
        assert first.optimizer.state
        manager.restore(first.state)
        assert not first.optimizer.state


def test_restore_is_in_place(two_steps, training):
    """Parameters and moments keep their memory, so that nobody's references go stale."""
    directory, _ = two_steps
    other = training(seed=1)
    other.step()
    places = {key: value.data_ptr() for key, value in other.model.state_dict().items()}
    moment = other.optimizer.state[other.model[0].weight]["exp_avg"]
    with CheckpointManager(directory) as manager:
        manager.restore(other.state)
    assert places == {key: value.data_ptr() for key, value in other.model.state_dict().items()}
    assert other.optimizer.state[other.model[0].weight]["exp_avg"] is moment


class Compiled(nn.Module):
    """Wraps as torch.compile does, without importing the compiler."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


WRAPPERS = {
    "bare": lambda module: module,
    "compiled": Compiled,
    "parallel": DataParallel,
    "both": lambda module: Compiled(DataParallel(module)),
    "inside": lambda module: nn.Sequential(Compiled(module[0]), *module[1:]),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("wrap_first", WRAPPERS.values(), ids=WRAPPERS)
def test_wrappers_are_forgiven(tmp_path, wrap, wrap_first, training, assert_same):
    """A checkpoint of a wrapped model restores into a bare one, and the other way round."""
    first = training()
    first.step()
    saved = first.snapshot()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": wrap_first(first.model), "optimizer": first.optimizer})
        other = training(seed=1)
        manager.restore({"model": wrap(other.model), "optimizer": other.optimizer})
    assert_same(other.snapshot(), saved)


def test_the_manifest_covers_every_byte(two_steps):
    """Every file of a step but the manifest is listed, whole, with checksums."""
    directory, _ = two_steps
    folder = directory / "step-00000002"
    manifest = json.loads((folder / "trainpath.manifest.json").read_text())
    names = {path.name for path in folder.iterdir()} - {"trainpath.manifest.json"}
    assert manifest["files"].keys() == names
    for name, record in manifest["files"].items():
        covered = sum(length for _, length, _ in record["pieces"])
        assert covered == record["size"] == (folder / name).stat().st_size


def test_a_restored_run_continues_with_the_same_losses(tmp_path, training):
    """From any saved step on, dropout and all, the losses are bitwise those of the whole run."""
    whole = training()
    torch.manual_seed(7)
    with CheckpointManager(tmp_path, keep=20) as manager:
        losses = []
        for step in range(10):
            manager.save(step, whole.state | {"rng": RandomState(), "batches": Batches(whole)})
            losses.append(whole.step())
        manager.wait_until_finished(30)
        for step in (0, 3, 9):
            other = training(seed=step + 1)
            for _ in range(step):
                other.step()
            state = other.state | {"rng": RandomState(), "batches": Batches(other)}
            assert manager.restore(state, step) == step
            assert [other.step() for _ in range(step, 10)] == losses[step:]


class Batches:
    """The position of a training's batches, as a `Stateful`."""

    def __init__(self, owner):
        self._generator = owner._batches

    def state_dict(self):
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state_dict):
        self._generator.set_state(state_dict["generator"])
