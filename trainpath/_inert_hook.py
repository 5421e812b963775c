"""A module hook that a copied or pickled model does not carry along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["InertHook"]


class InertHook:
    """Calls `call` where it was registered; a copy of it, or one from a pickle, does nothing.

    `copy.deepcopy(model)` and `torch.save(model)` take a module's hooks along. Ours hold
    threads and process groups, which belong to the one model they were put on.

    Attributes:
        owner: The object whose method it calls, if it is one; a copy has none.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self.owner: object = getattr(call, "__self__", None)
        # torch.compile leaves the call out of its graphs instead of warning of what is in it.
        self._call: Callable[..., Any] | None = None
        if call is not None:
            self._call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __deepcopy__(self, _memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()
