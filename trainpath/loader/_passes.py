"""One pass over the data: inline in the step thread, or through the worker pool."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from trainpath.errors import DeadlineError, WorkerDiedError
from trainpath.loader._torch import ExceptionWrapper, reraise
from trainpath.loader._worker import BatchMessage, IndexShard, ShardMessage, StartEpoch, Task
from trainpath.loader.collate import END_OF_STREAM
from trainpath.loader.order import Plan, Planned, StreamStart
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import recording

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainpath.loader._worker import WorkerSpec
    from trainpath.loader.collate import MapFetcher, StreamFetcher
    from trainpath.loader.sources import ShardedSource
    from trainpath.loader.workers import WorkerPool
    from trainpath.metrics.clock import StepClock
    from trainpath.metrics.lineage import Stage

__all__ = ["InlinePass", "LoaderStats", "PassSettings", "StreamPosition", "WorkerPass"]

# torch waits for ever where no timeout is given; a batch that takes longer than this hangs.
_LONGEST_WAIT_S: Final = 1800.0
# Stages kept per worker: those of a batch and of what the worker did just before it.
_KEPT_MESSAGES: Final = 4


@dataclass(slots=True)
class LoaderStats:
    """Counts over the life of a loader.

    Attributes:
        num_batches: Batches delivered.
        num_respawned: Workers that died and were replaced.
        num_reissued: Batches that were lost with a worker and made again.
        num_repeated: Samples given twice so that every rank had one in the last batch.
        num_pools: Times that workers were started.
    """

    num_batches: int = 0
    num_respawned: int = 0
    num_reissued: int = 0
    num_repeated: int = 0
    num_pools: int = 0


@dataclass(slots=True)
class StreamPosition:
    """How far the workers' copies of an iterable dataset were delivered.

    Attributes:
        counts: Batches delivered per worker.
        turn: Worker whose batch is due next.
        states: The dataset's own states per worker, where it keeps one.
    """

    counts: list[int]
    turn: int = 0
    states: list[dict[str, Any] | None] = field(default_factory=list)

    def start_of(self, worker: int, batch_size: int | None) -> StreamStart:
        """Return where the copy of `worker` starts."""
        state = self.states[worker] if self.states else None
        return StreamStart(self.counts[worker] * (batch_size or 1), state)

    def delivered(self, worker: int, state: dict[str, Any] | None) -> None:
        """Count a batch of `worker`."""
        self.counts[worker] += 1
        self.turn = (worker + 1) % len(self.counts)
        if state is not None:
            self.states = self.states or [None] * len(self.counts)
            self.states[worker] = state


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """What a pass needs to know of its loader."""

    spec: WorkerSpec
    batch_size: int | None
    prefetch_factor: int
    in_order: bool
    timeout_s: float
    max_respawns: int
    rank: int
    epoch: int
    base_seed: int
    stats: LoaderStats
    clock: Callable[[], StepClock]
    source: ShardedSource | None


class InlinePass:
    """Makes each batch in the step thread, when it is asked for."""

    def __init__(
        self, plan: Plan, settings: PassSettings, position: Any, stream: StreamPosition | None
    ) -> None:
        self.plan = plan
        self._settings = settings
        self.position = position
        self.stream = stream
        self.num_delivered = 0
        self._fetcher: MapFetcher | StreamFetcher | None = None

    def next(self) -> Any:
        """Return the next batch or raise StopIteration."""
        settings = self._settings
        clock = settings.clock()
        with recording(clock):
            before = clock.switch(S.DATA_QUEUE)
            try:
                planned = self._planned(clock)
                fetcher = self._fetcher or self._start(clock)
                data = fetcher.fetch(planned.index, clock.switch)
            finally:
                clock.switch(before)
        if data is END_OF_STREAM:
            raise StopIteration
        self.num_delivered += 1
        settings.stats.num_batches += 1
        self.position = planned.after
        if self.stream is not None:
            self.stream.delivered(0, fetcher.state())
        return data

    def _start(self, clock: StepClock) -> MapFetcher | StreamFetcher:
        settings = self._settings
        start = StreamStart()
        if self.stream is not None:
            start = self.stream.start_of(0, settings.batch_size)
        clock.switch(S.DATA_DECODE)
        self._fetcher = settings.spec.fetcher(start)
        return self._fetcher

    def _planned(self, clock: StepClock) -> Planned:
        source = self._settings.source
        if source is not None:
            while blocked := self.plan.blocked_on():
                clock.switch(S.DATA_STORAGE)
                for shard in blocked:
                    source.count(shard)
                clock.switch(S.DATA_QUEUE)
        return next(self.plan)

    def close(self) -> None:
        """Forget the dataset's iterator."""
        self._fetcher = None


class _Slot:
    """A batch that was given to a worker and not delivered yet."""

    __slots__ = ("message", "planned", "worker")

    def __init__(self, worker: int, planned: Planned) -> None:
        self.worker = worker
        self.planned = planned
        self.message: BatchMessage | None = None


