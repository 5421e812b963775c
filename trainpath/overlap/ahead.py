"""What everything shares that reads a source ahead of its consumer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from typing_extensions import Self

__all__ = ["ReadAhead", "read_ahead", "state_of"]

T = TypeVar("T")


class ReadAhead:
    """An iterable over a source that it reads further than it has delivered.

    Its state is that of the last batch delivered, which the one who iterates keeps in
    `_state`; while that is None it is the state of the source.

    Args:
        source: Any iterable; stateful or not, with epochs or without.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the source as of the last batch delivered.

        Raises:
            ConfigError: The source has no `state_dict`.
        """
        state = self._state if self._state is not None else state_of(self.source)
        if state is None:
            raise ConfigError(f"{type(self.source).__name__} has no state_dict(), so nor has this")
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue from `state_dict`.

        Raises:
            ConfigError: The source has no `load_state_dict`.
        """
        load = getattr(self.source, "load_state_dict", None)
        if load is None:
            raise ConfigError(f"{type(self.source).__name__} has no load_state_dict()")
        self._state = None
        load(state_dict)

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the source, if it wants one."""
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)

    def close(self) -> None:
        """Stop reading ahead; the source stays its owner's. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def state_of(source: Any) -> dict[str, Any] | None:
    """Return the state of `source`, None if it keeps none."""
    take = getattr(source, "state_dict", None)
    return None if take is None else take()


def read_ahead(items: Iterable[Any], depth: int, make: Callable[[Any], T]) -> Iterator[T]:
    """Yield `make(item)` of each item, `depth` of them made before the first is delivered.

    An error of the source is raised at its own position, after what came before it.
    """
    iterator = iter(items)
    ahead: deque[T] = deque()
    end: Exception | None = None
    while True:
        while end is None and len(ahead) < depth:
            try:
                ahead.append(make(next(iterator)))
            except Exception as error:  # it surfaces at this position
                end = error
        if ahead:
            yield ahead.popleft()
        elif end is None or isinstance(end, StopIteration):
            return
        else:
            raise end
