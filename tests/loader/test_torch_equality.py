"""`DataLoader` against torch's: signature, attributes, batches, random draws, errors."""

from __future__ import annotations

import inspect
import os
import random

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

from trainpath.errors import ConfigError
from trainpath.loader import DataLoader, observed


class Drawing(torch_data.Dataset):
    """A map-style dataset whose samples draw from all three generators."""

    def __init__(self, length=23):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, key):
        return key, torch.rand(2), np.random.rand(), random.random()  # noqa: NPY002


class Batched(Drawing):
    """The same, fetched a batch at a time."""

    def __getitems__(self, keys):
        return [(key, torch.rand(1)) for key in keys]


class Stream(torch_data.IterableDataset):
    """An iterable dataset of uneven length per worker, drawing."""

    def __iter__(self):
        info = torch_data.get_worker_info()
        worker = 0 if info is None else info.id
        for number in range(11 + 6 * worker):
            yield 1000 * worker + number, torch.rand(1)


def init_worker(worker):
    """Change the worker's copy of the dataset and draw."""
    info = torch_data.get_worker_info()
    info.dataset.length = 23
    assert info.id == worker
    assert info.num_workers == 2
    torch.rand(worker + 1)


def flatten(value):
    """Return the numbers of nested batches with their types."""
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(leaf for item in value for leaf in flatten(item))]
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), *value.reshape(-1).tolist()]
    return [value]


def batch_sampler():
    """Return a batch sampler of uneven batches."""
    return [[1, 2, 3], [4], [5, 6], [0, 0, 7, 8], [9, 10]]


CASES = {
    "sequential": (Drawing, {"batch_size": 4}),
    "shuffle": (Drawing, {"batch_size": 4, "shuffle": True}),
    "generator": (Drawing, {"batch_size": 5, "shuffle": True, "generator": 7}),
    "drop_last": (Drawing, {"batch_size": 5, "shuffle": True, "drop_last": True}),
    "sampler": (Drawing, {"batch_size": 3, "sampler": [5, 1, 1, 7, 8, 22, 0]}),
    "batch_sampler": (Drawing, {"batch_sampler": batch_sampler()}),
    "unbatched": (Drawing, {"batch_size": None, "shuffle": True}),
    "getitems": (Batched, {"batch_size": 4, "shuffle": True}),
    "stream": (Stream, {"batch_size": 4}),
    "stream_drop_last": (Stream, {"batch_size": 4, "drop_last": True}),
    "stream_unbatched": (Stream, {"batch_size": None}),
    "weighted": (
        Drawing,
        {"batch_size": 4, "sampler": torch_data.WeightedRandomSampler([1.0] * 23, 15)},
    ),
    "replacement": (
        Drawing,
        {"sampler": torch_data.RandomSampler(range(23), replacement=True, num_samples=40)},
    ),
}


def run(make, dataset, options):
    """Return two epochs of batches and the next global draw, from fixed seeds."""
    options = dict(options)
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    loader = make(dataset(), **options)
    batches = [flatten(batch) for _ in range(2) for batch in loader]
    if hasattr(loader, "close"):
        loader.close()
    return batches, torch.rand(1).item()


def rehosted(dataset, **options):
    """Return our loader over the objects of a torch DataLoader."""
    return DataLoader.from_torch(torch_data.DataLoader(dataset, **options))


def watched(dataset, **options):
    """Return torch's own loader, observed."""
    return observed(torch_data.DataLoader(dataset, **options))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_batches_and_draws_equal_torch(case, num_workers):
    """Two epochs have torch's batches, worker draws and global draws, however hosted."""
    dataset, options = CASES[case]
    options = {**options, "num_workers": num_workers}
    expected = run(torch_data.DataLoader, dataset, options)
    assert len(expected[0]) >= 4
    for make in (DataLoader, rehosted, watched):
        assert run(make, dataset, options) == expected, make


@pytest.mark.parametrize("make", [DataLoader, rehosted, watched])
def test_persistent_workers_equal_torch(make):
    """Persistent workers keep their generators over epochs, and init runs as in torch."""
    options = {
        "batch_size": 4,
        "shuffle": True,
        "num_workers": 2,
        "persistent_workers": True,
        "worker_init_fn": init_worker,
    }
    assert run(make, Drawing, options) == run(torch_data.DataLoader, Drawing, options)


