"""The stock torch DataLoader with stamps: it loads as ever, and says where time went."""

from __future__ import annotations

import copy
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch.utils.data as torch_data

from trainpath.errors import ConfigError, StateMismatchError
from trainpath.loader._torch import pinned, set_worker_info
from trainpath.metrics import segments as S
from trainpath.metrics.clock import NULL_CLOCK
from trainpath.metrics.lineage import StageRecorder, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from trainpath.metrics.clock import StepClock
    from trainpath.metrics.lineage import Stage

__all__ = ["ObservedLoader", "observed"]

_KEPT_BATCHES: Final = 4
_lane = threading.local()


def observed(loader: torch_data.DataLoader[Any], clock: StepClock | None = None) -> ObservedLoader:
    """Return `loader` with its dataset and collate function stamped.

    It is still torch's DataLoader that loads, with its samplers, workers and transport:
    same order, same bytes, same random draws.

    Args:
        loader: Any torch DataLoader; it is not changed.
        clock: Where waits are accounted; settable later.

    Raises:
        ConfigError: `loader` is not a torch DataLoader.
    """
    if not isinstance(loader, torch_data.DataLoader):
        raise ConfigError(f"observed() takes a torch DataLoader, not {type(loader).__name__}")
    return ObservedLoader(loader, clock if clock is not None else NULL_CLOCK)


class ObservedLoader:
    """A stamped torch DataLoader; see `observed`.

    The state is a number of batches: resuming reads and drops them, as stock scripts do.

    Cost:
        Two clock readings per sample and 100 bytes per batch on torch's queue.

    Guarantee:
        Batches are torch's own, bit by bit.
    """

    def __init__(self, loader: torch_data.DataLoader[Any], clock: StepClock) -> None:
        self._original = loader
        self._stamped = _stamp(loader)
        self._clock = clock
        self.clock = clock
        self._epoch = 0
        self._batches = 0
        self._skip = 0

    @property
    def clock(self) -> StepClock:
        """Where waits are accounted."""
        return self._clock

    @clock.setter
    def clock(self, clock: StepClock) -> None:
        self._clock = clock
        if clock is not NULL_CLOCK:
            for segment in S.DATA_SEGMENTS[1:]:
                clock.set_parallelism(segment, max(1, self._original.num_workers))

    def __getattr__(self, name: str) -> Any:
        """Give torch's attributes (dataset, sampler, batch_size, ...) of the original."""
        if name.startswith("__") or "_original" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._original, name)

    def __len__(self) -> int:
        return len(self._original)

    def __iter__(self) -> Iterator[Any]:
        iterator: Iterator[_Stamped] = iter(self._stamped)
        self._batches = 0
        skip, self._skip = self._skip, 0
        for _ in range(skip):
            if next(iterator, None) is None:
                break
            self._batches += 1
        produce = self._produce if self._original.num_workers else self._produce_inline
        return self._count(produce(iterator))

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch
        self._epoch += 1
        self._batches = 0

    def _produce_inline(self, iterator: Iterator[_Stamped]) -> Iterator[Any]:
        while True:
            clock = self._clock
            with recording(clock):
                before = clock.switch(S.DATA_QUEUE)
                _lane.recorder = clock
                try:
                    stamped = next(iterator, None)
                finally:
                    _lane.recorder = None
                    clock.switch(before)
            if stamped is None:
                return
            yield stamped.batch

    def _produce(self, iterator: Iterator[_Stamped]) -> Iterator[Any]:
        kept: dict[int, deque[list[Stage]]] = {}
        number = 0
        while True:
            clock = self._clock
            clock.ask()
            stages: list[Stage] = []
            try:
                stamped = next(iterator, None)
                if stamped is not None:
                    tail = kept.setdefault(stamped.worker, deque(maxlen=_KEPT_BATCHES))
                    tail.append(stamped.stages)
                    stages = [stage for part in tail for stage in part]
            finally:
                clock.got(stages)
            if stamped is None:
                return
            clock.add_stages(f"worker {stamped.worker}", stamped.stages, f"batch {number}")
            number += 1
            yield stamped.batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches delivered in this epoch."""
        return {"kind": "observed", "epoch": self._epoch, "batches": self._batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read and drop the delivered batches at the start of the next iteration.

        Raises:
            StateMismatchError: The state is of another kind of loader.
        """
        if state_dict.get("kind") != "observed":
            raise StateMismatchError(
                f"the loader state is of kind {state_dict.get('kind')!r}; a stock loader can only "
                "continue a state it saved itself: run with TRAINPATH_MODE=on to use this one"
            )
        self._epoch = state_dict["epoch"]
        self._skip = self._batches = state_dict["batches"]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler, if it wants one."""
        if hasattr(self._original.sampler, "set_epoch"):
            self._original.sampler.set_epoch(epoch)

    def close(self) -> None:
        """Let go of the workers; safe to call twice."""
        self._stamped.__dict__["_iterator"] = None


class _Stamped:
    """A batch with its lineage, as it travels through torch's queue."""

    __slots__ = ("batch", "stages", "worker")

    def __init__(self, batch: Any, stages: list[Stage], worker: int) -> None:
        self.batch = batch
        self.stages = stages
        self.worker = worker

    def pin_memory(self) -> _Stamped:
        """Pin what torch's pin thread would have pinned."""
        return _Stamped(pinned(self.batch), self.stages, self.worker)


