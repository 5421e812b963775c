"""The worker side of the loader: what runs inside a worker process."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import signal
import threading
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainpath.loader._torch import ExceptionWrapper, caught, seed_worker, set_worker_info
from trainpath.loader.collate import MapFetcher, StreamFetcher, collate_into
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import Stage, StageRecorder, recording

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainpath.loader.order import StreamStart
    from trainpath.loader.transport import Channel

__all__ = [
    "BatchMessage",
    "IndexShard",
    "ShardMessage",
    "StartEpoch",
    "Task",
    "WorkerSpec",
    "run_worker",
]

_PR_SET_PDEATHSIG = 1


class StartEpoch(NamedTuple):
    """To a worker: a new pass begins; anything older is void.

    Attributes:
        epoch: Number of the pass within this loader's life.
        base_seed: Seed everything and run `worker_init_fn` again; None to leave both.
        start: Where an iterable dataset starts.
    """

    epoch: int
    base_seed: int | None
    start: StreamStart


class Task(NamedTuple):
    """To a worker: make batch `batch` from `index`."""

    epoch: int
    batch: int
    index: Any


class IndexShard(NamedTuple):
    """To a worker: fetch and index a shard ahead of need."""

    shard: int


class BatchMessage(NamedTuple):
    """From a worker: a batch, an `ExceptionWrapper`, or `END_OF_STREAM`."""

    epoch: int
    batch: int
    data: Any
    stages: list[Stage]
    state: dict[str, Any] | None


class ShardMessage(NamedTuple):
    """From a worker: how many samples a shard holds, or an `ExceptionWrapper`."""

    shard: int
    count: Any
    stages: list[Stage]


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Everything a worker needs to know; inherited by fork or pickled once per worker."""

    dataset: Any
    is_stream: bool
    batched: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    parent_pid: int
    die_with_parent: bool

    def fetcher(self, start: StreamStart) -> MapFetcher | StreamFetcher:
        """Return what makes the batches of one pass."""
        if not self.is_stream:
            return MapFetcher(self.dataset, batched=self.batched, collate_fn=self.collate_fn)
        return StreamFetcher(
            self.dataset,
            batched=self.batched,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
            start=start,
        )


def run_worker(worker: int, spec: WorkerSpec, channel: Channel, inherited: list[Channel]) -> None:
    """Serve tasks until told to stop or until the step process is gone."""
    for other in inherited:
        other.close()
    _become_worker(spec)
    spec = replace(spec, collate_fn=collate_into(spec.collate_fn, channel.shared))
    tasks: queue.SimpleQueue[StartEpoch | Task | None] = queue.SimpleQueue()
    intake = _Intake(channel, spec, tasks)
    threading.Thread(target=intake.run, name="trainpath-loader-intake", daemon=True).start()
    recorder = StageRecorder()
    fetcher: MapFetcher | StreamFetcher | ExceptionWrapper | None = None
    with recording(recorder), contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while (task := tasks.get()) is not None:
            if task.epoch != intake.epoch:
                continue
            if isinstance(task, StartEpoch):
                fetcher = _start(worker, spec, task)
            elif fetcher is not None:
                intake.reply(_make(worker, task, fetcher, recorder), recorder.switch)
                channel.shared.clear()
                recorder.switch(-1)


