"""accelerate(), observe() and Run: modes, ownership, signals, errors."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import trainpath
from trainpath.errors import (
    CacheWriteError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    ClosedError,
    ConfigError,
    StateMismatchError,
)
from trainpath.loader import TarDataset
from trainpath.testing import spawn


def build(num_samples=32, **options):
    """Return a small model, its optimizer and a loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(num_samples, 4), torch.randn(num_samples, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, DataLoader(data, batch_size=4, **options)


def train(model, optimizer, loader, steps=None):
    """Train over the loader once; return the losses as hex."""
    losses = []
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
        if steps is not None and len(losses) == steps:
            break
    return losses


@pytest.mark.parametrize("mode", ["on", "observe", "off"])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_mode_gives_the_same_losses(mode, workers):
    """One process: losses of each mode equal those of the plain script."""
    expected = train(*build())
    model, optimizer, loader = build(num_workers=workers)
    with trainpath.accelerate(model, optimizer, loader, mode=mode) as run:
        losses = train(model, optimizer, run.loader)

        assert losses == expected
        assert run.step == len(expected)
        assert run.epoch == 1


@pytest.mark.parametrize("mode", ["on", "observe"])
# The compiler hides this one itself, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_torch_compile_has_nothing_to_say_about_our_hooks(mode):
    """A compiled model gives the same losses, measured, and no warning of the compiler."""
    model, optimizer, loader = build()
    expected = train(model, optimizer, loader)
    model, optimizer, loader = build()
    compiled = torch.compile(model, backend="eager")

    with trainpath.accelerate(model, optimizer, loader, mode=mode) as run:
        assert train(compiled, optimizer, run.loader) == expected
        assert run.step == len(expected)


def test_nothing_of_ours_is_left_in_the_model():
    """Type, keys, copies and pickles of the model are as without trainpath."""
    model, optimizer, loader = build()
    keys = list(model.state_dict())
    with trainpath.accelerate(model, optimizer, loader) as run:
        train(model, optimizer, run.loader, steps=2)
        assert list(model.state_dict()) == keys
        assert type(model) is nn.Sequential
        twin = copy.deepcopy(model)
        assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))
        pickle.loads(pickle.dumps(model))
        copy.deepcopy(optimizer)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_close_ends_every_thread_and_process():
    """After close() no thread or child process of the run is alive."""
    before = {thread.name for thread in threading.enumerate()}
    model, optimizer, loader = build(num_workers=2)
    run = trainpath.accelerate(model, optimizer, loader)
    train(model, optimizer, run.loader, steps=3)
    run.close()
    run.close()

    assert {thread.name for thread in threading.enumerate()} <= before
    with pytest.raises(ClosedError):
        run.save()


def test_close_puts_the_cache_settings_back(tmp_path, monkeypatch):
    """After close() neither the data set nor the environment speaks of the run's cache."""
    monkeypatch.delenv("TRAINPATH_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRAINPATH_CACHE_STARTED_NS", "1")  # set by the cache, for good
    model, optimizer, _ = build()
    dataset = TarDataset("http://127.0.0.1:9/0.tar")
    loader = trainpath.loader.DataLoader(dataset)
    with trainpath.accelerate(model, optimizer, loader, cache_dir=tmp_path):
        assert dataset.cache.directory == os.environ["TRAINPATH_CACHE_DIR"] == str(tmp_path)

    assert dataset.cache is None
    assert "TRAINPATH_CACHE_DIR" not in os.environ


def test_unwritable_cache_directory_is_named(tmp_path):
    """A cache that cannot be used is one error before the first step, and nothing is left."""
    (tmp_path / "file").touch()
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(CacheWriteError, match="file"):
        trainpath.accelerate(*build(), cache_dir=tmp_path / "file")

    assert {thread.name for thread in threading.enumerate()} <= before


def test_observe_in_two_lines_reports_every_step():
    """observe(optimizer, loader) changes no loss, and its parts sum to the wall time."""
    expected = train(*build())
    model, optimizer, loader = build()
    run = trainpath.observe(optimizer, loader)
    assert train(model, optimizer, run.loader) == expected
    report = run.report()
    run.close()

    assert "backward" in str(report)


def test_accelerating_twice_is_refused():
    """Two runs would reduce the gradients twice."""
    model, optimizer, loader = build()
    with (
        trainpath.accelerate(model, optimizer, loader),
        pytest.raises(ConfigError, match="accelerated already"),
    ):
        trainpath.accelerate(model, optimizer, loader)
    trainpath.accelerate(model, optimizer, loader).close()


