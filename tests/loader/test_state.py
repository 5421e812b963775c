"""Resuming a `DataLoader`: at any cut, again and again, over epochs, on other ranks."""

from __future__ import annotations

import json
import random

import pytest
import torch
from torch.utils import data as torch_data

from trainpath.errors import ClosedError, StateMismatchError
from trainpath.loader import DataLoader


class Stream(torch_data.IterableDataset):
    """An iterable dataset of uneven length per worker."""

    def __iter__(self):
        info = torch_data.get_worker_info()
        worker = 0 if info is None else info.id
        for number in range(7 + 4 * worker):
            yield 1000 * worker + number


class StatefulStream(torch_data.IterableDataset):
    """An iterable dataset that keeps its own position."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 9:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self):
        """Return the position."""
        return {"at": self.at}

    def load_state_dict(self, state):
        """Set the position; fails on any count-and-skip."""
        self.at = state["at"]


class Lottery(torch_data.Sampler):
    """A sampler that draws from the global generator, key by key."""

    def __iter__(self):
        for _ in range(11):
            yield int(torch.randint(0, 100, ()))

    def __len__(self):
        return 11


class Moody(torch_data.Dataset):
    """Fails at one key while it is bad."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 8

    def __getitem__(self, key):
        if key == self.bad:
            raise LookupError(f"key {key} is bad")
        return key


KINDS = {
    "sequential": lambda: (range(17), {"batch_size": 3}),
    "shuffle": lambda: (range(17), {"batch_size": 3, "shuffle": True}),
    "drop_last": lambda: (range(17), {"batch_size": 3, "shuffle": True, "drop_last": True}),
    "generator": lambda: (
        range(17),
        {"batch_size": 3, "shuffle": True, "generator": torch.Generator().manual_seed(4)},
    ),
    "unbatched": lambda: (range(9), {"batch_size": None, "shuffle": True}),
    "subset": lambda: (
        range(100),
        {"batch_size": 2, "sampler": torch_data.SubsetRandomSampler(range(40, 55))},
    ),
    "weighted": lambda: (
        range(100),
        {
            "batch_size": 2,
            "sampler": torch_data.WeightedRandomSampler(
                [1.0] * 50, 13, generator=torch.Generator().manual_seed(1)
            ),
        },
    ),
    "replacement": lambda: (
        range(50),
        {"batch_size": 5, "sampler": torch_data.RandomSampler(range(50), replacement=True)},
    ),
    "batch_sampler": lambda: (range(9), {"batch_sampler": [[1, 2], [3], [4, 5, 6], [8]]}),
    "distributed": lambda: (
        range(23),
        {"batch_size": 2, "sampler": torch_data.DistributedSampler(range(23), 2, 1)},
    ),
    "stream": lambda: (Stream(), {"batch_size": 2}),
    "stateful_stream": lambda: (StatefulStream(), {"batch_size": 2}),
}


def build(kind, num_workers, **more):
    """Return a new loader of a kind."""
    dataset, options = KINDS[kind]()
    return DataLoader(dataset, num_workers=num_workers, **options, **more)


def take(loader, count):
    """Return the next `count` batches over as many epochs as it takes, with a state each."""
    taken = []
    while len(taken) < count:
        for batch in loader:
            torch.rand(1)  # the step draws too
            state = json.loads(json.dumps(loader.state_dict()))
            taken.append((torch.as_tensor(batch).tolist(), state))
            if len(taken) == count:
                break
    return taken


@pytest.mark.parametrize("kind", KINDS)
def test_resume_at_every_cut_equals_the_uninterrupted_run(kind):
    """Wherever it is cut, the rest of two epochs is the same, also in a second resume."""
    torch.manual_seed(0)
    with build(kind, 0) as loader:
        whole = take(loader, 20)
    batches = [batch for batch, _ in whole]
    for cut in range(1, 20):
        torch.manual_seed(99)
        loader = build(kind, 0)
        loader.load_state_dict(whole[cut - 1][1])
        assert loader.state_dict() == whole[cut - 1][1]
        some = take(loader, min(3, 20 - cut))
        assert [batch for batch, _ in some] == batches[cut : cut + 3]
        torch.manual_seed(77)
        again = build(kind, 0)
        again.load_state_dict(some[-1][1])
        rest = [batch for batch, _ in take(again, max(1, 20 - cut - 3))]
        assert rest[: 20 - cut - 3] == batches[cut + 3 :]


@pytest.mark.parametrize("kind", ["shuffle", "generator", "distributed", "stream", "batch_sampler"])
def test_resume_with_workers_counts_delivered_batches(kind):
    """With prefetching workers the state is that of the batch in hand, not of later ones."""
    torch.manual_seed(0)
    with build(kind, 2, prefetch_factor=3) as loader:
        whole = take(loader, 14)
    for cut in random.Random(kind).sample(range(1, 13), 3):
        torch.manual_seed(99)
        with build(kind, 2) as loader:
            loader.load_state_dict(whole[cut - 1][1])
            rest = take(loader, 14 - cut)
        assert [batch for batch, _ in rest] == [batch for batch, _ in whole[cut:]]
        assert rest[-1][1]["position"] == whole[-1][1]["position"]


