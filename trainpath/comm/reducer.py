"""The in-place gradient reducer: DDP's arithmetic on a model that stays as it is."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves

from trainpath._inert_hook import InertHook
from trainpath.comm._autograd import GradientHooks, at_end_of_backward, inside_backward
from trainpath.comm._eligible import check_reducible
from trainpath.comm.buckets import Verdict
from trainpath.comm.collectives import Peers
from trainpath.comm.plan import Plan
from trainpath.comm.replica import check_same, describe
from trainpath.errors import ClosedError, ConfigError, PeerError, UnreducedGradientError
from trainpath.metrics import NULL_CLOCK
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle
    from typing_extensions import Self

    from trainpath.metrics import StepClock

__all__ = ["GradientReducer"]

_MB = 1 << 20


class GradientReducer:
    """Averages the gradients of `model` over all ranks during `backward()`, in place.

    The model is not wrapped: its type, `state_dict` keys, `deepcopy` and pickle stay as they
    are. When `backward()` returns, `p.grad` holds the mean over the ranks, with the bits that
    torch's `DistributedDataParallel` would give on two ranks.

    A parameter that this rank did not use gets the mean of the others'; one that no rank used
    keeps what it had (None). Frozen parameters are left out, and picked up by the next forward
    pass after they are unfrozen, on all ranks at once.

    Args:
        model: The model, on its device, alike on all ranks. Rank 0's parameters and buffers
            overwrite those of the other ranks here.
        bucket_cap_mb: A bucket is launched when it holds this many MiB of gradients.
        first_bucket_mb: The same for the first one, so that communication starts early.
        process_group: The ranks that share the gradients (default: all).
        broadcast_buffers: Give all ranks the buffers of rank 0 before each forward pass that
            records gradients and follows a reduction, if any of them is floating point.
        overlap: Launch during backward. False launches at its end, for graphs in which the
            number of times a gradient is produced changes from step to step.
        timeout_s: How long to wait for a rank that is late.
        clock: Where the wait for the other ranks is charged.

    Attributes:
        clock: As given; may be replaced.

    Raises:
        ConfigError: The model is wrapped in DDP or FSDP, is reduced already, or has sparse
            gradients; `process_group` lacks this rank.
        ReplicaMismatchError: The ranks hold different models.
        PeerTimeoutError: A rank did not come.

    Collectives, on every rank: here one all-gather of 32 bytes and the broadcast of the model;
    one all-reduce for each bucket and synchronised backward; one small broadcast in the first
    of them; one broadcast of the buffers where `broadcast_buffers` says so. None in a forward
    pass without gradients, so that rank 0 may evaluate alone.

    Cost:
        No thread; one flat copy of the gradients; one Python call for each parameter and
        backward.

    Guarantee:
        All ranks hold equal gradients after each synchronised backward. If the backward of a
        rank fails, its peers get a `PeerError` when that rank goes on (or leaves), and the
        next step is right again; a rank that stays away costs its peers a
        `PeerTimeoutError` after `timeout_s`, never a hang.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        overlap: bool = True,
        timeout_s: float = 600.0,
        clock: StepClock | None = None,
    ) -> None:
        if bucket_cap_mb <= 0 or first_bucket_mb <= 0 or timeout_s <= 0:
            raise ConfigError("bucket_cap_mb, first_bucket_mb and timeout_s must be above 0")
        check_reducible(model, GradientReducer)
        self._model = model
        self._peers = Peers.of(process_group, timeout_s=timeout_s)
        self._alone = self._peers.world_size == 1
        self._clock = NULL_CLOCK if clock is None else clock
        ignored: set[str] = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        named = [(n, p) for n, p in model.named_parameters() if n not in ignored]
        self._ignored = ignored
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._home = _home(self._parameters[0]) if named else None
        self._device = next((p.device for p in self._parameters), torch.device("cpu"))
        self._broadcasts_buffers = broadcast_buffers and any(
            buffer.is_floating_point() or buffer.is_complex() for buffer in self._buffers().values()
        )
        count = len(self._parameters)
        self._step = 0
        self._bytes_reduced = 0
        self._sync = True  # outside no_sync()
        self._forward_sync = True  # the last forward pass was outside no_sync()
        self._buffers_due = True
        self._used = bytearray(count)
        self._unreduced = bytearray(count)
        self._any_unreduced = False
        self._pass: Callable[[], _BackwardPass | None] = _no_pass
        self._open = False  # peers count on the collectives of a backward that has begun
        self._stopped: str | None = None
        self._verdict = Verdict.good()
        self._handles: list[RemovableHandle] = []
        self._hooks = GradientHooks(self)
        self._plan = Plan(
            self._parameters,
            self._names,
            first_cap_bytes=int(first_bucket_mb * _MB),
            cap_bytes=int(bucket_cap_mb * _MB),
            overlap=overlap,
            peers=self._peers,
        )
        if not self._alone:
            self._adopt_rank_0()
        self._pipeline = self._plan.build(self._used)
        self._pipeline.flights.clock = self._clock
        self._attach()

    def _buffers(self) -> dict[str, Tensor]:
        named = self._model.named_buffers()
        return {name: buffer for name, buffer in named if name not in self._ignored}

    def _adopt_rank_0(self) -> None:
        lines = [f"settings {self._plan.settings()}, buffers {self._broadcasts_buffers}"]
        lines += describe("parameter", dict(zip(self._names, self._parameters, strict=True)))
        lines += describe("buffer", self._buffers())
        check_same(lines, self._peers, self._device)
        tensors = [*self._parameters, *self._buffers().values()]
        self._peers.broadcast(tensors, "broadcast of the model")

    # Hooks

    def _attach(self) -> None:
        self._handles += [
            self._model.register_forward_pre_hook(InertHook(self._before_forward)),
            self._model.register_forward_hook(InertHook(self._after_forward)),
        ]
        self._hook_parameters()

    def _hook_parameters(self) -> None:
        if not self._alone:
            for index, parameter in enumerate(self._parameters):
                self._hooks.add(index, parameter)

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if inside_backward():  # recomputed by checkpointing
            return
        self._raise_if_stopped()
        if self._parameters and _home(self._parameters[0]) != self._home:
            raise ConfigError(
                "the model was moved or converted after its GradientReducer was built; do it "
                "before, because the hooks on its parameters are lost by it"
            )
        self._settle()
        self._forward_sync = self._sync
        if not self._plan.is_current():
            self._replan()
        if self._buffers_due:
            self.sync_buffers()
        self._buffers_due = self._sync

    def _after_forward(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        # The gradient of an output comes in the outermost graph task, which a parameter's may
        # not (reentrant checkpointing): a pass that begins there also ends there.
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._on_output)  # type: ignore[no-untyped-call]

    def _on_output(self, _gradient: Tensor) -> None:
        self._current_pass().fired |= self._alone

    def on_gradient(self, index: int) -> None:
        """Take the gradient of parameter `index`; the autograd engine calls it."""
        current = self._current_pass()
        current.fired = True
        self._used[index] = 1
        if not current.sync:
            self._unreduced[index] = 1
            self._any_unreduced = True
            return
        self._open = True
        try:
            self._pipeline.mark(index)
        except BaseException:
            current.done = True
            raise

    # One backward pass

    def _current_pass(self) -> _BackwardPass:
        current = self._pass()
        if current is None or current.done:
            self._raise_if_stopped()
            self._settle()
            self._raise_verdict()
            current = _BackwardPass(self, sync=self._sync and self._forward_sync)
            # Only the engine holds it strongly: if the pass fails, it is gone.
            at_end_of_backward(current)
            self._pass = weakref.ref(current)
        return current

    def end_backward(self, current: _BackwardPass) -> None:
        """Collect what backward has launched; the autograd engine calls it at its end."""
        if current.done:
            return
        current.done = True
        self._pass = _no_pass
        if not current.fired:
            return  # torch.autograd.grad, or a graph without parameters of ours
        self._forward_sync = True
        if current.sync:
            self._reduce()

    def _reduce(self) -> None:
        clock = self._clock
        pipeline = self._pipeline
        if self._alone:
            clock.depart(clock.arrive())
            self._step += 1
            return
        pipeline.launch_rest()
        before = clock.arrive()
        try:
            pipeline.collect(self._step)
            if not self._plan.is_learned:
                # No gradient lives in a bucket between two backward passes, so this is safe
                # with gradients accumulated or not.
                self._plan.learn(pipeline, self._step)
                self._rebuild()
        except BaseException as error:
            self._stopped = f"{type(error).__name__} in step {self._step}: {error}"
            raise
        finally:
            clock.depart(before)
        self._verdict = pipeline.verdict()
        self._finish_step()
        if self._verdict.is_known():
            self._raise_verdict()

    def _rebuild(self) -> None:
        """Replace the pipeline by one of the current plan."""
        self._bytes_reduced += self._pipeline.bytes_reduced
        self._pipeline = self._plan.build(self._used)
        self._pipeline.flights.clock = self._clock

    def _finish_step(self) -> None:
        """Begin the next reduction with a clean slate."""
        self._open = False
        self._step += 1
        self._pipeline.reset()
        self._used[:] = bytes(len(self._used))
        self._unreduced[:] = bytes(len(self._unreduced))
        self._any_unreduced = False

    def _fail_step(self) -> None:
        """What is in the gradients now is not the mean of anything."""
        self._unreduced[:] = b"\x01" * len(self._unreduced)
        self._any_unreduced = True

    def _raise_verdict(self) -> None:
        verdict, self._verdict = self._verdict, Verdict.good()
        failure = verdict.failure()
        if failure is not None:
            self._fail_step()
            raise PeerError(
                f"the backward of {failure} failed in step {self._step - 1} (seen by rank "
                f"{self._peers.rank}): the gradients of this step are incomplete; call "
                "optimizer.zero_grad() and go on, or end the job; the first error is in the "
                "output of that rank"
            )

    def _settle(self) -> None:
        """Complete the collectives of a backward that failed here, so that ranks stay in step.

        The peers learn from them that it failed.
        """
        if not self._open:
            return
        what = self._step
        try:
            self._pipeline.launch_rest(failed=True)
            self._pipeline.collect(what, discard=True)
        except BaseException as error:
            self._stopped = f"{type(error).__name__} in step {what}: {error}"
            raise
        self._finish_step()
        self._forward_sync = True
        self._fail_step()

    def _replan(self) -> None:
        """Parameters were frozen or unfrozen: agree with the peers and start anew."""
        self._plan.start_anew()
        if self._alone:
            return
        named = dict(zip(self._names, self._parameters, strict=True))
        check_same(describe("parameter", named), self._peers, self._device)
        self._hook_parameters()
        self._rebuild()

    def _raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise ClosedError(
                f"rank {self._peers.rank}: gradients are no longer reduced after the "
                f"{self._stopped}; restart the job from its last checkpoint"
            )

    # What the user calls

    @property
    def clock(self) -> StepClock:
        """The clock to which waits are charged."""
        return self._clock

    @clock.setter
    def clock(self, clock: StepClock) -> None:
        self._clock = clock
        self._pipeline.flights.clock = clock

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in the enclosed passes.

        A backward is not reduced if it, or the last forward pass before it, runs in here.
        """
        before = self._sync
        self._sync = False
        try:
            yield
        finally:
            self._sync = before

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer.step()` refuse gradients that are not reduced, until `close()`.

        Raises:
            UnreducedGradientError: From `optimizer.step()`.
        """
        hook = InertHook(self._before_step)
        self._handles.append(optimizer.register_step_pre_hook(hook))

    def _before_step(self, *_args: Any) -> None:
        self._raise_verdict()
        if self._alone:
            return
        failed = self._open  # a backward began and did not come to its end
        if not failed and not self._any_unreduced and len(self._hooks) == len(self._parameters):
            return
        for index, parameter in enumerate(self._parameters):
            unreduced = failed or self._unreduced[index] or index not in self._hooks
            if unreduced and parameter.requires_grad and parameter.grad is not None:
                raise UnreducedGradientError(
                    f"rank {self._peers.rank}, step {self._step}: optimizer.step() on the gradient "
                    f"of {self._names[index]!r}, which no backward has reduced across the ranks; "
                    "run the last backward of an accumulation, and its forward, outside "
                    "no_sync(), or call optimizer.zero_grad() after a failed backward"
                )

    @torch.no_grad()
    def sync_buffers(self) -> None:
        """Give all ranks the buffers of rank 0; collective: one broadcast per device and 25 MiB.

        Called before forward passes as `broadcast_buffers` says; call it before an evaluation
        on all ranks that must not depend on the rank.
        """
        if self._alone or not self._broadcasts_buffers:
            return
        buffers = tuple(self._buffers().values())
        before = self._clock.switch(S.COMM_TRANSFER)
        try:
            # Two forward passes before one backward must not look like an in-place change.
            with _unsafe_preserve_version_counter(buffers):
                self._peers.broadcast(buffers, f"step {self._step}, broadcast of the buffers")
        finally:
            self._clock.switch(before)

    def stats(self) -> dict[str, int]:
        """Return counts since construction.

        `bytes_reduced` were handed to the all-reduces; a ring all-reduce puts
        `bytes_sent` of them on the wire from this rank.
        """
        reduced = self._bytes_reduced + self._pipeline.bytes_reduced
        world = self._peers.world_size
        return {
            "num_steps": self._step,
            "num_buckets": len(self._pipeline.buckets),
            "num_plans": self._plan.num_plans,
            "bytes_reduced": reduced,
            "bytes_sent": 2 * (world - 1) * reduced // world,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the plan: with it a resumed job sums in the same order from its first step."""
        return {"step": self._step, **self._plan.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the plan from `state_dict`, the same on all ranks, if it fits this model."""
        self._step = int(state_dict["step"])
        if self._plan.load_state_dict(state_dict):
            self._rebuild()

    def close(self) -> None:
        """Remove every hook; safe to call twice. No collective."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


class _BackwardPass:
    """One run of the autograd engine; the engine calls it at its end, unless it fails."""

    __slots__ = ("__weakref__", "_reducer", "done", "fired", "sync")

    def __init__(self, reducer: GradientReducer, *, sync: bool) -> None:
        self._reducer = reducer
        self.sync = sync
        self.fired = False
        self.done = False

    def __call__(self) -> None:
        self._reducer.end_backward(self)


def _home(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _no_pass() -> None:
    return None
