"""Plans over torch's samplers, and beginning their index streams again where they were.

A torch sampler keeps no position, so an epoch is begun again from the random state it
began with and the delivered part is skipped (indices only; no sample is read).
"""

from __future__ import annotations

import base64
import copy
import itertools
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from trainpath.loader.order import (
    DistributedPlan,
    ItemPlan,
    Plan,
    SamplePlan,
    deal_rest,
    in_batches,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["IndexSource", "draw_seed", "pack_rng", "unpack_rng"]

_END: Final = object()


def pack_rng(state: torch.Tensor) -> str:
    """Return a generator state as text, for JSON."""
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def unpack_rng(text: str) -> torch.Tensor:
    """Undo `pack_rng`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def draw_seed(generator: torch.Generator | None) -> int:
    """Draw a seed exactly as torch's DataLoader and RandomSampler do."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


@contextmanager
def _global_rng(state: str | None) -> Iterator[None]:
    """Run with the global generator in `state`, then put it back (no-op for None)."""
    if state is None:
        yield
        return
    before = torch.get_rng_state()
    torch.set_rng_state(unpack_rng(state))
    try:
        yield
    finally:
        torch.set_rng_state(before)


class _LoadedEpoch(int):
    """An epoch that came from a state."""


class _Watched:
    """An iterator that captures the random state just before its first item."""

    def __init__(self, items: Iterator[Any], source: IndexSource) -> None:
        self._items = items
        self._source: IndexSource | None = source

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._source is not None:
            self._source.capture()
            self._source = None
        return next(self._items)


class IndexSource:
    """The index stream of a torch DataLoader, restartable at any position.

    Args:
        sampler: The sampler.
        batch_sampler: The batch sampler, None if batching is disabled.
        generator: The loader's generator.
    """

    def __init__(self, sampler: Any, batch_sampler: Any, generator: torch.Generator | None) -> None:
        self._items = sampler if batch_sampler is None else batch_sampler
        plain = type(batch_sampler) is BatchSampler
        self._batching = batch_sampler if plain else None
        self._inner = batch_sampler.sampler if plain else self._items
        self._generators = _generators(generator, self._inner, self._items)
        self._started_with: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        """What a position counts: samples over all ranks, samples, or items."""
        if self._batching is None:
            return "items"
        return "distributed" if self.distributed is not None else "samples"

    @property
    def distributed(self) -> Any:
        """The stock DistributedSampler at the bottom, or None."""
        inner = self._inner
        if isinstance(inner, DistributedSampler):
            return inner if type(inner).__iter__ is DistributedSampler.__iter__ else None
        return None

    @property
    def uses_global_rng(self) -> bool:
        """Whether later epochs depend on torch's global generator."""
        if self.distributed is not None or type(self._inner) is SequentialSampler:
            return False
        return getattr(self._inner, "generator", None) is None

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to the samplers that want it."""
        for sampler in {id(s): s for s in (self._inner, self._items)}.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    @property
    def epoch(self) -> int | None:
        """The epoch the sampler was set to, None if it knows none."""
        epoch = getattr(self._inner, "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def set_loaded_epoch(self, epoch: int) -> None:
        """Set the epoch of a loaded state, in a way that tells it from one set by the user."""
        self.set_epoch(_LoadedEpoch(epoch))

    @property
    def epoch_named(self) -> bool:
        """Whether the user set the sampler's epoch since a state was loaded."""
        return self.epoch is not None and not isinstance(self.epoch, _LoadedEpoch)

    def begin(self, *, twice: bool) -> Plan:
        """Return the plan of a new epoch.

        Args:
            twice: Call `iter` on the sampler twice, as torch does with workers (visible to
                samplers that draw in `__iter__`).
        """
        self._started_with = {}
        items = iter(self._items)
        if twice:
            items = iter(self._items)
        watched = _Watched(items, self)
        if self.distributed is not None and self._batching is not None:
            world_size = self.distributed.num_replicas
            return DistributedPlan(watched, start=0, world_size=world_size)
        return ItemPlan(watched) if self._batching is None else SamplePlan(watched)

    def capture(self) -> None:
        """Note the random state that the index stream is about to begin with."""
        start: dict[str, Any] = {}
        if self.epoch is not None:
            start["sampler_epoch"] = int(self.epoch)
        if self._draws_seed:
            generator = torch.Generator()
            generator.set_state(torch.get_rng_state())
            start["seed"] = draw_seed(generator)
        elif self.uses_global_rng:
            start["rng"] = pack_rng(torch.get_rng_state())
        start["generators"] = self.generators()
        self._started_with = start

    @property
    def _draws_seed(self) -> bool:
        inner = self._inner
        return (
            isinstance(inner, RandomSampler)
            and type(inner).__iter__ is RandomSampler.__iter__
            and inner.generator is None
        )

    def generators(self) -> list[str]:
        """Return the states of the generators involved."""
        return [pack_rng(generator.get_state()) for generator in self._generators]

    def restore_generators(self, states: list[str]) -> None:
        """Set the generators involved to these states."""
        for generator, state in zip(self._generators, states, strict=False):
            generator.set_state(unpack_rng(state))

    def state(self) -> dict[str, Any]:
        """Return how the current epoch's index stream began."""
        if not self._started_with:
            self.capture()
        return self._started_with

    def resume(self, start: dict[str, Any], position: int, *, rank: int, world_size: int) -> Plan:
        """Return the plan of an epoch begun as `start` says, from `position` on."""
        self._started_with = start
        self.restore_generators(start["generators"])
        if "sampler_epoch" in start:
            self.set_loaded_epoch(start["sampler_epoch"])
        batching = self._batching
        if batching is None:
            with _global_rng(start.get("rng")):
                items = _skip(self._begin_again(self._items, start), position)
            return ItemPlan(items, position)
        if self.distributed is not None:
            rest = self._rest(position, rank=rank, world_size=world_size)
            batches = in_batches(rest, batching.batch_size, drop_last=batching.drop_last)
            return DistributedPlan(batches, start=position, world_size=world_size)
        with _global_rng(start.get("rng")):
            keys = _skip(self._begin_again(self._inner, start), position)
        batches = in_batches(keys, batching.batch_size, drop_last=batching.drop_last)
        return SamplePlan(batches, position)

    def _begin_again(self, sampler: Any, start: dict[str, Any]) -> Iterable[Any]:
        if "seed" not in start or sampler is not self._inner:
            return sampler  # type: ignore[no-any-return]
        seeded = copy.copy(sampler)
        seeded.generator = torch.Generator()
        seeded.generator.manual_seed(start["seed"])
        return seeded  # type: ignore[no-any-return]

    def _rest(self, position: int, *, rank: int, world_size: int) -> list[int]:
        sampler = self.distributed
        whole = copy.copy(sampler)
        whole.rank, whole.num_replicas, whole.drop_last = 0, 1, False
        whole.num_samples = whole.total_size = len(sampler.dataset)
        return deal_rest(
            list(whole),
            position,
            rank=rank,
            world_size=world_size,
            drop_last=sampler.drop_last,
        )


def _skip(items: Iterable[Any], count: int) -> Iterator[Any]:
    """Drop `count` items and draw the one after, while the right random state is set."""
    iterator = iter(items)
    deque(itertools.islice(iterator, count), maxlen=0)
    first = next(iterator, _END)
    return iter(()) if first is _END else itertools.chain([first], iterator)


def _generators(*owners: Any) -> list[torch.Generator]:
    """Return the distinct generators of a loader and its samplers."""
    found = (
        owner if isinstance(owner, torch.Generator) else getattr(owner, "generator", None)
        for owner in owners
    )
    unique = {id(g): g for g in found if isinstance(g, torch.Generator)}
    return list(unique.values())