def test_signature_begins_with_torchs():
    """Every parameter of torch's DataLoader is here: same name, order, kind and default."""
    theirs = list(inspect.signature(torch_data.DataLoader).parameters.values())
    ours = list(inspect.signature(DataLoader).parameters.values())
    assert [(p.name, p.kind, p.default) for p in ours[: len(theirs)]] == [
        (p.name, p.kind, p.default) for p in theirs
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(theirs) :])


def test_attributes_are_torchs():
    """The attributes that frameworks read are those of a torch DataLoader."""
    options = {"batch_size": 4, "shuffle": True, "num_workers": 2, "drop_last": True}
    ours, theirs = DataLoader(Drawing(), **options), torch_data.DataLoader(Drawing(), **options)
    for name in (
        "batch_size",
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "drop_last",
        "timeout",
        "generator",
        "collate_fn",
        "worker_init_fn",
        "multiprocessing_context",
        "persistent_workers",
        "in_order",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert type(ours.sampler) is type(theirs.sampler)
    assert type(ours.batch_sampler) is type(theirs.batch_sampler)
    assert len(ours) == len(theirs) == 5
    assert not isinstance(ours, torch_data.DataLoader)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sampler": [[1]], "shuffle": True},
        {"sampler": [1], "shuffle": True},
        {"num_workers": -1},
        {"prefetch_factor": 2},
        {"timeout": -1},
        {"batch_size": None, "drop_last": True},
        {"num_workers": 1, "prefetch_factor": 0},
    ],
)
def test_contradictory_arguments_are_config_errors(options):
    """What torch refuses is a ConfigError, which is the ValueError torch raises."""
    with pytest.raises(ConfigError):
        DataLoader(Drawing(), **options)


class Failing(Drawing):
    """Fails on one sample."""

    def __getitem__(self, key):
        if key == 5:
            raise LookupError("sample 5 is bad")
        return key


@pytest.mark.parametrize("num_workers", [0, 2])
def test_dataset_errors_keep_their_type_and_traceback(num_workers):
    """An error in a dataset is raised at its batch, with its type and the worker's traceback."""
    with DataLoader(Failing(), batch_size=2, num_workers=num_workers) as loader:
        batches = iter(loader)
        assert [next(batches).tolist(), next(batches).tolist()] == [[0, 1], [2, 3]]
        with pytest.raises(LookupError, match="sample 5 is bad") as caught:
            next(batches)
        if num_workers:
            assert "__getitem__" in str(caught.value)
            assert next(batches).tolist() == [6, 7]


class Unsendable(Drawing):
    """Gives something that cannot be pickled."""

    def __getitem__(self, key):
        return lambda: key


def test_batch_that_cannot_be_sent_is_an_error():
    """A batch that cannot be pickled is an error that says so, not a hang."""
    with (
        DataLoader(Unsendable(), batch_size=None, num_workers=1) as loader,
        pytest.raises(RuntimeError, match="pickle"),
    ):
        next(iter(loader))


class Mutable(torch_data.Dataset):
    """Gives its current setting."""

    setting = 0

    def __len__(self):
        return 4

    def __getitem__(self, key):
        return self.setting, os.getpid()


def test_changes_to_the_dataset_reach_the_next_epochs_workers():
    """Without persistent workers a change between epochs is seen, as in torch."""
    dataset = Mutable()
    with DataLoader(dataset, batch_size=4, num_workers=1) as loader:
        assert next(iter(loader))[0].tolist() == [0] * 4
        dataset.setting = 9
        setting, pid = next(iter(loader))
        assert setting.tolist() == [9] * 4
        assert pid[0].item() != os.getpid()


def test_out_of_order_delivers_everything_and_has_no_state():
    """in_order=False gives each sample once and refuses to tell a position."""
    with DataLoader(Drawing(), batch_size=2, num_workers=2, in_order=False) as loader:
        keys = [key for batch in loader for key in batch[0].tolist()]
        assert sorted(keys) == list(range(23))
        with pytest.raises(ConfigError, match="in_order"):
            loader.state_dict()


def test_subclass_with_its_own_iterator_is_not_rehosted():
    """A loader class that makes batches its own way is refused, with the way out."""

    class Special(torch_data.DataLoader):
        def __iter__(self):
            return iter([1, 2])

    with pytest.raises(ConfigError, match="prefetch"):
        DataLoader.from_torch(Special(Drawing()))


def test_two_iterators_at_once():
    """Two passes over one loader at the same time do not disturb each other."""
    with DataLoader(Batched(), batch_size=4, num_workers=1) as loader:
        pairs = [(a[0].tolist(), b[0].tolist()) for a, b in zip(loader, loader, strict=True)]
    assert len(pairs) == 6
    assert all(a == b for a, b in pairs)
