"""The planner: which samples make which batch, as a pure function of a few numbers.

A plan is an iterator of `Planned` batches. Each carries the position that follows it, so
that the position of a loader is the one of the last batch *delivered*, whatever was
prefetched. Four plans:

- `ShardPlan`: shards dealt over ranks by us; one global cursor, any number of ranks.
- `DistributedPlan`: the rest of an epoch of torch's DistributedSampler, dealt again.
- `SamplePlan`: any torch sampler; the position is a number of samples.
- `ItemPlan`: any torch batch sampler, or no batching; the position is a number of items.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "DistributedPlan",
    "ItemPlan",
    "Plan",
    "Planned",
    "SamplePlan",
    "ShardOrder",
    "ShardPlan",
    "ShardPosition",
    "StreamPlan",
    "StreamStart",
    "deal_rest",
]


class Planned(NamedTuple):
    """One batch to be made: its index and the position once it is delivered."""

    index: Any
    after: Any


class StreamStart(NamedTuple):
    """Where one worker's copy of an iterable dataset starts."""

    skip_samples: int = 0
    state: dict[str, Any] | None = None


class Plan:
    """The batches of one epoch for one rank, in order; a plan needs nothing by default."""

    def __iter__(self) -> Iterator[Planned]:
        return self

    def __next__(self) -> Planned:
        raise NotImplementedError

    def ready(self) -> bool:
        """Whether the next batch (or the end) can be told without more sample counts."""
        return True

    def wanted(self) -> list[int]:
        """Shards to fetch and index now, the most urgent first."""
        return []

    def blocked_on(self) -> list[int]:
        """Shards without whose counts the next batch cannot be told."""
        return []

    def forget_asked(self, shards: Iterable[int]) -> None:
        """Let `wanted` return these shards again: whoever was asked is gone."""


class StreamPlan(Plan):
    """Requests for batches of an iterable dataset: endless, the workers know the end."""

    def __init__(self, batch_size: int | None) -> None:
        self._index = None if batch_size is None else [None] * batch_size

    def __next__(self) -> Planned:
        return Planned(self._index, None)


class ItemPlan(Plan):
    """What a batch sampler yields, item by item.

    Args:
        items: Iterator over indices, already at `start`.
        start: Items delivered before.
    """

    def __init__(self, items: Iterator[Any], start: int = 0) -> None:
        self._items = items
        self._position = start

    def __next__(self) -> Planned:
        index = next(self._items)
        self._position += 1
        return Planned(index, self._position)


class SamplePlan(Plan):
    """Batches of a torch sampler; the position counts samples.

    Args:
        batches: Iterator over lists of keys, already at `start`.
        start: Samples delivered before.
    """

    def __init__(self, batches: Iterator[list[Any]], start: int = 0) -> None:
        self._batches = batches
        self._position = start

    def __next__(self) -> Planned:
        index = next(self._batches)
        self._position += len(index)
        return Planned(index, self._position)


def in_batches(keys: Iterable[Any], batch_size: int, *, drop_last: bool) -> Iterator[list[Any]]:
    """Yield lists of `batch_size` keys; the last may be shorter, or is dropped."""
    iterator = iter(keys)
    while batch := list(itertools.islice(iterator, batch_size)):
        if len(batch) < batch_size and drop_last:
            return
        yield batch


class DistributedPlan(Plan):
    """Batches of one rank of a DistributedSampler; the position counts over all ranks."""

    def __init__(self, batches: Iterator[list[Any]], *, start: int, world_size: int) -> None:
        self._batches = batches
        self._position = start
        self._world_size = world_size

    def __next__(self) -> Planned:
        index = next(self._batches)
        self._position += len(index) * self._world_size
        return Planned(index, self._position)


def deal_rest(
    order: Sequence[int], start: int, *, rank: int, world_size: int, drop_last: bool
) -> list[int]:
    """Return what `rank` still gets of an epoch of which `start` samples are consumed.

    The same rule as torch's DistributedSampler (rank, rank + world size, ...; padded from
    the beginning of the order, or cut), applied to the rest. With the old world size that
    is exactly the rest of the old deal.
    """
    rest = list(order[start:])
    short = -len(rest) % world_size
    if drop_last:
        rest = rest[: len(rest) - len(rest) % world_size]
    else:
        rest += list(itertools.islice(itertools.cycle(order), short))
    return rest[rank::world_size]


