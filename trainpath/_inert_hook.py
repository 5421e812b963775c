"""A module hook that a copied or pickled model does not carry along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["InertHook"]


class InertHook:
    """Calls `call` where it was registered; a copy of it, or one from a pickle, does nothing.

    `copy.deepcopy(model)` and `torch.save(model)` take a module's hooks along. Ours hold
    threads and process groups, which belong to the one model they were put on.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    @property
    def owner(self) -> object:
        """The object whose method it calls, if it is one; a copy has none."""
        return getattr(self._call, "__self__", None)

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    # torch.compile leaves the hook out of its graphs, as after torch.compiler.disable(), which
    # would import all of the compiler here. Without it, it tries, and warns of what we call.
    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001

    def __deepcopy__(self, _memo: dict[int, Any]) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()
