"""What `save()` returns: two milestones to wait for, and what the save cost."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainpath.errors import DeadlineError

if TYPE_CHECKING:
    from trainpath.errors import TrainpathError

__all__ = ["Milestone", "SaveHandle", "SaveStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStats:
    """What one save cost this rank; never read one of the times without the others.

    Attributes:
        step: The step saved.
        blocking_s: The training thread was held: capture, an earlier write, the fence.
        staged_s: From `save()` until every value was copied (0 if not yet).
        durable_s: From `save()` until the checkpoint was committed and synced (0 if not yet).
        bytes: What this rank wrote.
    """

    step: int
    blocking_s: float
    staged_s: float
    durable_s: float
    bytes: int


class Milestone:
    """A point that a save reaches in the background, or fails to reach."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._event = threading.Event()
        self._error: TrainpathError | None = None

    @property
    def done(self) -> bool:
        """Whether it is reached or has failed."""
        return self._event.is_set()

    def wait(self, timeout_s: float = 600.0) -> None:
        """Wait until it is reached.

        Raises:
            CheckpointWriteError: The save failed.
            DeadlineError: It is not reached after `timeout_s`.
        """
        if not self._event.wait(timeout_s):
            raise DeadlineError(
                f"{self._name} was not reached within {timeout_s:g} s; it is still being worked on"
            )
        if self._error is not None:
            raise self._error

    def settle(self, error: TrainpathError | None = None) -> None:
        """Mark it reached or, with an error, failed; the first call counts."""
        if not self._event.is_set():
            self._error = error
            self._event.set()


class SaveHandle:
    """One save on its way to disk.

    Attributes:
        step: The step saved.
        staged: Every value is copied; parameters may change from here on.
        durable: The checkpoint is committed on every rank's behalf and synced to disk.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.staged = Milestone(f"step {step} staged")
        self.durable = Milestone(f"step {step} durable")
        self.blocking_ns = 0
        self.staged_ns = 0
        self.durable_ns = 0
        self.num_bytes = 0

    @property
    def stats(self) -> SaveStats:
        """What the save has cost so far; final once `durable` is done."""
        return SaveStats(
            step=self.step,
            blocking_s=self.blocking_ns / 1e9,
            staged_s=self.staged_ns / 1e9,
            durable_s=self.durable_ns / 1e9,
            bytes=self.num_bytes,
        )
