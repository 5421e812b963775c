"""`accelerate()` and `observe()`: put the parts around a training script as it is."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from trainpath import _arguments, _job, _parts
from trainpath._run_loader import Progress, RunLoader
from trainpath.checkpoint import CheckpointManager, RandomState
from trainpath.checkpoint.preempt import PreemptionGuard
from trainpath.config import Settings
from trainpath.errors import CheckpointNotFoundError, ClosedError, ConfigError
from trainpath.metrics import NULL_CLOCK, Recorder, Report, StepClock
from trainpath.metrics import segments as S
from trainpath.metrics.hooks import ModelHooks, OptimizerHooks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

    from trainpath.checkpoint import SaveHandle
    from trainpath.types import Stateful

__all__ = ["Run", "accelerate", "observe"]

_accelerated: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def accelerate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loader: Iterable[Any] | None = None,
    *,
    checkpoint_dir: str | Path | None = None,
    save_every: int | None = None,
    keep: int = 2,
    cache_dir: str | Path | None = None,
    metrics_dir: str | Path | None = None,
    mode: str | None = None,
    extra: Mapping[str, Stateful] | None = None,
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    preempt_deadline_s: float = 25.0,
) -> Run:
    """Accelerate a training script in place: data, gradients and checkpoints off the step.

    The model, `loss.backward()` and `optimizer.step()` stay as they are; only the loop
    iterates `run.loader`. Under torchrun with no process group yet, the default one is
    initialised (and ended again by `run.close()`).

    Args:
        model: The model on its device. Plain: its gradients are reduced in place. In torch
            DDP: a communication hook measures them. In FSDP: observed only, and its sharded
            state cannot be saved yet.
        optimizer: The optimizer(s); a step ends when the last one's `step()` returns.
        loader: A torch `DataLoader` (re-hosted: same data set, sampler, order and bytes), a
            `trainpath.loader.DataLoader`, or any iterable of batches.
        checkpoint_dir: Directory for checkpoints, shared by all ranks.
        save_every: Save automatically every so many optimizer steps.
        keep: How many checkpoints are kept.
        cache_dir: Node-local directory for remote shards (also `TRAINPATH_CACHE_DIR`), one
            cache for the whole job: a `TarDataset` and `trainpath::` URLs read through it.
            `TRAINPATH_CACHE_MAX_BYTES` is its limit.
        metrics_dir: Directory for per-step metrics (also `TRAINPATH_METRICS_DIR`); without
            it they are kept in memory for `run.report()`.
        mode: `on`, `observe` (measured, with the stock parts) or `off` (those, unmeasured);
            the environment's `TRAINPATH_MODE` wins.
        extra: More `Stateful` objects to checkpoint, such as a scheduler or a scaler.
        process_group: The group that shares the gradients (default: all ranks).
        device: Where batches go (default: the device of the model).
        preempt_deadline_s: After SIGTERM the process has saved and ended within this.

    Returns:
        The `Run`, which owns every thread, process and hook that was added.

    Raises:
        ConfigError: Arguments that do not fit together, or a model accelerated twice.
        ReplicaMismatchError: The ranks hold different models.
        CheckpointWriteError: `checkpoint_dir` cannot be written.
        CacheWriteError: `cache_dir` cannot be written.

    Collectives, on every rank: the broadcast and comparison of the model (`mode="on"`), and
    with checkpoints one broadcast of a short object and the creation of one gloo group.
    """
    settings = Settings.resolve(
        mode=mode,
        metrics_dir=metrics_dir,
        cache_dir=cache_dir,
        checkpoint_dir=checkpoint_dir,
        save_every=save_every,
        keep=keep,
        preempt_deadline_s=preempt_deadline_s,
    )
    if not isinstance(model, nn.Module):
        raise ConfigError(_arguments.wrong("model", "a torch.nn.Module", model))
    iterates = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if loader is not None and not iterates:
        raise ConfigError(_arguments.wrong("loader", "an iterable of batches", loader))
    optimizers = _arguments.as_optimizers(optimizer)
    if model in _accelerated:
        raise ConfigError("this model is accelerated already; close() its Run first")
    run = Run(settings)
    try:
        run._install(  # noqa: SLF001 - two halves of one construction
            model=model,
            optimizers=optimizers,
            loader=loader,
            extra=dict(extra or {}),
            process_group=process_group,
            device=device,
        )
    except BaseException:
        with contextlib.suppress(Exception):  # the first error matters more
            run.close(reason="accelerate() failed")
        raise
    return run


def observe(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    loader: Iterable[Any],
    *,
    model: nn.Module | None = None,
    metrics_dir: str | Path | None = None,
) -> Run:
    """Measure a training script as it is; nothing is replaced.

    Under torchrun with no process group yet, the default one is initialised, as `accelerate`
    does. No other collective.

    Args:
        optimizer: The script's optimizer(s).
        loader: The script's loader; iterate `run.loader` in its place.
        model: Optional; with it, forward and backward are told from the rest of the step.
        metrics_dir: As for `accelerate`.

    Returns:
        The `Run`; `run.report()` says where the step time went.

    Raises:
        ConfigError: The environment of the job or `metrics_dir` cannot be used.
    """
    settings = Settings.resolve(mode="observe", metrics_dir=metrics_dir)
    optimizers = _arguments.as_optimizers(optimizer)
    if settings.mode == "on":
        settings = replace(settings, mode="observe")
    run = Run(settings)
    try:
        run._install_watch(model, optimizers, loader)  # noqa: SLF001
    except BaseException:
        with contextlib.suppress(Exception):  # the first error matters more
            run.close(reason="observe() failed")
        raise
    return run


class Run:
    """Owns what `accelerate()` added to a script, until `close()`.

    Attributes:
        loader: Iterate this in place of the loader that was handed in.
        step: Optimizer steps done, those before a restore included.
        epoch: Passes over `loader` completed, those before a restore included. The first
            pass after one is what was left of its epoch, so a loop over epochs is
            `while run.epoch < epochs: for batch in run.loader: ...`.
        checkpoints: The `CheckpointManager`, or None.
        clock: The step clock.
        should_stop: Set when a signal asked for an end and the script has its own handler.

    Cost:
        Threads: one for metrics, one for staging. Processes: the loader's workers and one
        checkpoint writer.

    Guarantee:
        Same order, same batches and same losses as without trainpath. The report and the
        metrics are written also when the job ends by an exception, Ctrl-C or SIGTERM.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.step = 0
        self.epoch = 0
        self.should_stop = False
        self.loader: RunLoader = RunLoader(self, ())
        self.checkpoints: CheckpointManager | None = None
        self.clock: StepClock = NULL_CLOCK if settings.mode == "off" else StepClock()
        self._owns_group = _job.ensure_process_group()
        self._recorder: Recorder | None = None
        self._guard: PreemptionGuard | None = None
        self._reducer: Any = None
        self._model: nn.Module | None = None
        self._state: dict[str, Any] = {}
        self._closables: list[Any] = []
        self._stepped = False
        self._saved_step = -1
        self._closed = False
        self._pid = os.getpid()
        atexit.register(self._at_exit)

    def _install(
        self,
        *,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        loader: Iterable[Any] | None,
        extra: dict[str, Stateful],
        process_group: dist.ProcessGroup | None,
        device: torch.device | str | None,
    ) -> None:
        if self.settings.checkpoint_dir is not None and _parts.is_sharded(model):
            raise ConfigError(
                "checkpoints of a model sharded by FSDP or tensor parallelism are not made yet: "
                "leave checkpoint_dir out and save with torch.distributed.checkpoint"
            )
        mode = self.settings.mode
        cache_dir = self.settings.cache_dir if mode == "on" else None
        self._closables.append(_parts.install_cache(loader, cache_dir))
        self._reducer, closables = _parts.install_comm(
            model, optimizers, mode=mode, clock=self.clock, process_group=process_group
        )
        self._closables += closables
        self._install_loader(loader, device or _parts.device_of(model))
        if self.settings.checkpoint_dir is not None:
            self._install_checkpoints(self.settings.checkpoint_dir, model, optimizers, extra)
        self._install_clock(model, optimizers)
        _accelerated.add(model)
        self._model = model

    def _install_watch(
        self,
        model: nn.Module | None,
        optimizers: list[torch.optim.Optimizer],
        loader: Iterable[Any],
    ) -> None:
        self._install_loader(loader, device=None)
        if self.settings.mode != "off":
            self._closables.append(_parts.watch_optimizers(optimizers, self.clock))
        self._install_clock(model, optimizers)

    def _install_loader(
        self, loader: Iterable[Any] | None, device: torch.device | str | None
    ) -> None:
        if loader is None:
            return
        source, closables = _parts.host_loader(
            loader, mode=self.settings.mode, clock=self.clock, device=device
        )
        self._closables += closables
        self.loader = RunLoader(self, source)

    def _install_checkpoints(
        self,
        directory: Path,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        extra: dict[str, Stateful],
    ) -> None:
        self.checkpoints = CheckpointManager(directory, keep=self.settings.keep, clock=self.clock)
        self._closables.append(self.checkpoints)
        for optimizer in optimizers:
            self.checkpoints.attach(optimizer)
        self._state = {"model": model, "run": Progress(self), "rng": RandomState()}
        for index, optimizer in enumerate(optimizers):
            self._state["optimizer" if index == 0 else f"optimizer_{index}"] = optimizer
        if self.loader.has_state:
            self._state["loader"] = self.loader.source
        taken = self._state.keys() & extra.keys()
        if taken:
            raise ConfigError(f"extra may not use the names {sorted(taken)}; rename them")
        self._state.update(extra)
        self._guard = PreemptionGuard(
            process_group=dist.new_group(backend="gloo") if _job.world_size() > 1 else None,
            deadline_s=self.settings.preempt_deadline_s,
            on_deadline=lambda: self._close_metrics("SIGTERM, deadline reached"),
        )

    def _install_clock(
        self, model: nn.Module | None, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        if optimizers:
            self._closables.append(OptimizerHooks(optimizers, self.clock, self._after_step))
        if self.settings.mode == "off":
            return
        if model is not None:
            self._closables.append(ModelHooks(model, self.clock))
        self.clock.watch_gc()
        self._closables.append(self.clock)
        self._recorder = Recorder(
            self.clock,
            directory=self.settings.metrics_dir,
            rank=_job.rank(),
            world_size=_job.world_size(),
            mode=self.settings.mode,
            store=_job.job_store(),
        )

    def end_step(self) -> None:
        """End the current step by hand; with an optimizer its hook does that."""
        self.clock.end_step()
        self._after_step()

    def _after_step(self) -> None:
        self.step += 1
        self._stepped = True
        if self._guard is not None:
            self._guard.at_boundary()

    def at_save_point(self) -> None:
        """Save if a checkpoint is due; the loader calls it when the loop asks for a batch."""
        if not self._stepped:
            return
        self._stepped = False
        every = self.settings.save_every
        stop = self._guard is not None and self._guard.requested
        if stop or (every is not None and self.step % every == 0):
            self.save()
        if stop:
            self._stop()

    def _stop(self) -> None:
        """Make the last checkpoint durable, then end the process or tell the script to."""
        if self.checkpoints is not None:
            self.checkpoints.wait_until_finished(self.settings.preempt_deadline_s)
        if self._guard is not None and self._guard.owns_exit:
            signum = int(self._guard.signum)
            self.close(reason="SIGTERM")
            raise SystemExit(128 + signum)
        self.should_stop = True

    def restore(self, step: int | None = None) -> int:
        """Continue from the newest valid checkpoint, or from `step`.

        Weights, optimizer, loader position, random state and extras are those of that
        checkpoint; the next batch is the very next sample. Without any checkpoint (and no
        `step` asked for) nothing changes.

        Returns:
            The number of optimizer steps done; 0 when starting afresh.

        Raises:
            ConfigError: There is no checkpoint directory.
            CheckpointNotFoundError: `step` is not there, or no step in the directory is valid.
            StateMismatchError: The model or optimizer does not fit the checkpoint.

        Collectives, on every rank: those of `CheckpointManager.restore`.
        """
        if self.checkpoints is None:
            raise ConfigError("restore() needs checkpoint_dir: accelerate(..., checkpoint_dir=...)")
        try:
            self.checkpoints.restore(self._state, step)
        except CheckpointNotFoundError:
            if step is not None or self.checkpoints.all_steps():  # there are some, none valid
                raise
            return 0
        self._saved_step = self.step
        self.loader.resume()
        self.clock.start(self.step)
        return self.step

    def save(self) -> SaveHandle | None:
        """Save a checkpoint of this step, without waiting for it (`mode="on"`).

        Returns:
            The handle, or None if this step is saved already.

        Raises:
            ConfigError: There is no checkpoint directory, or the model is sharded (FSDP2).
            CheckpointWriteError: An earlier checkpoint failed in the background.
        """
        if self._closed:
            raise ClosedError("this Run is closed; it saves no more checkpoints")
        if self.checkpoints is None:
            raise ConfigError("save() needs checkpoint_dir: accelerate(..., checkpoint_dir=...)")
        if self._saved_step == self.step:
            return None
        handle = self.checkpoints.save(self.step, self._state)
        self._saved_step = self.step
        if self.settings.mode != "on":  # the baseline: a checkpoint that blocks
            self._wait_for_checkpoint()
        return handle

    def _wait_for_checkpoint(self) -> None:
        if self.checkpoints is not None:
            with self.measure(S.SEGMENTS[S.CKPT_BACKPRESSURE]):
                self.checkpoints.wait_until_finished()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in the enclosed passes (see DDP's `no_sync`)."""
        if self._reducer is None:
            return contextlib.nullcontext()
        context: AbstractContextManager[None] = self._reducer.no_sync()
        return context

    @contextlib.contextmanager
    def measure(self, segment: str) -> Iterator[None]:
        """Charge the enclosed code of the step thread to `segment`.

        For work that no hook can see, such as a `torch.save` of the script's own:
        `with run.measure("ckpt.backpressure"): torch.save(...)`.

        Raises:
            ConfigError: There is no such segment.
        """
        if segment not in S.SEGMENTS:
            raise ConfigError(f"no segment {segment!r}; there are {', '.join(S.SEGMENTS)}")
        previous = self.clock.switch(S.segment_index(segment))
        try:
            yield
        finally:
            self.clock.switch(previous)

    def report(self, *, timeout_s: float = 5.0) -> Report:
        """Say where the step time went, over all ranks on rank 0.

        No collective: rank 0 reads what the other ranks published, and says so if some of
        it is missing after `timeout_s`. In mode `off` nothing is measured and the report is
        empty, so that a script that prints it runs in every mode.
        """
        if self._recorder is None:
            return Report.nothing(mode=self.settings.mode, world_size=_job.world_size())
        return self._recorder.report(timeout_s=timeout_s)

    def close(self, *, reason: str = "end") -> None:
        """Drain checkpoints, end threads and processes, remove hooks; safe to call twice.

        Raises:
            TrainpathError: The first error that a part still had to tell.
        """
        if self._closed or os.getpid() != self._pid:  # a fork of the script owns nothing here
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        guard = self._guard
        if guard is not None and not guard.requested:
            guard.close()
        errors: list[BaseException] = []
        for part in reversed(self._closables):
            try:
                part.close()
            except Exception as error:
                errors.append(error)
        self._close_metrics(reason)
        # Where a signal is the reason: until here a second one is caught like the first, and
        # the deadline holds.
        if guard is not None:
            guard.close()
        if self._model is not None:
            _accelerated.discard(self._model)
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        if errors:
            raise errors[0]

    def _close_metrics(self, reason: str) -> None:
        if self._recorder is not None:
            self._recorder.close(reason=reason)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.close(reason="end" if error is None else type(error).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        # The script's own error matters more than one of closing.
        with contextlib.suppress(Exception):
            self.close(reason=type(error).__name__)