def test_stateful_stream_in_workers_is_restored_not_skipped():
    """A dataset's own state travels with each batch and is what a worker restarts from."""
    with build("stateful_stream", 1) as loader:
        batches = iter(loader)
        assert [next(batches).tolist(), next(batches).tolist()] == [[1, 2], [3, 4]]
        state = loader.state_dict()
    assert state["position"]["states"] == [{"dataset": {"at": 4}}]
    with build("stateful_stream", 1) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == [[5, 6], [7, 8], [9]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_that_failed_was_not_delivered(num_workers):
    """After an error the state is where it happened: the batch is made again, none is lost."""
    with DataLoader(Moody(bad=3), batch_size=2, num_workers=num_workers) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(LookupError, match="key 3 is bad"):
            next(batches)
        state = loader.state_dict()
    with DataLoader(Moody(bad=None), batch_size=2, num_workers=num_workers) as loader:
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("kind", ["stream", "stateful_stream", "shuffle"])
def test_loaded_state_stays_as_it_is(kind):
    """Going on from a state does not change it: it can be loaded again."""
    with build(kind, 0) as loader:
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
    before = json.dumps(state)
    for _ in range(2):
        with build(kind, 0) as resumed:
            resumed.load_state_dict(state)
            next(iter(resumed))
        assert json.dumps(state) == before


def test_closed_loader_has_no_position():
    """state_dict() after close() is an error, not the position of a loader that read nothing."""
    with DataLoader(range(4)) as loader:
        next(iter(loader))
    with pytest.raises(ClosedError, match="before"):
        loader.state_dict()


def test_between_epochs_the_state_starts_the_next_one():
    """A state taken after the loop is the start of the next epoch, on the same generator."""
    torch.manual_seed(5)
    loader = build("shuffle", 0)
    first = [batch.tolist() for batch in loader]
    state = loader.state_dict()
    second = [batch.tolist() for batch in loader]
    assert first != second
    assert state["epoch"] == 1
    assert "position" not in state
    torch.manual_seed(6)
    resumed = build("shuffle", 0)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == second


def test_another_batch_size_continues_at_the_next_sample():
    """The position counts samples: another batch size loses and repeats nothing."""
    torch.manual_seed(1)
    loader = DataLoader(range(20), batch_size=3, shuffle=True)
    seen = [key for batch, _ in take(loader, 2) for key in batch]
    state = loader.state_dict()
    other = DataLoader(range(20), batch_size=4, shuffle=True)
    other.load_state_dict(state)
    seen += [key for batch in other for key in batch.tolist()]
    assert sorted(seen) == list(range(20))


def distributed_loader(rank, world_size, batch_size):
    """Return a loader of one rank of an epoch of 30 samples."""
    sampler = torch_data.DistributedSampler(range(30), world_size, rank, seed=8)
    return DataLoader(range(30), batch_size=batch_size, sampler=sampler)


def test_distributed_sampler_resumes_on_other_ranks():
    """2 ranks, then 3, then 1: every sample of the epoch once, one cursor for all."""
    seen = []
    states = []
    for rank in range(2):
        loader = distributed_loader(rank, 2, 4)
        loader.sampler.set_epoch(3)
        seen += [key for batch, _ in take(loader, 2) for key in batch]
        states.append(loader.state_dict())
    assert states[0] == states[1]
    assert states[0]["position"] == 16
    middle = []
    for rank in range(3):
        loader = distributed_loader(rank, 3, 3)
        loader.load_state_dict(states[0])
        seen += [key for batch, _ in take(loader, 1) for key in batch]
        middle.append(loader.state_dict())
    assert middle[0] == middle[1] == middle[2]
    last = distributed_loader(0, 1, 2)
    last.load_state_dict(middle[0])
    assert last.sampler.epoch == 3
    seen += [key for batch in last for key in batch.tolist()]
    assert sorted(seen) == list(range(30))


def test_later_epoch_set_by_the_user_wins_over_the_state():
    """set_epoch beyond the state's epoch starts that epoch; up to it the position wins."""
    loader = distributed_loader(0, 2, 4)
    take(loader, 2)
    state = loader.state_dict()
    later = distributed_loader(0, 2, 4)
    later.load_state_dict(state)
    later.sampler.set_epoch(1)
    fresh = distributed_loader(0, 2, 4)
    fresh.sampler.set_epoch(1)
    assert [b.tolist() for b in later] == [b.tolist() for b in fresh]
    same = distributed_loader(0, 2, 4)
    same.load_state_dict(state)
    same.set_epoch(0)
    assert len([*same]) == 2


def test_state_of_another_loader_is_refused():
    """Kind, workers or ranks that make the position meaningless are a StateMismatchError."""
    state = build("shuffle", 0).state_dict()
    with pytest.raises(StateMismatchError, match="kind"):
        build("stream", 0).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="num_workers"):
        build("stream", 2).load_state_dict(build("stream", 0).state_dict())
    with pytest.raises(StateMismatchError, match="rank"):
        build("shuffle", 0, rank=0, world_size=2).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="version"):
        build("shuffle", 0).load_state_dict({})


def test_state_is_small():
    """A position is under 1 KB where no generator has to be kept."""
    loader = distributed_loader(0, 2, 4)
    take(loader, 1)
    assert len(json.dumps(loader.state_dict())) < 300


def test_global_generator_is_not_set_on_several_ranks():
    """The state of one rank of many never carries the global generator."""
    loader = build("shuffle", 0, rank=1, world_size=2)
    take(loader, 1)
    assert "rng" not in loader.state_dict()
