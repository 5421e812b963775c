"""Typed use of the public API: checked by mypy in strict mode, never run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import trainpath
from trainpath.cache import ShardCache
from trainpath.checkpoint import CheckpointManager, SaveHandle
from trainpath.comm import GradientReducer
from trainpath.loader import DataLoader, TarDataset, prefetch
from trainpath.metrics import Comparison, Recorder, StepClock, compare
from trainpath.overlap import DevicePrefetcher
from trainpath.testing import ObjectServer, spawn

if TYPE_CHECKING:
    from trainpath.types import Stateful


def whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Stateful
) -> tuple[int, bool, list[trainpath.Report]]:
    """`accelerate()` with every argument, and what a `Run` offers."""
    dataset = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(dataset)
    run: trainpath.Run = trainpath.accelerate(
        model,
        optimizer,
        loader,
        checkpoint_dir=Path("ckpt"),
        save_every=10,
        keep=3,
        cache_dir="cache",
        metrics_dir="metrics",
        mode="on",
        extra={"scheduler": scheduler},
        process_group=None,
        device="cpu",
    )
    step: int = run.restore()
    for batch in run.loader:
        with run.no_sync():
            model(batch)
    with run.measure("ckpt.backpressure"):
        run.save()
    report: trainpath.Report = run.report()
    run.close()
    with trainpath.observe(optimizer, loader, model=model) as observed:
        return step + run.step, run.should_stop, [report, observed.report()]


def parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, clock: StepClock
) -> tuple[bytes, int, int | None, list[int]]:
    """Each part alone."""
    with (
        ShardCache(Path("cache"), max_bytes=1 << 30) as cache,
        cache.open("http://x/a.tar") as file,
    ):
        content: bytes = file.read()
    dataset = TarDataset(["a.tar"], cache=cache)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, seed=0)
    position: dict[str, Any] = loader.state_dict()
    loader.load_state_dict(position)
    for _batch in prefetch([1, 2, 3], depth=2):
        pass
    for _batch in DevicePrefetcher(loader, "cpu", clock=clock):
        pass
    with GradientReducer(model, bucket_cap_mb=1.0, clock=clock) as reducer, reducer.no_sync():
        reducer.guard(optimizer)
    with CheckpointManager("ckpt", keep=2) as checkpoints:
        handle: SaveHandle = checkpoints.save(1, {"model": model, "optimizer": optimizer})
        handle.staged.wait(timeout_s=10.0)
        handle.durable.wait(timeout_s=10.0)
        restored: int = checkpoints.restore({"model": model}, step=None)
        latest: int | None = checkpoints.latest_step()
        steps: list[int] = checkpoints.all_steps()
    return content, restored, latest, steps


def measuring(loader: DataLoader) -> trainpath.Report:
    """The clock and its records without a `Run`."""
    clock = StepClock()
    loader.clock = clock
    with Recorder(clock, directory="metrics") as recorder:
        for _batch in loader:
            clock.end_step()
        before: trainpath.Report = recorder.report()
    change: Comparison = compare(before, before)
    change.print()
    return before


def add(left: int, right: int) -> int:
    """A function for `spawn`."""
    return left + right


def testing() -> tuple[str, list[int]]:
    """The public test helpers."""
    with ObjectServer(Path(), rate_bytes_per_s=1e6, latency_s=0.01) as server:
        url: str = server.url_for("a.tar")
    sums: list[int] = spawn(add, 2, args=(1, 2), timeout_s=30.0)
    return url, sums


def errors(run: trainpath.Run) -> str | None:
    """Every error is a TrainpathError and the nearest builtin."""
    try:
        run.restore(step=7)
    except trainpath.TrainpathError as error:
        return str(error)
    return None
