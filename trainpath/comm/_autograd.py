"""The three things we need of the autograd engine, in one place."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import Variable

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

__all__ = ["GradientHooks", "at_end_of_backward", "inside_backward"]


class _Listener(Protocol):
    def on_gradient(self, index: int) -> None: ...


class GradientHooks:
    """Tells a listener, held weakly, when gradients of parameters are accumulated.

    The hooks sit on the parameters' accumulation nodes, so that they come after the user's
    post-accumulate hooks, as those of DDP do, and that copies of the parameters lack them.
    """

    def __init__(self, listener: _Listener) -> None:
        self._listener = weakref.ref(listener)
        # A node must be kept: the parameter itself holds it weakly.
        self._nodes: dict[int, Any] = {}
        self._handles: dict[int, RemovableHandle] = {}

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, index: int) -> bool:
        return index in self._handles

    def indices(self) -> set[int]:
        """Return the indices that are hooked."""
        return set(self._handles)

    def add(self, index: int, parameter: Tensor) -> None:
        """Hook `parameter` as number `index`, unless it is hooked or frozen."""
        if index in self._handles or not parameter.requires_grad:
            return
        if index not in self._nodes:
            with torch.enable_grad():
                function = parameter.expand_as(parameter).grad_fn
            if function is None:
                return
            self._nodes[index] = function.next_functions[0][0]
        hook = _hook(self._listener, index)
        self._handles[index] = self._nodes[index].register_hook(hook)

    def remove(self, index: int) -> None:
        """Take the hook of `index` off again."""
        self._handles.pop(index).remove()

    def close(self) -> None:
        """Remove all hooks; safe to call twice."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


def _hook(listener: weakref.ref[_Listener], index: int) -> Callable[..., None]:
    def hook(*_gradients: Any) -> None:
        owner = listener()
        if owner is not None:
            owner.on_gradient(index)

    return hook


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward is done; only from inside one.

    Callbacks run in the order in which they were queued, those queued by callbacks last.
    The engine drops its reference to them when backward fails.
    """
    Variable._execution_engine.queue_callback(callback)  # noqa: SLF001 - as DDP and FSDP do


def inside_backward() -> bool:
    """Whether this thread is running a backward pass."""
    return torch._C._current_graph_task_id() >= 0  # noqa: SLF001 - as torch's checkpointing does
