"""A communication hook that measures torch DDP's own reduction without changing its bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from trainpath.comm._autograd import at_end_of_backward
from trainpath.comm.flights import Flights
from trainpath.errors import ConfigError
from trainpath.metrics import NULL_CLOCK, StepClock
from trainpath.metrics import segments as S

__all__ = ["CommHook", "comm_hook"]


class CommHook:
    """The hook on one DDP model; see `comm_hook`.

    Attributes:
        clock: Where waits are charged.
        bytes_reduced: Bytes handed to all-reduces so far.
        num_steps: Backward passes reduced so far.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, clock: StepClock = NULL_CLOCK
    ) -> None:
        self._group = group
        self.closed = False
        self.bytes_reduced = 0
        self.num_steps = 0
        self._flights = Flights(clock)
        self._before = S.PYTHON

    def __reduce__(self) -> tuple[type[CommHook], tuple[()]]:
        # DDP objects are copied and pickled with their hooks; the group stays behind.
        return CommHook, ()

    @property
    def clock(self) -> StepClock:
        """The clock to which waits are charged."""
        return self._flights.clock

    @clock.setter
    def clock(self, clock: StepClock) -> None:
        self._flights.clock = clock

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the mean of one bucket, with the arithmetic of DDP without a hook."""
        buffer = bucket.buffer()
        size = dist.get_world_size(self._group)
        # DDP multiplies by the reciprocal; dividing would round differently on three ranks.
        buffer.mul_(1.0 / size)
        started = self.clock.now_ns()
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        if work is None:
            raise ConfigError("this rank is not in the process group of its DDP model")
        self.bytes_reduced += buffer.numel() * buffer.element_size()
        if not self.closed:
            self._flights.launched(work, started)
            if bucket.is_last():
                # Runs at the end of backward, before DDP's own callback, which DDP queues
                # only after this hook has returned.
                at_end_of_backward(self._arrive)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(_first)
        return future

    def _arrive(self) -> None:
        self._flights.poll()
        self._before = self.clock.arrive()
        # Queued from inside a callback, this one comes behind DDP's.
        at_end_of_backward(self._depart)

    def _depart(self) -> None:
        self.clock.depart(self._before)
        self._flights.land(self.num_steps)
        self.num_steps += 1

    def stats(self) -> dict[str, int]:
        """Return counts since the registration (see `GradientReducer.stats`)."""
        world = dist.get_world_size(self._group)
        return {
            "num_steps": self.num_steps,
            "bytes_reduced": self.bytes_reduced,
            "bytes_sent": 2 * (world - 1) * self.bytes_reduced // world,
        }

    def close(self) -> None:
        """Stop measuring; safe to call twice.

        DDP cannot unregister a hook: it goes on to reduce, exactly as DDP does without one.
        """
        self.closed = True
        self.clock = NULL_CLOCK
        self._flights.clear()


def comm_hook(ddp_model: DistributedDataParallel, *, clock: StepClock | None = None) -> CommHook:
    """Register a hook on `ddp_model` that reduces as DDP does and marks the waits on `clock`.

    Args:
        ddp_model: A model in torch's `DistributedDataParallel`, without a hook so far.
        clock: Where the wait for the other ranks is charged.

    Returns:
        The hook; its `close()` ends the measuring, the reduction goes on.

    Raises:
        ConfigError: Not a DDP model, or one that has a communication hook already.

    Cost:
        One Python call for each bucket; no copy, no thread.

    Guarantee:
        Gradients equal those of DDP without a hook to the bit.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ConfigError(
            f"comm_hook() needs a model in DistributedDataParallel, not a "
            f"{type(ddp_model).__name__}; use GradientReducer(model) for a plain one"
        )
    clock = NULL_CLOCK if clock is None else clock
    for registered in ddp_model._comm_hooks:  # noqa: SLF001
        state: object = registered[-1]
        if isinstance(state, CommHook) and state.closed:
            state.closed = False
            state.clock = clock
            return state
    hook = CommHook(ddp_model.process_group, clock)
    try:
        ddp_model.register_comm_hook(hook, _reduce)
    except RuntimeError as error:
        raise ConfigError(
            f"this DDP model has a communication hook already, and DDP takes only one ({error}); "
            "leave yours or comm_hook() out"
        ) from error
    return hook


def _first(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]


def _reduce(state: CommHook, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.reduce(bucket)


# DDP compares the annotations themselves, and strings (see the first import) are not equal.
_reduce.__annotations__ = {
    "bucket": GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
