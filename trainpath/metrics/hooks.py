"""Hooks on the user's model and optimizer that tell the step clock where the step is.

They are put on the objects handed to us, never on classes, and leave no trace in
`state_dict`, `pickle` or `deepcopy` of those objects.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from trainpath._inert_hook import InertHook
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from trainpath.metrics import StepClock

__all__ = ["ModelHooks", "OptimizerHooks"]


class ModelHooks:
    """Marks `forward` and `backward` of one model on the clock.

    Backward begins when the gradient of the model's output is there and ends in the autograd
    engine's callback. What the step thread computes between forward and backward is the
    loss function, which is outside the model: its CPU time counts as `forward`. What else
    passes there (sleeping, waiting for a lock, a file or a device) stays `python`, and so
    does all of it where backward runs on another thread (CUDA).
    """

    def __init__(self, model: nn.Module, clock: StepClock) -> None:
        self._clock = clock
        self._forward_ended: tuple[int, int] | None = None  # thread, its CPU time
        self._handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(InertHook(self._before_forward)),
            model.register_forward_hook(InertHook(self._after_forward)),
        ]

    def _before_forward(self, _model: nn.Module, _inputs: Any) -> None:
        self._clock.switch(S.FORWARD)

    def _after_forward(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf.register_hook(self._before_backward)  # type: ignore[no-untyped-call]
                self._forward_ended = threading.get_ident(), time.thread_time_ns()
                break
        self._clock.switch(S.PYTHON)

    def _before_backward(self, _gradient: torch.Tensor) -> None:
        self._clock.switch(S.BACKWARD)
        if self._forward_ended is not None:
            thread, cpu_ns = self._forward_ended
            self._forward_ended = None
            if thread == threading.get_ident():
                self._clock.charge_loss(time.thread_time_ns() - cpu_ns)
        Variable._execution_engine.queue_callback(self._after_backward)  # noqa: SLF001

    def _after_backward(self) -> None:
        self._clock.switch(S.PYTHON)

    def close(self) -> None:
        """Remove the hooks; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class OptimizerHooks:
    """Marks `optimizer` on the clock, and calls `on_step` when a step has ended.

    With several optimizers in one step (a GAN, say) the last one given ends it.
    """

    def __init__(
        self,
        optimizers: list[torch.optim.Optimizer],
        clock: StepClock,
        on_step: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._on_step = on_step
        self._stepping: set[int] = set()
        self._handles: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
        for optimizer in optimizers[:-1]:
            self._handles.append(optimizer.register_step_post_hook(self._after_other_step))
        self._handles.append(optimizers[-1].register_step_post_hook(self._after_step))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        self._stepping.add(id(optimizer))
        self._clock.switch(S.OPTIMIZER)

    def _ends_step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this is the first post hook of a step.

        torch calls the hooks once more for each `super().step()` of an optimizer's class.
        """
        if id(optimizer) not in self._stepping:
            return False
        self._stepping.discard(id(optimizer))
        return True

    def _after_other_step(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        if self._ends_step(optimizer):
            self._clock.switch(S.PYTHON)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        if self._ends_step(optimizer):
            self._clock.end_step()
            self._on_step()

    def close(self) -> None:
        """Remove the hooks; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
