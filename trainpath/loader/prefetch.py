"""Prefetching any iterable of batches with one bounded thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch

from trainpath.errors import ClosedError, ConfigError, DeadlineError
from trainpath.metrics import segments as S
from trainpath.metrics.clock import NULL_CLOCK
from trainpath.metrics.lineage import StageRecorder, recording
from trainpath.overlap import DevicePrefetcher
from trainpath.overlap.ahead import ReadAhead, state_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainpath.metrics.clock import StepClock
    from trainpath.metrics.lineage import Stage

__all__ = ["Prefetcher", "prefetch"]

_LONGEST_WAIT_S: Final = 1800.0
_JOIN_S: Final = 5.0
_KEPT_ITEMS: Final = 4


def prefetch(
    iterable: Iterable[Any],
    depth: int = 2,
    *,
    device: torch.device | str | None = None,
    clock: StepClock | None = None,
) -> Prefetcher | DevicePrefetcher:
    """Return an iterable of the same batches, made ahead by one thread.

    Args:
        iterable: Any iterable. If it has `state_dict`, so has the result: the state is
            that of the last batch delivered, not of the last one made.
        depth: Batches that may wait for the consumer; 0 only accounts, without a thread.
        device: Also copy them there ahead (`trainpath.overlap.DevicePrefetcher`).
        clock: Where waits are accounted.

    Raises:
        ConfigError: `depth` is negative.

    Cost:
        One thread while iterating, `depth` batches of memory. The thread shares the
        interpreter lock with the step: for decoding in Python use workers.

    Guarantee:
        Same batches, same order; an error is raised at the position where it happened.
    """
    host = Prefetcher(iterable, depth, clock=clock)
    if device is None or torch.device(device).type == "cpu":
        return host
    return _OnDevice(host, device, depth=max(1, depth), clock=clock)


class _OnDevice(DevicePrefetcher):
    """A device prefetcher whose clock is the one of its prefetching source."""

    @property
    def clock(self) -> StepClock:
        """Where waits are accounted."""
        return self.source.clock  # type: ignore[attr-defined,no-any-return]

    @clock.setter
    def clock(self, clock: StepClock) -> None:
        self.source.clock = clock  # type: ignore[attr-defined]


class Prefetcher(ReadAhead):
    """An iterable whose items are made ahead by a thread; see `prefetch`."""

    def __init__(
        self, source: Iterable[Any], depth: int = 2, *, clock: StepClock | None = None
    ) -> None:
        if depth < 0:
            raise ConfigError(f"depth must be at least 0, got {depth}")
        super().__init__(source)
        self.clock = clock if clock is not None else NULL_CLOCK
        self._depth = depth
        self._producer: _Producer | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise ClosedError("this prefetcher was closed; make a new one")
        self._stop()
        if not self._depth:
            return self._inline(iter(self.source))
        self._state = state_of(self.source)
        # The first item is made here: samplers draw from the global generator when they
        # begin, which a thread would do at a random moment of the step.
        producer = _Producer(self.source, self._depth)
        self._producer = producer
        return self._iterate(producer)

    def _inline(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            clock = self.clock
            with recording(clock):
                before = clock.switch(S.DATA_DECODE)
                try:
                    value = next(iterator)
                except StopIteration:
                    return
                finally:
                    clock.switch(before)
            yield value

    def _iterate(self, producer: _Producer) -> Iterator[Any]:
        try:
            yield from self._items(producer)
        finally:
            producer.end()  # also when the consumer breaks off and drops this iterator

    def _items(self, producer: _Producer) -> Iterator[Any]:
        kept: deque[list[Stage]] = deque(maxlen=_KEPT_ITEMS)
        number = 0
        while True:
            clock = self.clock
            clock.ask()
            stages: list[Stage] = []
            try:
                item = producer.get()
                kept.append(item.stages)
                stages = [stage for part in kept for stage in part]
            finally:
                clock.got(stages)
            clock.add_stages("prefetch", item.stages, f"batch {number}")
            if item.error is not None:
                self._state = None
                if isinstance(item.error, StopIteration):
                    return
                raise item.error
            self._state = item.state
            number += 1
            yield item.value

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration continue from `state_dict`.

        Raises:
            ConfigError: The source has no `load_state_dict`.
        """
        self._stop()
        super().load_state_dict(state_dict)

    def _stop(self) -> None:
        self._state = None
        if self._producer is not None:
            self._producer.stop()
            self._producer = None

    def close(self) -> None:
        """Stop the thread; the source stays its owner's. Safe to call twice."""
        self._closed = True
        self._stop()


class _Item:
    """What one `next` of the source gave: a value or an error, and how it was made."""

    __slots__ = ("error", "stages", "state", "value")

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self.state: dict[str, Any] | None = None
        self.stages: list[Stage] = []


class _Producer:
    """Calls `next` on one iterator ahead of its consumer."""

    def __init__(self, source: Iterable[Any], depth: int) -> None:
        self._source = source
        self._iterator = iter(source)
        self._depth = depth
        self._items: deque[_Item] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def get(self) -> _Item:
        """Return the next item: made here the first time, by the thread afterwards."""
        if self._thread is None:
            item = self._make()
            if item.error is None:
                self._thread = threading.Thread(
                    target=self._run, name="trainpath-prefetch", daemon=True
                )
                self._thread.start()
            return item
        deadline = time.monotonic() + _LONGEST_WAIT_S
        with self._changed:
            while not self._items:
                if self._stopped:
                    raise ClosedError("the prefetcher was closed or iterated anew")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(
                        f"{type(self._source).__name__} gave no batch within "
                        f"{_LONGEST_WAIT_S:.0f} s; look at what it waits for"
                    )
            item = self._items.popleft()
            if item.error is not None:
                self._stopped = True
            self._changed.notify_all()
            return item

    def _make(self) -> _Item:
        item = _Item()
        recorder = StageRecorder()
        with recording(recorder):
            recorder.switch(S.DATA_DECODE)
            try:
                item.value = next(self._iterator)
                item.state = state_of(self._source)
            except BaseException as error:  # it surfaces at this position
                item.error = error
            recorder.switch(-1)
        item.stages = recorder.take()
        return item

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or len(self._items) < self._depth)
                if self._stopped:
                    return
            item = self._make()
            with self._changed:
                self._items.append(item)
                self._changed.notify_all()
            if item.error is not None:
                return

    def end(self) -> None:
        """Tell the thread to end; what it made ahead is dropped."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self.end()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