@pytest.mark.parametrize("variables", [{}, {"RANK": "1"}, {"WORLD_SIZE": "two"}])
def test_half_an_environment_of_a_job_is_refused(monkeypatch, variables):
    """WORLD_SIZE without a meeting point is an error: each rank would train alone."""
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match="start it with torchrun"):
        trainpath.accelerate(*build())


def test_off_reports_that_nothing_was_measured():
    """A script that prints its report runs in mode off too, and the report says why."""
    model, optimizer, loader = build()
    with trainpath.accelerate(model, optimizer, loader, mode="off") as run:
        train(model, optimizer, run.loader, steps=2)
        report = run.report()

    assert report.num_steps == 0
    assert "off" in str(report)


def test_restore_continues_with_the_next_sample_and_the_same_losses(tmp_path):
    """Saved in the middle of an epoch, the rest of two epochs is equal to the bit."""
    model, optimizer, loader = build(shuffle=True)
    with trainpath.accelerate(model, optimizer, loader, checkpoint_dir=tmp_path / "a") as run:
        assert run.restore() == 0
        train(model, optimizer, run.loader, steps=3)
        run.save()
        torch.manual_seed(99)  # what restore must undo
        run.checkpoints.wait_until_finished()
    whole_model, whole_optimizer, whole_loader = build(shuffle=True)
    whole = [*train(whole_model, whole_optimizer, whole_loader)]
    whole += train(whole_model, whole_optimizer, whole_loader)

    model, optimizer, loader = build(shuffle=True)
    torch.manual_seed(1234)
    with trainpath.accelerate(model, optimizer, loader, checkpoint_dir=tmp_path / "a") as run:
        assert run.restore() == 3
        rest = train(model, optimizer, run.loader)
        assert run.epoch == 1
        rest += train(model, optimizer, run.loader)
    assert rest == whole[3:]


def test_restore_of_a_step_that_is_not_there(tmp_path):
    """Only 'the newest' may be absent; a step asked for by number must exist."""
    model, optimizer, loader = build()
    with trainpath.accelerate(model, optimizer, loader, checkpoint_dir=tmp_path) as run:
        assert run.restore() == 0
        with pytest.raises(CheckpointNotFoundError, match="12"):
            run.restore(step=12)


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.SGD])
def test_restore_into_another_optimizer_is_refused(tmp_path, other):
    """The state of one class of optimizer is not poured into another; nothing is changed."""
    model, sgd, loader = build()
    adam = torch.optim.AdamW(model.parameters())
    saved, live = (sgd, adam) if other is torch.optim.AdamW else (adam, sgd)
    with trainpath.accelerate(model, saved, loader, checkpoint_dir=tmp_path) as run:
        train(model, saved, run.loader, steps=2)
        run.save()
    with (
        trainpath.accelerate(model, live, loader, checkpoint_dir=tmp_path) as run,
        pytest.raises(StateMismatchError, match=r"optimizer\.param_groups .*momentum"),
    ):
        run.restore()
    assert not live.state


def test_restore_does_not_start_afresh_beside_damaged_checkpoints(tmp_path):
    """Without any checkpoint a run starts at 0; with damaged ones only it says so."""
    model, optimizer, loader = build()
    with trainpath.accelerate(model, optimizer, loader, checkpoint_dir=tmp_path) as run:
        assert run.restore() == 0
        train(model, optimizer, run.loader, steps=2)
        run.save()
    (tmp_path / "step-00000002" / "__0_0.distcp").write_bytes(b"cut")
    with (
        trainpath.accelerate(model, optimizer, loader, checkpoint_dir=tmp_path) as run,
        pytest.raises(CheckpointNotFoundError),
    ):
        run.restore()


def test_arguments_that_are_mixed_up_are_named():
    """Each argument of the wrong kind is refused by name before anything is changed."""
    model, optimizer, loader = build()
    for arguments, name in (
        ((None, optimizer, loader), "model"),
        ((optimizer, model, loader), "model"),
        ((model, "adam", loader), "optimizer"),
        ((model, loader, optimizer), "loader"),
        ((model, optimizer, 3), "loader"),
    ):
        with pytest.raises(ConfigError, match=f"^{name} must be"):
            trainpath.accelerate(*arguments)
    with pytest.raises(ConfigError, match=r"^optimizer must be"):
        trainpath.observe(loader, optimizer)


