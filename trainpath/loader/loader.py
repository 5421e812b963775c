"""`DataLoader`: torch's loader by signature, order and bytes, with a position."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import data as torch_data

from trainpath.errors import ClosedError, ConfigError
from trainpath.loader._iterator import LoaderIterator, ShardSampler
from trainpath.loader._passes import InlinePass, LoaderStats, PassSettings, WorkerPass
from trainpath.loader._planning import Planner
from trainpath.loader._torch import pinned
from trainpath.loader._worker import WorkerSpec
from trainpath.loader.order import ShardOrder, ShardPlan, num_batches
from trainpath.loader.sources import ShardedSource
from trainpath.loader.workers import WorkerPool, start_context
from trainpath.metrics import segments as S
from trainpath.metrics.clock import NULL_CLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from trainpath.loader._iterator import RunningPass
    from trainpath.metrics.clock import StepClock

__all__ = ["DataLoader"]


class DataLoader:
    """torch's `DataLoader` with a position, workers that may die, and lineage.

    The same arguments give the same batches, in the same order, with the same random
    numbers drawn in the step process and in the workers. On top:

    - `state_dict()` counts delivered batches, also inside the loop body. For a
      `TarDataset` and for torch's `DistributedSampler` it is one global cursor: any number
      of ranks, workers and samples per batch continues at the very next sample. A state
      taken at the end of an epoch starts the next one.
    - A `TarDataset` needs no sampler: it is dealt over the ranks here, with the same
      number of batches on each.
    - A worker that is killed is replaced and only its lost batches are made again.

    Args:
        dataset: As torch's, and so on to `in_order`.
        batch_size: Samples per batch (of this rank).
        shuffle: Reshuffle at every epoch.
        sampler: Order of the samples.
        batch_sampler: Order of the batches.
        num_workers: Worker processes; 0 makes batches in the step thread.
        collate_fn: Makes a batch of samples.
        pin_memory: Copy batches to page-locked memory where there is an accelerator.
        drop_last: Drop the last incomplete batch.
        timeout: Longest wait for a batch in seconds; 0 means half an hour here.
        worker_init_fn: Called in each worker, with its number, after seeding.
        multiprocessing_context: How to start workers; None decides as `start_context` says.
        generator: For the order and the workers' base seed.
        prefetch_factor: Batches each worker makes ahead.
        persistent_workers: Keep workers, and their copies of the dataset, over epochs.
        pin_memory_device: Ignored, as in torch.
        in_order: Whether batches come in order; without it there is no position.
        seed: Seed of the order of a `TarDataset` (0 if None).
        rank: This rank; default from the sampler or the process group.
        world_size: Number of ranks; default likewise.
        clock: Where waits are accounted; settable later.
        max_respawns: Dead workers replaced per epoch before `WorkerDiedError`.

    Raises:
        ConfigError: The arguments contradict each other (a ValueError, as in torch).

    Cost:
        `num_workers` processes; at most `prefetch_factor * num_workers` batches in memory
        beside those the caller holds; no thread in the step process. Workers of a
        `TarDataset` are kept over epochs; other datasets get new ones each epoch unless
        `persistent_workers`, as in torch, so that they see what was changed on them.

    Guarantee:
        After a resume the next batch is the first one that was not delivered. Random
        numbers that a map-style dataset draws in workers are torch's until a worker is
        replaced or the run is resumed; the order and the samples never change.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        clock: StepClock | None = None,
        max_respawns: int = 4,
    ) -> None:
        planned = isinstance(dataset, ShardedSource) and sampler is None and batch_sampler is None
        order = None
        if planned:
            order = ShardOrder(
                num_shards=dataset.num_shards,
                seed=seed or 0,
                shuffle=bool(shuffle),
                window=dataset.shuffle_window,
            )
            sampler, shuffle = ShardSampler(order, self.set_epoch), None
        try:
            template: Any = torch_data.DataLoader(
                dataset,
                batch_size,
                shuffle,
                sampler,
                batch_sampler,
                num_workers,
                collate_fn,
                pin_memory,
                drop_last,
                timeout,
                worker_init_fn,
                multiprocessing_context,
                generator,
                prefetch_factor=prefetch_factor,
                persistent_workers=persistent_workers,
                pin_memory_device=pin_memory_device,
                in_order=in_order,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self._adopt(template, order, rank=rank, world_size=world_size, clock=clock)
        self._max_respawns = max_respawns

    @classmethod
    def from_torch(
        cls, loader: torch_data.DataLoader[Any], *, clock: StepClock | None = None
    ) -> DataLoader:
        """Return a loader over the very objects of a torch `DataLoader`.

        Same dataset, samplers, generator and functions, so the same batches, the same
        draws from the global generator and the same losses.

        Raises:
            ConfigError: The loader is of a subclass that makes its batches another way.
        """
        if type(loader).__iter__ is not torch_data.DataLoader.__iter__:
            raise ConfigError(
                f"{type(loader).__name__} overrides DataLoader.__iter__, which re-hosting would "
                "lose; use trainpath.loader.prefetch(loader) instead"
            )
        self = cls.__new__(cls)
        self._adopt(loader, None, rank=None, world_size=None, clock=clock)
        return self

    def _adopt(
        self,
        template: Any,
        order: ShardOrder | None,
        *,
        rank: int | None,
        world_size: int | None,
        clock: StepClock | None,
    ) -> None:
        if isinstance(template.dataset, (torch_data.IterDataPipe, torch_data.MapDataPipe)):
            raise ConfigError(
                "torch DataPipes are shuffled and sharded by torch's own DataLoader only; keep it "
                "and wrap it in trainpath.loader.prefetch"
            )
        if template.num_workers and template.prefetch_factor < 1:
            raise ConfigError("prefetch_factor must be at least 1 with workers")
        self.dataset = template.dataset
        self.batch_size = template.batch_size
        self.num_workers = template.num_workers
        self.prefetch_factor = template.prefetch_factor
        self.pin_memory = template.pin_memory
        self.pin_memory_device = template.pin_memory_device
        self.drop_last = template.drop_last
        self.timeout = template.timeout
        self.sampler = template.sampler
        self.batch_sampler = template.batch_sampler if order is None else None
        self.generator = template.generator
        self.collate_fn = template.collate_fn
        self.worker_init_fn = template.worker_init_fn
        self.multiprocessing_context = template.multiprocessing_context
        self.persistent_workers = template.persistent_workers
        self.in_order = template.in_order
        self._template = template
        self._planner = Planner(template, order, rank=rank, world_size=world_size)
        self._max_respawns = 4
        self._stats = LoaderStats()
        self._pool: WorkerPool | None = None
        self._passes = itertools.count()
        self._resume: dict[str, Any] | None = None
        self._epoch_named = False
        self._current: LoaderIterator | None = None
        self._closed = False
        self._clock: StepClock = NULL_CLOCK
        self.clock = clock if clock is not None else NULL_CLOCK

    @property
    def clock(self) -> StepClock:
        """Where waits for batches are accounted."""
        return self._clock

    @clock.setter
    def clock(self, clock: StepClock) -> None:
        self._clock = clock
        if clock is not NULL_CLOCK:
            for segment in S.DATA_SEGMENTS[1:]:  # the queue is no work of the workers
                clock.set_parallelism(segment, max(1, self.num_workers))

    @property
    def kind(self) -> str:
        """What the position of this loader counts."""
        return self._planner.kind

    @property
    def _auto_collation(self) -> bool:
        return self.batch_size is not None or self.batch_sampler is not None

    def __len__(self) -> int:
        if self._planner.source is None:
            return len(self._template)
        return num_batches(
            len(self.dataset),
            batch_size=self.batch_size,
            world_size=self._planner.world()[1],
            drop_last=self.drop_last,
        )

    def __iter__(self) -> Iterator[Any]:
        if self._closed:
            raise ClosedError("this DataLoader was closed; make a new one")
        if self._current is not None:
            self._abandon(self._current)
        resume, self._resume = self._resume, None
        # Who names the epoch gets what is left of it, be it nothing; who does not gets the
        # next one where nothing is left.
        goes_on = resume is not None and not (
            self._epoch_named or self._planner.indices.epoch_named
        )
        self._epoch_named = False
        self._current = LoaderIterator(self, self._begin(resume), goes_on=goes_on)
        return self._current

    def _abandon(self, iterator: LoaderIterator) -> None:
        """A pass is given up before its end: as in torch, the next one is a new epoch."""
        if iterator.running is not None and iterator.running.num_delivered:
            self._planner.epoch += 1
        if self._keeps_workers:
            self._release_current()  # its workers serve the next pass
        self._current = None

    def _begin(self, resume: dict[str, Any] | None) -> RunningPass:
        """Start a pass."""
        plan, position, stream = self._planner.begin(resume)
        settings = PassSettings(
            spec=self._spec(),
            batch_size=self.batch_size,
            prefetch_factor=self.prefetch_factor or 1,
            in_order=self.in_order,
            timeout_s=float(self.timeout),
            max_respawns=self._max_respawns,
            rank=self._planner.world()[0],
            epoch=self._planner.epoch,
            base_seed=self._planner.base_seed or 0,
            stats=self._stats,
            clock=lambda: self._clock,
            source=self._planner.source,
        )
        if not self.num_workers:
            return InlinePass(plan, settings, position, stream)
        pool, started = self._workers(settings.spec)
        return WorkerPass(
            plan,
            settings,
            position,
            stream,
            pool=pool,
            number=next(self._passes),
            fresh_seed=started or not self.persistent_workers,
        )

    def _spec(self) -> WorkerSpec:
        return WorkerSpec(
            dataset=self.dataset,
            is_stream=self._planner.is_stream,
            batched=self._auto_collation,
            collate_fn=self.collate_fn,
            drop_last=self.drop_last,
            worker_init_fn=self.worker_init_fn,
            num_workers=self.num_workers,
            parent_pid=os.getpid(),
            # The signal comes when the starting *thread* ends: only the main thread's means
            # that the process did.
            die_with_parent=threading.current_thread() is threading.main_thread(),
        )

    @property
    def _keeps_workers(self) -> bool:
        return self.persistent_workers or self._planner.source is not None

    def _workers(self, spec: WorkerSpec) -> tuple[WorkerPool, bool]:
        """Return the worker pool and whether it was started just now."""
        if self._pool is not None and self._keeps_workers and not self._pool.closed:
            return self._pool, False
        if self._pool is not None and self._keeps_workers:
            self._pool.close()
        self._stats.num_pools += 1
        pool = WorkerPool(spec, start_context(spec, self.multiprocessing_context))
        self._pool = pool
        return pool, True

    def finish(self, iterator: LoaderIterator, running: RunningPass) -> None:
        """Note that a pass reached its end: the position is the start of the next epoch."""
        if self._current is iterator:
            self._planner.epoch += 1
            self._current = None
        self._release(running)

    def go_on(self, iterator: LoaderIterator, running: RunningPass) -> RunningPass:
        """Start the next epoch: the state that was loaded is the end of this one."""
        self.finish(iterator, running)
        self._current = iterator
        return self._begin(None)

    def pinned(self, batch: Any) -> Any:
        """Return the batch in page-locked memory if that was asked for and there is a device."""
        if not self.pin_memory or not torch.cuda.is_available():
            return batch
        before = self._clock.switch(S.DATA_TRANSPORT)
        try:
            return pinned(batch)
        finally:
            self._clock.switch(before)

    def _release(self, running: RunningPass) -> None:
        if isinstance(running.plan, ShardPlan):
            self._stats.num_repeated += running.plan.num_repeated
            running.plan.num_repeated = 0
        running.close()
        if isinstance(running, WorkerPass) and not self._keeps_workers:
            running.pool.close()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the order depends on, here and in the samplers.

        After `load_state_dict` of this epoch or a later one the position wins: the next
        iterator gives what is left of the state's epoch.
        """
        self._epoch_named = True
        if self._resume is not None and epoch <= self._resume["epoch"]:
            return
        if self._current is not None:
            self._abandon(self._current)
        self._planner.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch: small, and JSON-able.

        Raises:
            ConfigError: With `in_order=False` there is no position.
            ClosedError: After `close()`.
        """
        if self._closed:
            raise ClosedError("this DataLoader was closed; take its state before")
        if not self.in_order:
            raise ConfigError("in_order=False delivers in no fixed order: there is no position")
        if self._resume is not None:
            return dict(self._resume)
        running = self._current.running if self._current is not None else None
        return self._planner.state(running)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at `state_dict` with the next iterator.

        Raises:
            StateMismatchError: The state is of another kind of loader or data, or of
                another number of ranks where its position is not a global one.
        """
        self._planner.load(state_dict)
        if self._current is not None:
            self._release_current()
        self._resume = dict(state_dict)
        self._epoch_named = False

    def _release_current(self) -> None:
        current, self._current = self._current, None
        if current is not None and current.running is not None:
            self._release(current.running)
            current.running = None

    def stats(self) -> LoaderStats:
        """Return the counts of this loader so far."""
        return self._stats

    def worker_pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [] if self._pool is None or self._pool.closed else self._pool.pids()

    def close(self) -> None:
        """End and join the workers; safe to call twice."""
        self._closed = True
        self._release_current()
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