def _become_worker(spec: WorkerSpec) -> None:
    """Drop what a fork inherited and could hurt: signal handlers, threads, collections."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the step process decides about Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if spec.die_with_parent:
        _die_with_parent()
    gc.freeze()  # collections in the worker must not touch, and so copy, inherited pages
    torch.set_num_threads(1)


def _die_with_parent() -> None:
    import ctypes  # noqa: PLC0415  (only worker processes need it)

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _start(
    worker: int, spec: WorkerSpec, task: StartEpoch
) -> MapFetcher | StreamFetcher | ExceptionWrapper:
    try:
        if task.base_seed is not None:
            seed = seed_worker(worker, task.base_seed)
            set_worker_info(worker, spec.num_workers, seed, spec.dataset)
            if spec.worker_init_fn is not None:
                spec.worker_init_fn(worker)
        return spec.fetcher(task.start)
    except Exception:
        return caught(f"in DataLoader worker process {worker}")


def _make(
    worker: int,
    task: Task,
    fetcher: MapFetcher | StreamFetcher | ExceptionWrapper,
    recorder: StageRecorder,
) -> BatchMessage:
    data: Any = fetcher
    state = None
    if not isinstance(fetcher, ExceptionWrapper):
        try:
            data = fetcher.fetch(task.index, recorder.switch)
            state = fetcher.state()
        except Exception:
            data = caught(f"in DataLoader worker process {worker}")
    recorder.switch(S.DATA_TRANSPORT)
    return BatchMessage(task.epoch, task.batch, data, recorder.take(), state)


class _Intake:
    """Receives messages at once, so that neither side can block the other for ever.

    Also notices that the step process is gone, even while a batch is being made, and hands
    shards to be indexed to a thread of their own, so that a slow download does not hold up
    batches from shards that are there.
    """

    def __init__(
        self,
        channel: Channel,
        spec: WorkerSpec,
        tasks: queue.SimpleQueue[StartEpoch | Task | None],
    ) -> None:
        self.epoch = -1
        self._channel = channel
        self._spec = spec
        self._tasks = tasks
        self._sending = threading.Lock()
        self._shards: queue.SimpleQueue[int] | None = None

    def run(self) -> None:
        """Receive until the channel closes: then finish the batch at hand and leave."""
        try:
            self._receive()
        finally:  # also after a message that cannot be read: this worker's death tells
            self.epoch = -1
            self._tasks.put(None)

    def _receive(self) -> None:
        sources: list[Any] = [self._channel]
        parent = _open_process(self._spec.parent_pid)
        if parent is not None:
            sources.append(parent)
        while True:
            if parent in connection.wait(sources):
                os._exit(1)  # the step process is gone: nobody reads what we make
            try:
                message = self._channel.recv()
            except EOFError:
                return
            if isinstance(message, IndexShard):
                self._index(message.shard)
                continue
            if isinstance(message, StartEpoch):
                self.epoch = message.epoch
            self._tasks.put(message)

    def reply(
        self, message: BatchMessage | ShardMessage, switch: Callable[[int], int] | None = None
    ) -> None:
        """Send a result; one that cannot be pickled becomes the error that says so."""
        with self._sending:
            try:
                self._channel.send(message)
            except OSError:
                raise
            except Exception:
                if switch is not None:
                    switch(S.DATA_TRANSPORT)
                failure = caught("while sending from a DataLoader worker process")
                if isinstance(message, BatchMessage):
                    self._channel.send(message._replace(data=_portable(failure), state=None))
                else:
                    self._channel.send(message._replace(count=_portable(failure)))

    def _index(self, shard: int) -> None:
        if self._shards is None:
            self._shards = queue.SimpleQueue()
            threading.Thread(
                target=self._index_shards, name="trainpath-loader-shards", daemon=True
            ).start()
        self._shards.put(shard)

    def _index_shards(self) -> None:
        recorder = StageRecorder()
        shards = self._shards
        while shards is not None:
            shard = shards.get()
            with recording(recorder):
                recorder.switch(S.DATA_STORAGE)
                try:
                    count: Any = self._spec.dataset.count(shard)
                except Exception:
                    count = caught("in a DataLoader worker process")
                recorder.switch(-1)
            with contextlib.suppress(OSError):
                self.reply(ShardMessage(shard, count, recorder.take()))


def _portable(failure: ExceptionWrapper) -> ExceptionWrapper:
    """Keep the message of an exception whose own type may not be importable."""
    failure.exc_type = RuntimeError
    return failure


def _open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process ends, if there are such."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except (OSError, AttributeError):
        return None