def test_unwritable_checkpoint_directory_is_named(tmp_path):
    """A file where the directory should be is one clear error, and nothing is left."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    model, optimizer, loader = build()
    with pytest.raises(CheckpointWriteError, match="file"):
        trainpath.accelerate(model, optimizer, loader, checkpoint_dir=blocked)
    assert not model._forward_hooks


def test_extra_state_is_saved_and_its_names_are_checked(tmp_path):
    """A scheduler handed in as `extra` is restored; reserved names are refused."""
    model, optimizer, loader = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    arguments = {"checkpoint_dir": tmp_path, "extra": {"scheduler": scheduler}}
    with trainpath.accelerate(model, optimizer, loader, **arguments) as run:
        for _ in range(3):
            train(model, optimizer, run.loader, steps=1)
            scheduler.step()
        run.save()
    model, optimizer, loader = build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    arguments["extra"] = {"scheduler": scheduler}
    with trainpath.accelerate(model, optimizer, loader, **arguments) as run:
        run.restore()
        assert scheduler.last_epoch == 3
    with pytest.raises(ConfigError, match="model"):
        trainpath.accelerate(
            model, optimizer, loader, checkpoint_dir=tmp_path, extra={"model": scheduler}
        )


SCRIPT = """
    import sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import trainpath

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(100000, 4)), batch_size=4)
    run = trainpath.accelerate(
        model, optimizer, loader, checkpoint_dir=sys.argv[1] + "/ckpt", metrics_dir=sys.argv[1]
    )
    for (x,) in run.loader:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)
        if run.step == 20:
            print("twenty", flush=True)
            if sys.argv[2] == "raise":
                raise ZeroDivisionError("the script's own")
"""


def start_script(tmp_path, how):
    """Start the script, wait until it has done 20 steps."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, str(path), str(tmp_path), how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "twenty\n"
    return process


def finish(process):
    """Wait for the end of the process, at most 30 s."""
    try:
        process.communicate(timeout=30)
    finally:
        process.kill()


def footer(tmp_path):
    """Return the last line of rank 0's metrics."""
    return json.loads((tmp_path / "rank-00000.jsonl").read_text().splitlines()[-1])


def test_sigterm_saves_once_and_ends_the_process(tmp_path):
    """SIGTERM makes one checkpoint at a step boundary; the exit code is 143."""
    process = start_script(tmp_path, "run")
    process.send_signal(signal.SIGTERM)
    finish(process)

    assert process.returncode == 143
    steps = sorted(path.name for path in (tmp_path / "ckpt").glob("step-*"))
    assert len(steps) == 1
    assert int(steps[0].split("-")[1]) >= 20
    assert "SIGTERM" in json.dumps(footer(tmp_path))


def test_second_sigterm_does_not_cut_the_end_short(tmp_path):
    """Launchers signal the ranks and their group: one that comes while closing changes nothing."""
    again = """
    close = run.checkpoints.close
    run.checkpoints.close = lambda: (signal.raise_signal(signal.SIGTERM), close())
    for (x,) in run.loader:"""
    script = textwrap.dedent(SCRIPT).replace("import sys, time", "import signal, sys, time")
    script = script.replace("for (x,) in run.loader:", textwrap.dedent(again))
    path = tmp_path / "script.py"
    path.write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(path), str(tmp_path), "run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "twenty\n"
    process.send_signal(signal.SIGTERM)
    finish(process)

    assert process.returncode == 143
    assert "SIGTERM" in json.dumps(footer(tmp_path))


def test_a_fork_of_the_script_closes_nothing(tmp_path):
    """A forked child may close the Run or end as it likes: the parent still saves."""
    model, optimizer, loader = build()
    with trainpath.accelerate(model, optimizer, loader, checkpoint_dir=tmp_path / "c") as run:
        train(model, optimizer, run.loader, steps=2)
        child = multiprocessing.get_context("fork").Process(target=run.close)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        with pytest.raises(ClosedError, match="fork"):
            in_a_fork(run.save)
        train(model, optimizer, run.loader, steps=1)
        run.save().durable.wait(20)
        assert run.checkpoints.all_steps() == [3]


