"""The loop's side of a run: the loader that it iterates, and the run's own counters."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainpath.run import Run

__all__ = ["Progress", "RunLoader"]


class RunLoader:
    """The loader of a run: yields the source's batches and saves when a checkpoint is due."""

    def __init__(self, run: Run, source: Iterable[Any]) -> None:
        self._run = weakref.proxy(run)
        self.source = source
        self._in_pass = False

    def __iter__(self) -> Iterator[Any]:
        if self._in_pass:  # the last pass was given up: as in torch, this is a new epoch
            self._run.epoch += 1
            self._in_pass = False
        iterator = iter(self.source)
        while True:
            self._run.at_save_point()
            if self._run.should_stop:
                return
            try:
                batch = next(iterator)
            except StopIteration:
                break
            self._in_pass = True
            yield batch
        self._in_pass = False
        self._run.epoch += 1

    def resume(self) -> None:
        """After a restore: the next pass is what is left of the epoch, be it nothing."""
        self._in_pass = False
        source: Any = self.source
        if self.has_state and hasattr(source, "set_epoch"):
            source.set_epoch(source.state_dict().get("epoch", 0))

    @property
    def has_state(self) -> bool:
        """Whether the position can be saved; a plain iterable starts over after a restore."""
        try:
            self.source.state_dict()  # type: ignore[attr-defined]
        except (AttributeError, ConfigError):
            return False
        return True

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


class Progress:
    """The run's own counters, as a `Stateful`."""

    def __init__(self, run: Run) -> None:
        self._run = weakref.proxy(run)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._run.step, "epoch": self._run.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run.step = int(state_dict["step"])
        self._run.epoch = int(state_dict["epoch"])
