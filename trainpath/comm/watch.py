"""Where backward begins and ends, told by the parameters alone."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch.distributed as dist

from trainpath.comm._autograd import GradientHooks, at_end_of_backward
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from trainpath.metrics import StepClock

__all__ = ["BackwardWatch", "watch_backward"]

# Hooks that stay besides those on the gradients known to come first, spread over the order
# in which gradients come: they notice when a backward begins elsewhere.
_NUM_SENTINELS = 8

# More than one, because passes may alternate between graphs (a GAN's, say).
_NUM_LEARNING = 3


class BackwardWatch:
    """Marks each backward of a script on the clock; see `watch_backward`.

    Attributes:
        num_backwards: Backward passes seen.
    """

    def __init__(self, parameters: Iterable[Tensor], clock: StepClock) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self._clock = clock
        self.num_backwards = 0
        self._hooks = GradientHooks(self)
        self._firsts: set[int] = set()
        self._sentinels: set[int] = set()
        self._learning = 0  # backward passes still to learn from
        self._order: list[int] = []
        self._pass: Callable[[], _WatchedBackward | None] = _no_pass
        self._learn()

    @property
    def num_hooks(self) -> int:
        """Parameters with a hook on them now."""
        return len(self._hooks)

    def _learn(self) -> None:
        """Hook every parameter until the next few passes have shown what comes first."""
        self._learning = _NUM_LEARNING
        self._order = []
        for index, parameter in enumerate(self._parameters):
            self._hooks.add(index, parameter)

    def on_gradient(self, index: int) -> None:
        """Take note of the gradient of parameter `index`; the autograd engine calls it."""
        if self._learning:
            self._order.append(index)
        if self._pass() is not None:
            return
        current = _WatchedBackward(self, index)
        self._clock.switch(S.BACKWARD)
        # Queued at the first gradient, so ahead of the callback of DDP's reducer, which DDP
        # queues at the last one.
        at_end_of_backward(current)
        self._pass = weakref.ref(current)

    def end_backward(self, first: int) -> None:
        """Local gradients are ready; whoever reduces them waits from here on."""
        self.num_backwards += 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._clock.arrive()
            # Queued from inside a callback, this one comes behind that of DDP's reducer.
            at_end_of_backward(self._depart)
        else:
            self._clock.switch(S.PYTHON)
        self._pass = _no_pass
        if self._learning:
            self._firsts.add(first)
            self._learning -= 1
            if not self._learning:
                self._keep_few()
        elif first not in self._firsts:
            self._learn()

    def _depart(self) -> None:
        self._clock.depart(S.PYTHON)

    def _keep_few(self) -> None:
        order = list(dict.fromkeys(self._order))
        idle = sorted(self._hooks.indices() - set(order))
        self._sentinels = {*_spread(order), *_spread(idle)}
        for index in self._hooks.indices() - self._firsts - self._sentinels:
            self._hooks.remove(index)

    def close(self) -> None:
        """Remove the hooks; safe to call twice."""
        self._hooks.close()


class _WatchedBackward:
    """One run of the autograd engine, which holds it; gone if the run fails."""

    __slots__ = ("__weakref__", "_first", "_watch")

    def __init__(self, watch: BackwardWatch, first: int) -> None:
        self._watch = watch
        self._first = first

    def __call__(self) -> None:
        self._watch.end_backward(self._first)


def watch_backward(parameters: Iterable[Tensor], clock: StepClock) -> BackwardWatch:
    """Mark every backward that reaches `parameters` on `clock`; no communication of ours.

    `backward` begins at the first gradient of a parameter and ends when the autograd engine
    is done. In a job of several ranks that moment is also this rank's arrival, and the end
    of what other callbacks do then (torch DDP waits for the other ranks in one) its
    departure. FSDP waits inside backward: that time counts as `backward`.

    Args:
        parameters: Those of the model, or of the optimizer where that is all there is.
        clock: The step clock.

    Returns:
        The watch; `close()` removes its hooks.

    Cost:
        One Python call for each parameter in the first three backward passes; afterwards
        about ten for each pass, and all again for three when the graph begins elsewhere.
    """
    return BackwardWatch(parameters, clock)


def _spread(indices: list[int]) -> set[int]:
    count = len(indices)
    if not count:
        return set()
    return {indices[n * count // _NUM_SENTINELS - 1] for n in range(1, _NUM_SENTINELS + 1)}


def _no_pass() -> None:
    return None