def in_a_fork(call):
    """Call it in a forked child and raise here what it raised there."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def target():
        try:
            call()
        except Exception as error:
            theirs.send(error)

    child = context.Process(target=target)
    child.start()
    child.join(20)
    assert child.exitcode == 0
    if ours.poll():
        raise ours.recv()


@pytest.mark.parametrize(
    ("how", "code", "reason"), [("raise", 1, "ZeroDivisionError"), ("interrupt", None, "Keyboard")]
)
def test_metrics_are_written_when_the_job_ends_badly(tmp_path, how, code, reason):
    """After an exception or Ctrl-C the metrics hold every step and the reason."""
    process = start_script(tmp_path, how)
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    finish(process)

    assert process.returncode == code or (code is None and process.returncode != 0)
    lines = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    assert sum('"wall_ns"' in line for line in lines) >= 20
    assert reason in json.dumps(footer(tmp_path))


def test_sigterm_while_stuck_ends_by_the_deadline(tmp_path):
    """A loop that never reaches a step boundary still ends, with its metrics written."""
    script = textwrap.dedent(SCRIPT).replace(
        "metrics_dir=sys.argv[1]", "metrics_dir=sys.argv[1], preempt_deadline_s=1.0"
    )
    script = script.replace(
        'print("twenty", flush=True)', 'print("twenty", flush=True); time.sleep(60)'
    )
    path = tmp_path / "script.py"
    path.write_text(script)
    process = subprocess.Popen(
        [sys.executable, str(path), str(tmp_path), "run"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "twenty\n"
    process.send_signal(signal.SIGTERM)
    finish(process)

    assert process.returncode == -signal.SIGTERM
    assert "deadline" in json.dumps(footer(tmp_path))


def test_a_handler_of_the_script_is_chained(tmp_path):
    """With a SIGTERM handler of its own the script is told, and ends as it likes."""
    called = []
    previous = signal.signal(signal.SIGTERM, lambda *_: called.append(True))
    try:
        model, optimizer, loader = build()
        with trainpath.accelerate(model, optimizer, loader, checkpoint_dir=tmp_path) as run:
            train(model, optimizer, run.loader, steps=2)
            os.kill(os.getpid(), signal.SIGTERM)
            train(model, optimizer, run.loader, steps=1)
            assert train(model, optimizer, run.loader) == []
            assert called == [True]
            assert run.should_stop
            assert run.checkpoints.latest_step() == 3
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, previous)


def wrapped_models(directory):
    """Accelerate a DDP model and an FSDP2 model; return what was reduced and by whom."""
    from torch.distributed.fsdp import fully_shard

    model, optimizer, loader = build()
    with trainpath.accelerate(DistributedDataParallel(model), optimizer, loader) as run:
        losses = train(run._model, optimizer, run.loader)
    results = {"ddp": losses}

    model, _, loader = build()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with trainpath.accelerate(model, optimizer, loader) as run:
        assert run._reducer is None
        results["fsdp2"] = len(train(model, optimizer, run.loader))
    try:
        trainpath.accelerate(model, optimizer, loader, checkpoint_dir=directory)
    except ConfigError as error:
        results["refused"] = str(error)
    return results


def test_models_already_wrapped_are_not_reduced_twice(tmp_path):
    """DDP gets the hook (losses equal a single process on equal data), FSDP2 is watched."""
    expected = train(*build())
    for results in spawn(wrapped_models, 2, args=(str(tmp_path),)):
        assert results["ddp"] == expected
        assert results["fsdp2"] == len(expected)
        assert "torch.distributed.checkpoint" in results["refused"]


def agree_on_step(directory):
    """Rank 1 alone gets SIGTERM; return the step at which this rank stopped."""
    import torch.distributed as dist

    model, optimizer, loader = build(num_samples=4000)
    run = trainpath.accelerate(model, optimizer, loader, checkpoint_dir=directory)
    try:
        for x, y in run.loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.002)
            if run.step == 10 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as end:
        return run.step, end.code
    return run.step, None


def test_signal_on_one_rank_stops_all_at_the_same_step(tmp_path):
    """The ranks agree: same step everywhere, one checkpoint, which restores."""
    (step0, code0), (step1, code1) = spawn(agree_on_step, 2, args=(str(tmp_path),))

    assert (step0, code0) == (step1, code1)
    assert code0 == 143
    assert 10 < step0 < 1000
    assert [path.name for path in tmp_path.glob("step-*")] == [f"step-{step0:08d}"]


def test_the_scripts_own_loader_is_not_closed():
    """close() ends what the run added; an iterable of the script's can be used again."""

    class Batches(list):
        closed = False

        def close(self):
            self.closed = True

    model, optimizer, loader = build()
    batches = Batches(loader)
    with trainpath.accelerate(model, optimizer, batches) as run:
        assert len(train(model, optimizer, run.loader)) == len(batches)
    assert not batches.closed
    with trainpath.accelerate(model, optimizer, batches) as run:
        assert len(train(model, optimizer, run.loader)) == len(batches)