class ShardPosition(NamedTuple):
    """The global cursor into a `ShardOrder`: tiny, and valid for any number of ranks.

    Attributes:
        samples: Samples of the epoch consumed over all ranks.
        window: The window of shards that holds the next sample.
        window_start: Samples of the epoch before that window.
    """

    samples: int = 0
    window: int = 0
    window_start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOrder:
    """The order of all samples of an epoch: a pure function of (seed, epoch).

    Shards are permuted; the samples inside each window of `window` consecutive shards are
    permuted together. So the order of a window needs the counts of its own shards only.

    Attributes:
        num_shards: How many shards there are.
        seed: Seed of the order.
        shuffle: False for the shards and samples as they are listed.
        window: Shards whose samples are mixed.
    """

    num_shards: int
    seed: int = 0
    shuffle: bool = True
    window: int = 1

    @property
    def num_windows(self) -> int:
        """Number of windows in an epoch."""
        return -(-self.num_shards // self.window)

    def shards(self, epoch: int) -> list[int]:
        """Return the shards in the order of this epoch."""
        if not self.shuffle:
            return list(range(self.num_shards))
        return [int(shard) for shard in _permutation(self.num_shards, (self.seed, epoch, 0))]

    def samples(self, epoch: int, window: int, counts: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return the samples of a window as rows of (which of its shards, sample in it)."""
        shard = np.repeat(np.arange(len(counts)), counts)
        sample = np.concatenate([np.arange(count) for count in counts] or [np.arange(0)])
        rows = np.stack([shard, sample], axis=1)
        if self.shuffle:
            rows = rows[_permutation(len(rows), (self.seed, epoch, window + 1))]
        return rows


_MASK = (1 << 64) - 1


def _permutation(length: int, key: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Return a permutation that depends on `key` alone, in every version of everything.

    Sorts by the splitmix64 hash of (key, index); numpy's and torch's own generators do not
    promise the same stream for ever.
    """
    state = 0
    for part in key:
        state = _mix((state + part * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK)
    with np.errstate(over="ignore"):
        value = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        value += np.uint64(state)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        value ^= value >> np.uint64(31)
    return np.argsort(value, kind="stable")


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class _Window(NamedTuple):
    number: int
    start: int
    shards: list[int]
    rows: np.ndarray[Any, Any]


class ShardPlan(Plan):
    """The batches of one rank: rank r of a global batch at g takes [g + r*bs, g + (r+1)*bs).

    All ranks compute the same cut points, so they always have the same number of batches.
    What remains at the end is split evenly (or dropped); if it is less than one sample per
    rank, samples of it are repeated and counted in `num_repeated`.

    Args:
        order: The order of the samples.
        epoch: Which epoch.
        batch_size: Samples per rank and batch; None for single samples.
        drop_last: Whether to drop what does not fill a batch on every rank.
        rank: This rank.
        world_size: Number of ranks.
        start: Where to start.
        ahead: How many windows to find counts for beyond the current one.
        count: Known counts: returns the number of samples of a shard, or None.
        name: What to call the dataset in errors.
    """

    def __init__(
        self,
        order: ShardOrder,
        epoch: int,
        *,
        batch_size: int | None,
        drop_last: bool,
        rank: int,
        world_size: int,
        start: ShardPosition,
        ahead: int,
        count: Callable[[int], int | None],
        name: str = "the dataset",
    ) -> None:
        self._order = order
        self._epoch = epoch
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._rank = rank
        self._world_size = world_size
        self._ahead = ahead
        self._count = count
        self._name = name
        self._shards = order.shards(epoch)
        self._cursor = start.samples
        self._first_window = start.window
        self._next_window = start.window
        self._next_start = start.window_start
        self._windows: deque[_Window] = deque()
        self._asked: set[int] = set()
        self._tail: int | None = None
        self.num_repeated = 0

    def _shards_of(self, window: int) -> list[int]:
        size = self._order.window
        return self._shards[window * size : (window + 1) * size]

    @property
    def _per_step(self) -> int:
        return self._world_size * (self._batch_size or 1)

    @property
    def _available(self) -> int:
        return self._next_start - self._cursor

    def wanted(self) -> list[int]:
        """Return the shards ahead that were not returned before, known or not.

        Known ones too: they may have to be fetched again in a later epoch. As long as the
        first batch waits, only its own window is wanted: on a narrow link, fetching the next
        ones at the same time would double that wait.
        """
        begun = self._next_window > self._first_window
        last = self._next_window + (self._ahead if begun else 0) + 1
        last = min(last, self._order.num_windows)
        wanted = []
        for window in range(self._next_window, last):
            for shard in self._shards_of(window):
                if shard not in self._asked:
                    self._asked.add(shard)
                    wanted.append(shard)
        return wanted

    def blocked_on(self) -> list[int]:
        """Return the shards of the next window whose counts are unknown."""
        if self.ready():
            return []
        return [s for s in self._shards_of(self._next_window) if self._count(s) is None]

    def forget_asked(self, shards: Iterable[int]) -> None:
        """Let `wanted` return these shards again: whoever was asked is gone."""
        self._asked.difference_update(shards)

    def ready(self) -> bool:
        """Whether the next global batch is known, loading windows whose counts are."""
        while self._available < self._per_step and self._next_window < self._order.num_windows:
            shards = self._shards_of(self._next_window)
            counts = [self._count(shard) for shard in shards]
            known = [count for count in counts if count is not None]
            if len(known) < len(counts):
                return False
            rows = self._order.samples(self._epoch, self._next_window, known)
            self._windows.append(_Window(self._next_window, self._next_start, shards, rows))
            self._next_window += 1
            self._next_start += len(rows)
        return True

    def __next__(self) -> Planned:
        available = self._available
        per_step = self._per_step
        size = self._batch_size or 1
        if available >= per_step:
            first = self._cursor + self._rank * size
            keys = self._keys(first, first + size)
            self._cursor += per_step
        else:
            self._check_total()
            if available == 0 or self._drop_last:
                raise StopIteration
            keys = self._share_of_tail(available)
            self._cursor += available
        index = keys if self._batch_size is not None else keys[0]
        return Planned(index, self._position())

    def _check_total(self) -> None:
        total = self._next_start
        if total == 0:
            raise ConfigError(
                f"{self._name} holds no sample in {self._order.num_shards} shard(s); "
                "check the URLs and the member names"
            )
        if total < self._world_size:
            raise ConfigError(
                f"{self._name} holds {total} sample(s), fewer than the {self._world_size} ranks; "
                "use fewer ranks or more data"
            )

    def _share_of_tail(self, available: int) -> list[tuple[int, int]]:
        if available < self._world_size:
            self.num_repeated += self._world_size - available
            at = self._cursor + self._rank % available
            return self._keys(at, at + 1)
        share, extra = divmod(available, self._world_size)
        first = self._cursor + self._rank * share + min(self._rank, extra)
        return self._keys(first, first + share + (self._rank < extra))

    def _keys(self, first: int, last: int) -> list[tuple[int, int]]:
        keys: list[tuple[int, int]] = []
        for window in self._windows:
            rows = window.rows[max(0, first - window.start) : max(0, last - window.start)]
            keys += [(window.shards[shard], sample) for shard, sample in rows.tolist()]
        return keys

    def _position(self) -> ShardPosition:
        while self._windows and self._windows[0].start + len(self._windows[0].rows) <= self._cursor:
            self._windows.popleft()
        if self._windows:
            window = self._windows[0]
            return ShardPosition(self._cursor, window.number, window.start)
        return ShardPosition(self._cursor, self._next_window, self._next_start)


def num_batches(total: int, *, batch_size: int | None, world_size: int, drop_last: bool) -> int:
    """Return the batches per rank of an epoch of `total` samples under a `ShardPlan`."""
    per_step = world_size * (batch_size or 1)
    return total // per_step if drop_last else -(-total // per_step)
