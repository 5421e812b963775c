"""The planner, without processes: exactly once, equal numbers, any ranks, resume anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from trainpath.errors import ConfigError
from trainpath.loader.order import ShardOrder, ShardPlan, ShardPosition, deal_rest, num_batches

ranks = st.integers(1, 5)
batch_sizes = st.integers(1, 7) | st.none()
shard_counts = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def plan(counts, world_size, batch_size, *, rank, start=ShardPosition(), **options):  # noqa: B008
    """Return a plan over shards of known counts."""
    order = ShardOrder(
        num_shards=len(counts),
        seed=options.get("seed", 0),
        shuffle=options.get("shuffle", True),
        window=options.get("window", 1),
    )
    return ShardPlan(
        order,
        options.get("epoch", 0),
        batch_size=batch_size,
        drop_last=options.get("drop_last", False),
        rank=rank,
        world_size=world_size,
        start=start,
        ahead=0,
        count=lambda shard: counts[shard],
    )


def batches_of(planner):
    """Return the (keys, position after) of all batches of a plan."""
    batches = []
    while planner.ready():
        try:
            index, after = next(planner)
        except StopIteration:
            return batches
        batches.append((index if isinstance(index, list) else [index], after))
    raise AssertionError("the plan waits for a count that is known")


def all_keys(counts):
    """Return every sample."""
    return sorted((shard, n) for shard, count in enumerate(counts) for n in range(count))


def deal(counts, world_size, batch_size, **options):
    """Return the batches of every rank."""
    return [
        batches_of(plan(counts, world_size, batch_size, rank=rank, **options))
        for rank in range(world_size)
    ]


@settings(max_examples=300, deadline=None)
@given(shard_counts, ranks, batch_sizes, st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_every_sample_exactly_once(counts, world_size, batch_size, window, shuffle, seed):
    """Over all ranks an epoch is every sample once, in as many batches on each rank."""
    if sum(counts) < world_size:
        with pytest.raises(ConfigError):
            deal(counts, world_size, batch_size)
        return
    dealt = deal(counts, world_size, batch_size, window=window, shuffle=shuffle, seed=seed)
    assert len({len(batches) for batches in dealt}) == 1
    expected = num_batches(
        sum(counts), batch_size=batch_size, world_size=world_size, drop_last=False
    )
    assert len(dealt[0]) == expected
    keys = sorted(key for batches in dealt for index, _ in batches for key in index)
    if len(set(keys)) < len(keys):  # the tail had fewer samples than ranks
        assert sum(counts) % (world_size * (batch_size or 1)) < world_size
        keys = sorted(set(keys))
    assert keys == all_keys(counts)


@settings(max_examples=200, deadline=None)
@given(shard_counts, ranks, st.integers(1, 7), st.integers(1, 4))
def test_drop_last_gives_full_batches_only(counts, world_size, batch_size, window):
    """With drop_last all batches are full and at most one global batch is missing."""
    if sum(counts) < world_size:
        return
    dealt = deal(counts, world_size, batch_size, window=window, drop_last=True)
    keys = [key for batches in dealt for index, _ in batches for key in index]
    assert all(len(index) == batch_size for batches in dealt for index, _ in batches)
    assert len(set(keys)) == len(keys)
    assert sum(counts) - len(keys) < world_size * batch_size


@settings(max_examples=300, deadline=None)
@given(
    shard_counts,
    st.lists(st.tuples(ranks, st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(1, 3),
)
def test_elastic_resume_loses_and_repeats_nothing(counts, runs, window):
    """Cut after cut, on other numbers of ranks and samples per batch: every sample once."""
    if sum(counts) < max(world_size for world_size, _, _ in runs):
        return
    position = ShardPosition()
    seen = []
    for world_size, batch_size, num_taken in [*runs, (1, 3, 1000)]:
        dealt = deal(counts, world_size, batch_size, window=window, start=position)
        positions = {tuple(after for _, after in batches[:num_taken]) for batches in dealt}
        assert len(positions) == 1, "every rank tells the same position"
        for batches in dealt:
            seen += [key for index, _ in batches[:num_taken] for key in index]
        position = next(iter(positions))[-1] if next(iter(positions)) else position
    repeated = len(seen) - len(set(seen))
    assert repeated < max(world_size for world_size, _, _ in runs)
    assert sorted(set(seen)) == all_keys(counts)


@settings(max_examples=100, deadline=None)
@given(shard_counts, ranks, st.integers(1, 5), st.integers(1, 3), st.data())
def test_resume_equals_the_uninterrupted_run(counts, world_size, batch_size, window, data):
    """From any cut the batches are those of the uninterrupted run."""
    if sum(counts) < world_size:
        return
    rank = data.draw(st.integers(0, world_size - 1))
    whole = batches_of(plan(counts, world_size, batch_size, rank=rank, window=window))
    cut = data.draw(st.integers(0, len(whole)))
    start = whole[cut - 1][1] if cut else ShardPosition()
    rest = plan(counts, world_size, batch_size, rank=rank, window=window, start=start)
    assert batches_of(rest) == whole[cut:]


def test_order_is_a_fixed_function_of_seed_and_epoch():
    """The order of an epoch is pinned: a release that changes it breaks every resume."""
    order = ShardOrder(num_shards=8, seed=1)
    assert order.shards(0) == [7, 2, 5, 4, 0, 6, 1, 3]
    assert order.samples(0, 0, [5]).tolist() == [[0, 4], [0, 3], [0, 2], [0, 1], [0, 0]]
    epochs = {tuple(order.shards(epoch)) for epoch in range(6)}
    assert len(epochs) == 6
    assert tuple(ShardOrder(num_shards=8, seed=2).shards(0)) not in epochs


def test_plan_waits_for_the_next_window_only():
    """The first batch needs the count of the first shard of the order and no other."""
    counts = {}
    planner = ShardPlan(
        ShardOrder(num_shards=5, seed=1),
        0,
        batch_size=2,
        drop_last=False,
        rank=0,
        world_size=2,
        start=ShardPosition(),
        ahead=1,
        count=counts.get,
    )
    first, second, third = ShardOrder(num_shards=5, seed=1).shards(0)[:3]
    assert not planner.ready()
    assert planner.blocked_on() == [first]
    assert planner.wanted() == [first]
    assert planner.wanted() == []
    planner.forget_asked([first])
    assert planner.wanted() == [first]
    counts[first] = 4
    assert planner.ready()
    assert planner.wanted() == [second, third]
    assert {shard for shard, _ in next(planner).index} == {first}
    assert not planner.ready()
    assert planner.blocked_on() == [second]


def test_tail_smaller_than_the_ranks_is_repeated_and_counted():
    """Five samples on four ranks: one full step, then one sample given to all, counted."""
    planners = [plan([5], 4, 1, rank=rank) for rank in range(4)]
    dealt = [batches_of(planner) for planner in planners]
    assert [len(batches) for batches in dealt] == [2] * 4
    assert len({batches[-1][0][0] for batches in dealt}) == 1
    assert [planner.num_repeated for planner in planners] == [3] * 4


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), ranks, st.booleans(), st.data())
def test_rest_of_a_distributed_epoch_is_torchs(length, world_size, drop_last, data):
    """With the old number of ranks the rest dealt again is the rest of torch's own deal."""
    if drop_last and length < world_size:
        return
    samplers = [
        DistributedSampler(range(length), world_size, rank, shuffle=False, drop_last=drop_last)
        for rank in range(world_size)
    ]
    whole = [list(sampler) for sampler in samplers]
    cut = data.draw(st.integers(0, len(whole[0])))
    for rank in range(world_size):
        rest = deal_rest(
            range(length), cut * world_size, rank=rank, world_size=world_size, drop_last=drop_last
        )
        assert rest == whole[rank][cut:]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), ranks, ranks, st.integers(0, 20))
def test_distributed_epoch_dealt_to_other_ranks_is_exact(length, before, after, cut):
    """What old ranks consumed and new ranks still get is the epoch, plus padding only."""
    cut = min(cut, length // before)
    consumed = list(range(cut * before))
    rest = [
        deal_rest(range(length), cut * before, rank=rank, world_size=after, drop_last=False)
        for rank in range(after)
    ]
    assert len({len(part) for part in rest}) == 1
    seen = consumed + list(itertools.chain(*rest))
    assert sorted(set(seen)) == list(range(length))
    assert len(seen) - length < after
