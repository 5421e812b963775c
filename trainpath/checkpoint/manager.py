"""`CheckpointManager`: save behind the next forward and backward, restore what is proven."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
import torch.distributed as dist

from trainpath.checkpoint.capture import take_apart
from trainpath.checkpoint.generation import Generation, Values
from trainpath.checkpoint.handle import SaveHandle
from trainpath.checkpoint.layout import Plan, make_plan
from trainpath.checkpoint.lease import Lease
from trainpath.checkpoint.metadata import describe_plan
from trainpath.checkpoint.reader import find_valid
from trainpath.checkpoint.restore import restore_into
from trainpath.checkpoint.retention import (
    clean_leftovers,
    list_steps,
    step_name,
)
from trainpath.checkpoint.saver import MARGIN_S, Saver
from trainpath.checkpoint.staging import Image, copy_into
from trainpath.errors import (
    CheckpointWriteError,
    ClosedError,
    ConfigError,
    DeadlineError,
    PeerError,
    PeerTimeoutError,
    StateMismatchError,
    TrainpathError,
)
from trainpath.metrics import NULL_CLOCK
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from typing_extensions import Self

    from trainpath.checkpoint.capture import Leaf, Part
    from trainpath.metrics import StepClock

__all__ = ["CheckpointManager"]

_log = logging.getLogger("trainpath.checkpoint")

# How long a write goes on that needs a rank which is known to be gone.
_LOST_PEER_S: Final = 5.0


class CheckpointManager:
    """Saves and restores training state as stock `torch.distributed.checkpoint` directories.

    The state is a mapping of names to modules, optimizers, `Stateful` objects, tensors and
    plain values. Modules and optimizers must be replicated: every rank holds the same (as
    under DDP), and each rank writes its share of their parameters and moments. Buffers and
    everything else in them are those of rank 0. `Stateful` objects and values that differ
    between the ranks are stored once per rank.

    Args:
        directory: Where the steps go; shared by all ranks.
        keep: How many committed steps stay.
        process_group: The ranks that save together (default: all, if torch.distributed is
            initialised).
        clock: Charged with what the training thread waits for.
        timeout_s: Deadline of every wait inside: for an earlier write, for staging, for the
            other ranks' part, for the writer of a dead run that still holds the directory.
        on_busy: What `save()` does while an earlier one is being written: "wait" for it, or
            "raise" `DeadlineError` at once.

    Raises:
        CheckpointWriteError: The directory cannot be written, or another run is using it.
        ConfigError: `keep` is less than 1.

    Collectives: one broadcast of a short object in the constructor, and those that `restore`
    names. None in `save()`, none in the background.

    Cost:
        One staging thread and one writer process; memory for what this rank writes,
        allocated at the first save and reused. `save()` itself copies only what could change
        before the next fenced `optimizer.step()`: buffers, values, and tensors that no
        attached optimizer owns.

    Guarantee:
        A step is visible under its name only with every byte written, synced and
        checksummed, on behalf of all ranks; `kill -9` of trainer or writer at any moment
        leaves the newest committed step intact. What is saved are the values at `save()`. A
        failed save raises `CheckpointWriteError` at its handle and at the next call, and
        harms neither the training nor an earlier checkpoint.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        process_group: dist.ProcessGroup | None = None,
        clock: StepClock | None = None,
        timeout_s: float = 600.0,
        on_busy: Literal["wait", "raise"] = "wait",
    ) -> None:
        if keep < 1:
            raise ConfigError(f"keep must be at least 1 checkpoint, got {keep}")
        self.directory = Path(directory).absolute()
        self._clock = NULL_CLOCK if clock is None else clock
        self._timeout_s = timeout_s
        self._on_busy = on_busy
        self._group = process_group
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank(process_group) if distributed else 0
        self._world_size = dist.get_world_size(process_group) if distributed else 1
        self._plan: Plan | None = None
        self._description: bytes | None = None
        self._image: Image | None = None
        self._attached: dict[int, tuple[torch.optim.Optimizer, Any]] = {}
        self._num_saves: dict[int, int] = {}
        self._current: Generation | None = None
        self._closed = False
        self._pid = os.getpid()
        self._lease, self._run_id = self._take_directory()
        try:
            self._saver = Saver(
                self.directory,
                rank=self._rank,
                world_size=self._world_size,
                keep=keep,
                clock=self._clock,
                timeout_s=timeout_s,
                inherit=() if self._lease is None else (self._lease.fd,),
            )
        except BaseException:
            if self._lease is not None:
                self._lease.close()
            raise
        atexit.register(self.close)

    def _take_directory(self) -> tuple[Lease | None, str]:
        """Take the directory on rank 0; tell the others the name of this run, or the error."""
        outcome: list[Any] = [None, None]
        lease = None
        if self._rank == 0:
            try:
                lease = _open_directory(self.directory, self._timeout_s)
                outcome[0] = uuid.uuid4().hex[:12]
            except CheckpointWriteError as error:
                outcome[1] = error
        try:
            run_id, refusal = self._broadcast(outcome)
        except BaseException:
            if lease is not None:
                lease.close()
            raise
        if refusal is not None:
            raise refusal
        return lease, str(run_id)

    def _broadcast(self, objects: list[Any]) -> list[Any]:
        if self._world_size > 1:
            source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            dist.broadcast_object_list(objects, src=source, group=self._group)
        return objects

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer.step()` wait until what is being saved is copied (the fence).

        Optimizers in the state of a `save()` are attached by it; attach others that change
        the saved parameters. Attaching twice changes nothing.
        """
        if id(optimizer) not in self._attached:
            hook = optimizer.register_step_pre_hook(self._fence)
            self._attached[id(optimizer)] = (optimizer, hook)

    def _fence(self, *_: Any) -> None:
        generation = self._current
        if generation is None or generation.handle.staged.done:
            return
        handle = generation.handle
        before = time.monotonic_ns()
        previous = self._clock.switch(S.CKPT_FENCE)
        try:
            handle.staged.wait(self._timeout_s)
        except DeadlineError:
            text = f"step {handle.step} was not copied within {self._timeout_s:g} s; given up"
            generation.fail(CheckpointWriteError(text))
        except CheckpointWriteError:
            pass  # the next call tells; it is not the optimizer's business
        finally:
            self._clock.switch(previous)
            handle.blocking_ns += time.monotonic_ns() - before

    def save(self, step: int, state: Mapping[str, Any]) -> SaveHandle:
        """Save `state` as it is now; returns before it is copied or written.

        Until `handle.staged`, parameters and optimizer moments may be changed only by
        `step()` of the attached optimizers, which waits for it. No collective.

        Args:
            step: The number of the checkpoint; an existing one of that number is replaced
                at the commit.
            state: Names to modules, optimizers, `Stateful` objects, tensors and values; the
                same names in the same order on every rank.

        Raises:
            CheckpointWriteError: An earlier save failed; this one is not made. Told once.
            DeadlineError: An earlier save is still being written after `timeout_s`.
            ConfigError: The state holds sharded tensors, or two values of one name.
            ClosedError: The manager is closed.
        """
        if step < 0:
            raise ConfigError(f"step must not be negative, got {step}")
        self._check_open()
        began_ns = time.monotonic_ns()
        self._wait_for_earlier()
        self._raise_pending()
        previous = self._clock.switch(S.CKPT_CAPTURE)
        try:
            generation = self._capture(step, state, began_ns)
            generation.mark_devices()
            self._start(generation)
        finally:
            self._clock.switch(previous)
        generation.handle.blocking_ns += time.monotonic_ns() - began_ns
        return generation.handle

    def _wait_for_earlier(self) -> None:
        generation = self._current
        if generation is None or generation.finished.is_set():
            return
        if self._on_busy == "raise":
            raise DeadlineError(
                f"step {generation.handle.step} is still being written; save less often, or "
                "use on_busy='wait'"
            )
        previous = self._clock.switch(S.CKPT_BACKPRESSURE)
        try:
            self._drain(self._timeout_s)
        finally:
            self._clock.switch(previous)

    def _drain(self, timeout_s: float) -> None:
        generation = self._current
        if generation is not None and not generation.finished.wait(timeout_s):
            raise DeadlineError(
                f"step {generation.handle.step} is still being written to {self.directory} "
                f"after {timeout_s:g} s"
            )

    def _capture(self, step: int, state: Mapping[str, Any], began_ns: int) -> Generation:
        for obj in state.values():
            if isinstance(obj, torch.optim.Optimizer):
                self.attach(obj)
        parts = take_apart(state, self._fenced())
        tensors = _tensors_of(parts)
        image = self._prepare(tensors)
        late = []
        for slot, view in zip(self._slots(), image.views, strict=True):
            leaf = tensors[slot.leaf]
            if leaf.late:
                late.append((view, leaf.value))
            else:
                copy_into(view, leaf.value)
        values = [
            Values(part, self._world_size)
            for part in parts
            if part.kind == "value" or self._rank == 0
        ]
        attempt = self._num_saves.get(step, 0)
        self._num_saves[step] = attempt + 1
        return Generation(
            handle=SaveHandle(step),
            token=f"{self._run_id}-{attempt}",
            image=image,
            late=late,
            values=[group for group in values if group.items],
            began_ns=began_ns,
        )

    def _fenced(self) -> set[int]:
        """Return the `id()` of the parameters that only fenced optimizers change."""
        return {
            id(param)
            for optimizer, _ in self._attached.values()
            for group in optimizer.param_groups
            for param in group["params"]
        }

    def _prepare(self, tensors: list[Leaf]) -> Image:
        """Return the image for these tensors: the last one, unless they changed."""
        plan = make_plan(tensors, self._world_size, self._plan)
        if self._image is None or plan is not self._plan:
            if self._image is not None:
                self._image.close()
                self._image = None
            self._plan = plan
            self._description = describe_plan(plan, tensors) if self._rank == 0 else None
            self._image = Image(plan, self._rank)
        return self._image

    def _slots(self) -> tuple[Any, ...]:
        return () if self._plan is None else self._plan.slots[self._rank]

    def _start(self, generation: Generation) -> None:
        self._current = generation
        try:
            digest = "" if self._plan is None else self._plan.digest
            self._saver.submit(generation, digest, self._description)
        except BaseException:
            generation.fail(CheckpointWriteError("the save was interrupted before it began"))
            generation.finished.set()
            raise

    def restore(self, state: Mapping[str, Any], step: int | None = None) -> int:
        """Load the newest valid step, or `step`, into the objects of `state`, in place.

        Everything is compared before anything is touched. Optimizers need no state yet. Plain
        values are put into `state` itself, if it is mutable. Objects that were saved once per
        rank go back to their rank; on another number of ranks, those marked `rank_local` keep
        what they have on ranks without a copy, others are refused.

        Collectives, on every rank: one broadcast of the step, one gather of the comparison.

        Returns:
            The step loaded.

        Raises:
            CheckpointNotFoundError: No valid step, or not the one asked for.
            CheckpointCorruptError: The step asked for does not match its own checksums.
            StateMismatchError: Names, shapes or dtypes differ; the message has a table.
        """
        self._check_open()
        self._drain(self._timeout_s)
        outcome: list[Any] = [None, None]
        if self._rank == 0:
            try:
                outcome[0] = find_valid(self.directory, step)
            except TrainpathError as error:
                outcome[1] = error
        found, refusal = self._broadcast(outcome)
        if refusal is not None:
            raise refusal
        restore_into(
            state,
            self.directory / step_name(found),
            rank=self._rank,
            world_size=self._world_size,
            agree=self._agree,
        )
        return int(found)

    def _agree(self, problem: str) -> None:
        """Raise on every rank if any has a problem (empty: none)."""
        problems = [problem]
        if self._world_size > 1:
            problems = [""] * self._world_size
            dist.all_gather_object(problems, problem, group=self._group)
        for rank, text in enumerate(problems):
            if text:
                raise StateMismatchError(problem or f"rank {rank} reports: {text}")

    def latest_step(self) -> int | None:
        """Return the newest committed step, or None. Reads names only; `restore` proves."""
        steps = self.all_steps()
        return steps[-1] if steps else None

    def all_steps(self) -> list[int]:
        """Return the committed steps in ascending order. Reads names only."""
        return list_steps(self.directory)

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Wait until nothing is being written any more.

        Raises:
            CheckpointWriteError: A save failed. Told once.
            DeadlineError: It still goes on after `timeout_s` (default: that of the manager).
        """
        self._drain(self._timeout_s if timeout_s is None else timeout_s)
        self._raise_pending()

    def _raise_pending(self) -> None:
        error, self._saver.error = self._saver.error, None
        if error is not None:
            raise error

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the CheckpointManager of {self.directory} is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                f"the CheckpointManager of {self.directory} belongs to process {self._pid}, and "
                "this is a fork of it: use it there, or make one here for another directory"
            )

    def close(self) -> None:
        """Finish what is being written, end thread and process; safe to call twice.

        A write needs every rank: where the script ends because one is gone, it is given up
        after a few seconds.

        Raises:
            CheckpointWriteError: A save failed, and nobody was told yet.
            DeadlineError: A write still went on at the deadline; it was abandoned.
        """
        if self._closed or os.getpid() != self._pid:  # a forked child has nothing to finish
            return
        self._closed = True
        atexit.unregister(self.close)
        patience_s = min(self._timeout_s, _LOST_PEER_S) if _lost_peer() else self._timeout_s
        self._saver.writer.give_up_at = time.monotonic() + patience_s + MARGIN_S
        try:
            self._drain(patience_s + 2 * MARGIN_S)
        finally:
            self._release()
        self._raise_pending()

    def _release(self) -> None:
        for _, hook in self._attached.values():
            hook.remove()
        self._attached.clear()
        self._saver.close()
        if self._image is not None:
            self._image.close()
        if self._lease is not None:
            self._lease.close()

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
        try:
            self.close()
        except TrainpathError as second:
            _log.error("while closing: %s", second)


def _lost_peer() -> bool:
    """Whether this process is ending because another rank is gone."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return isinstance(error, (PeerError, PeerTimeoutError))


def _tensors_of(parts: list[Part]) -> list[Leaf]:
    return [
        leaf for part in parts if part.kind != "value" for leaf in part.leaves if leaf.is_tensor
    ]


def _open_directory(directory: Path, timeout_s: float) -> Lease:
    """Make sure of the directory: it exists, takes writes, is ours, and is clean."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".tmp-step-00000000-probe-{os.getpid()}"
        probe.mkdir()
        probe.rmdir()
        lease = Lease(directory, timeout_s=timeout_s)
    except CheckpointWriteError:
        raise
    except OSError as error:
        text = f"checkpoint directory {directory} cannot be written: {error.strerror or error}"
        raise CheckpointWriteError(error.errno, text) from error
    if lease.held:
        for name in clean_leftovers(directory):
            _log.info("cleaned up %s, left behind by a run that died", name)
    return lease