class WorkerPass:
    """Keeps the workers busy and hands their batches out, in torch's order.

    Batch i goes to worker i modulo the number of workers, as in torch, so that each
    worker draws the same random numbers for the same batches.
    """

    def __init__(
        self,
        plan: Plan,
        settings: PassSettings,
        position: Any,
        stream: StreamPosition | None,
        *,
        pool: WorkerPool,
        number: int,
        fresh_seed: bool,
    ) -> None:
        self.plan = plan
        self._settings = settings
        self.pool = pool
        self._number = number
        self.position = position
        self.stream = stream
        self.num_delivered = 0
        num_workers = settings.spec.num_workers
        self._num_workers = num_workers
        self._max_pending = settings.prefetch_factor * num_workers
        self._pending: dict[int, _Slot] = {}
        self._arrived: deque[int] = deque()
        self._loads = [0] * num_workers
        self._active = [True] * num_workers
        self._turn = stream.turn if stream is not None else 0
        self._sent = 0
        self._due = 0
        self._exhausted = False
        self._respawned = 0
        self._shard_owner: dict[int, int] = {}
        self._shard_failures: dict[int, ExceptionWrapper] = {}
        self._shard_turn = 0
        self._waited = False
        self._shard_stages: list[Stage] = []
        self._stages: list[deque[list[Stage]]] = [
            deque(maxlen=_KEPT_MESSAGES) for _ in range(num_workers)
        ]
        for worker in range(num_workers):
            self._start_worker(worker, fresh_seed=fresh_seed)
        self._fill()

    def _start_worker(self, worker: int, *, fresh_seed: bool) -> None:
        settings = self._settings
        start = StreamStart()
        if self.stream is not None:
            start = self.stream.start_of(worker, settings.batch_size)
        seed = settings.base_seed if fresh_seed else None
        self.pool.send(worker, StartEpoch(self._number, seed, start))

    def next(self) -> Any:
        """Return the next batch or raise StopIteration."""
        clock = self._settings.clock()
        clock.ask()
        stages: list[Stage] = []
        self._shard_stages.clear()
        self._waited = False
        try:
            slot = self._wait()
            if self._waited:
                stages = self._lineage(slot.worker)
        finally:
            clock.got(stages)
        self._fill()
        message = slot.message
        if message is None:
            raise StopIteration
        if isinstance(message.data, ExceptionWrapper):
            reraise(message.data)
        self._count(slot, message)
        return message.data

    def _wait(self) -> _Slot:
        """Wait for the batch that is due."""
        timeout_s = self._settings.timeout_s or _LONGEST_WAIT_S
        deadline = time.monotonic() + timeout_s
        while True:
            number = self._next_number()
            if number is not None and self._pending[number].message is not None:
                return self._deliver(number)
            if number is None and (self._exhausted or not any(self._active)):
                raise StopIteration
            if number is None:
                self._raise_shard_failure()
            self._waited = True
            received = False
            for worker, message in self.pool.wait(max(0.0, deadline - time.monotonic())):
                received = True
                self._take(worker, message)
            if not received:
                raise DeadlineError(self._late(number, timeout_s))

    def _late(self, number: int | None, timeout_s: float) -> str:
        settings = self._settings
        what = "the sample counts of the next shard"
        if number is not None:
            what = f"batch {number} from worker {self._pending[number].worker}"
        return (
            f"rank {settings.rank}: DataLoader timed out after {timeout_s:g} s waiting for {what} "
            f"(epoch {settings.epoch}); raise timeout= or look at what the dataset waits for"
        )

    def _next_number(self) -> int | None:
        """Return the number of the batch to hand out next, None if none was asked for."""
        if not self._settings.in_order:
            while self._arrived and self._arrived[0] not in self._pending:
                self._arrived.popleft()
            return self._arrived[0] if self._arrived else next(iter(self._pending), None)
        while self._due < self._sent:
            slot = self._pending.get(self._due)
            if slot is not None:
                if slot.message is not None or self._active[slot.worker]:
                    return self._due
                del self._pending[self._due]
            self._due += 1
        return None

    def _deliver(self, number: int) -> _Slot:
        slot = self._pending.pop(number)
        if self._settings.in_order:
            self._due = number + 1
        return slot

    def _count(self, slot: _Slot, message: BatchMessage) -> None:
        self.num_delivered += 1
        self._settings.stats.num_batches += 1
        self.position = slot.planned.after
        if self.stream is not None:
            self.stream.delivered(slot.worker, message.state)

    def _fill(self) -> None:
        """Ask for batches up to the prefetch bound, and for the shards that come next."""
        self._ask_for_batches()
        for shard in self.plan.wanted():
            worker = self._shard_turn % self._num_workers
            self._shard_turn += 1
            self._shard_owner[shard] = worker
            self.pool.send(worker, IndexShard(shard))

    def _ask_for_batches(self) -> None:
        while len(self._pending) < self._max_pending and not self._exhausted:
            if not any(self._active) or not self.plan.ready():
                return
            try:
                planned = next(self.plan)
            except StopIteration:
                self._exhausted = True
                return
            worker = self._pick()
            self._pending[self._sent] = _Slot(worker, planned)
            self._loads[worker] += 1
            self.pool.send(worker, Task(self._number, self._sent, planned.index))
            self._sent += 1

    def _pick(self) -> int:
        if not self._settings.in_order:
            active = [worker for worker in range(self._num_workers) if self._active[worker]]
            return min(active, key=self._loads.__getitem__)
        while not self._active[self._turn]:
            self._turn = (self._turn + 1) % self._num_workers
        worker = self._turn
        self._turn = (worker + 1) % self._num_workers
        return worker

    def _take(self, worker: int, message: Any) -> None:
        if message is None:
            self._replace(worker)
        elif isinstance(message, ShardMessage):
            self._take_shard(message)
        elif message.epoch == self._number:
            self._take_batch(worker, message)

    def _take_batch(self, worker: int, message: BatchMessage) -> None:
        self._record(worker, message)
        slot = self._pending.get(message.batch)
        if slot is None:
            return
        self._loads[worker] -= 1
        if message.data is not END_OF_STREAM:
            slot.message = message
            self._arrived.append(message.batch)
            return
        self._active[worker] = False
        for number in [n for n, s in self._pending.items() if s.worker == worker]:
            if self._pending[number].message is None:
                del self._pending[number]
        self._fill()

    def _take_shard(self, message: ShardMessage) -> None:
        self._shard_owner.pop(message.shard, None)
        self._shard_stages += message.stages
        source = self._settings.source
        if isinstance(message.count, ExceptionWrapper):
            self._shard_failures[message.shard] = message.count
        elif source is not None:
            source.learn(message.shard, message.count)
        self._fill()

    def _raise_shard_failure(self) -> None:
        for shard in self.plan.blocked_on():
            if shard in self._shard_failures:
                reraise(self._shard_failures[shard])

    def _record(self, worker: int, message: BatchMessage) -> None:
        self._stages[worker].append(message.stages)
        self._settings.clock().add_stages(
            f"worker {worker}", message.stages, f"batch {message.batch}"
        )

    def _lineage(self, worker: int) -> list[Stage]:
        """Return what the worker did lately; where it idled, the shard that was waited for."""
        stages = [stage for message in self._stages[worker] for stage in message]
        for segment, start, end in self._shard_stages:
            stages += [(segment, *gap) for gap in _gaps(start, end, stages)]
        return sorted(stages, key=lambda stage: stage[1])

    def _replace(self, worker: int) -> None:
        """Replace a dead worker and make its lost batches again, or raise."""
        settings = self._settings
        pid, how = self.pool.exit_of(worker)
        lost = [
            number
            for number, slot in self._pending.items()
            if slot.worker == worker and slot.message is None
        ]
        died = (
            f"rank {settings.rank}: DataLoader worker {worker} (pid {pid}) {how} while it had "
            + (f"batch {lost[0]} of epoch {settings.epoch} to make" if lost else "nothing to do")
        )
        if self.stream is not None and self._active[worker]:
            self.pool.close()
            raise WorkerDiedError(
                f"{died}; the position of an iterable dataset is lost with its worker, so it "
                "cannot be replaced: restore the last checkpoint (a map-style dataset would go on)"
            )
        if self._respawned >= settings.max_respawns:
            self.pool.close()
            raise WorkerDiedError(
                f"{died}; {self._respawned} were replaced in this epoch already: look for what "
                "kills them (memory, a crash in native code) or raise max_respawns="
            )
        self._respawned += 1
        settings.stats.num_respawned += 1
        self.pool.respawn(worker)
        self._start_worker(worker, fresh_seed=True)
        for number in lost:
            settings.stats.num_reissued += 1
            index = self._pending[number].planned.index
            self.pool.send(worker, Task(self._number, number, index))
        orphans = [shard for shard, owner in self._shard_owner.items() if owner == worker]
        self.plan.forget_asked(orphans)
        self._fill()

    def close(self) -> None:
        """Let go of the batches that were not delivered."""
        self._pending.clear()


def _gaps(start: int, end: int, stages: list[Stage]) -> list[tuple[int, int]]:
    """Return the parts of `[start, end]` that no stage covers."""
    gaps = []
    for _, begin, finish in sorted(stages, key=lambda stage: stage[1]):
        if begin > start:
            gaps.append((start, min(begin, end)))
        start = max(start, finish)
        if start >= end:
            return gaps
    gaps.append((start, end))
    return [gap for gap in gaps if gap[1] > gap[0]]
