"""When each bucket left and came back: spans for timelines and busy time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainpath.metrics import NULL_CLOCK, Span
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    import torch.distributed as dist

    from trainpath.metrics import StepClock

__all__ = ["Flights"]


class Flights:
    """The buckets of one backward that are or were in flight, in the order of launch.

    Completion is noticed at the next launch, or when the step thread waits: a callback in
    the communication thread would need the interpreter, and compete with backward for it.
    """

    __slots__ = ("_done_ns", "_launched_ns", "_works", "clock")

    def __init__(self, clock: StepClock = NULL_CLOCK) -> None:
        self.clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget them."""
        self._works: list[dist.Work] = []
        self._launched_ns: list[int] = []
        self._done_ns: list[int] = []

    def launched(self, work: dist.Work, started_ns: int) -> None:
        """Note that `work` was launched at `started_ns`."""
        self.poll()
        self._works.append(work)
        self._launched_ns.append(started_ns)

    def poll(self) -> None:
        """Note what has come back since the last call."""
        if self.clock is NULL_CLOCK:
            return
        done = self._done_ns
        while len(done) < len(self._works) and self._works[len(done)].is_completed():
            done.append(self.clock.now_ns())

    def land(self, step: int) -> None:
        """All have come back: give the clock a span for each and forget them."""
        self.poll()
        for number, (start, end) in enumerate(zip(self._launched_ns, self._done_ns, strict=False)):
            name = f"step {step} bucket {number}"
            self.clock.add_span(Span("gradients", S.COMM_TRANSFER, start, end, name))
        self.clear()