def _stamp(loader: torch_data.DataLoader[Any]) -> torch_data.DataLoader[Any]:
    stamped = copy.copy(loader)
    is_stream = isinstance(loader.dataset, torch_data.IterableDataset)
    wrapper: Any = _StampedStream if is_stream else _StampedMap
    # Into __dict__: torch forbids to set these on an initialised loader.
    stamped.__dict__.update(
        dataset=wrapper(loader.dataset),
        collate_fn=_StampedCollate(loader.collate_fn),
        worker_init_fn=_WorkerInit(loader.worker_init_fn),
        _iterator=None,
    )
    return stamped


def _switch(segment: int) -> None:
    recorder = getattr(_lane, "recorder", None)
    if recorder is not None:
        recorder.switch(segment)


class _WorkerInit:
    """Starts recording in a worker and hides the wrapper from the user's code."""

    def __init__(self, init_fn: Callable[[int], None] | None) -> None:
        self._init_fn = init_fn

    def __call__(self, worker: int) -> None:
        info: Any = torch_data.get_worker_info()
        if info is not None:
            set_worker_info(info.id, info.num_workers, info.seed, info.dataset.dataset)
        _lane.recorder = StageRecorder()
        _lane.context = recording(_lane.recorder)  # kept: it ends with the worker
        _lane.context.__enter__()
        if self._init_fn is not None:
            self._init_fn(worker)


class _StampedMap(torch_data.Dataset[Any]):
    """A map-style dataset that says when it is at work."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        _switch(S.DATA_DECODE)
        return self.dataset[key]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or (name.startswith("__") and name != "__getitems__"):
            raise AttributeError(name)
        value = getattr(self.dataset, name)
        return _StampedCall(value) if name == "__getitems__" and value else value


class _StampedCall:
    def __init__(self, call: Callable[[Any], Any]) -> None:
        self._call = call

    def __call__(self, keys: Any) -> Any:
        _switch(S.DATA_DECODE)
        return self._call(keys)


class _StampedStream(torch_data.IterableDataset[Any]):
    """An iterable dataset that says when it is at work."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        iterator = iter(self.dataset)
        while True:
            _switch(S.DATA_DECODE)
            try:
                sample = next(iterator)
            except StopIteration:
                return
            yield sample

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)


class _StampedCollate:
    """Collates and packs the lineage beside the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate_fn = collate_fn

    def __call__(self, samples: Any) -> _Stamped:
        _switch(S.DATA_COLLATE)
        batch = self._collate_fn(samples)
        info = torch_data.get_worker_info()
        if info is None:
            return _Stamped(batch, [], -1)
        _switch(-1)
        return _Stamped(batch, _lane.recorder.take(), info.id)
