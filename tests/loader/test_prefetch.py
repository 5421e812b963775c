"""`prefetch`: order, errors in place, position, and the end of its thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch.utils import data as torch_data

from trainpath.errors import ClosedError, ConfigError
from trainpath.loader import DataLoader, prefetch


def thread_names():
    """Return the names of the running prefetch threads."""
    return [t.name for t in threading.enumerate() if t.name.startswith("trainpath-prefetch")]


def wait_until(condition):
    """Wait for something that a thread makes true."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Counted:
    """An iterable that counts how far it was read, and fails at one item."""

    def __init__(self, length, bad=None):
        self.length = length
        self.bad = bad
        self.read = 0

    def __iter__(self):
        for number in range(self.length):
            self.read += 1
            if number == self.bad:
                raise LookupError("item is bad")
            yield number

    def __len__(self):
        return self.length


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_same_items_in_order(depth):
    """All items come once, in order, epoch after epoch, and no thread is left."""
    batches = prefetch(Counted(20), depth)
    assert len(batches) == 20
    assert list(batches) == list(range(20))
    assert list(batches) == list(range(20))
    wait_until(lambda: not thread_names())


def test_depth_bounds_what_is_read_ahead():
    """The source is read no further than the depth beyond what was delivered."""
    source = Counted(100)
    batches = iter(prefetch(source, 3))
    assert [next(batches), next(batches)] == [0, 1]
    wait_until(lambda: source.read >= 5)
    time.sleep(0.05)
    assert source.read <= 2 + 3 + 1


def test_error_comes_at_its_position():
    """The items before an error are delivered, then the error, with its type."""
    batches = iter(prefetch(Counted(9, bad=4), 2))
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(LookupError, match="item is bad"):
        next(batches)


def test_close_stops_the_thread():
    """close() in the middle ends the thread; after it nothing can be iterated."""
    batches = prefetch(Counted(10**9), 2)
    iterator = iter(batches)
    next(iterator)
    assert thread_names()
    batches.close()
    batches.close()
    assert not thread_names()
    with pytest.raises(ClosedError):
        iter(batches)
    with pytest.raises(ClosedError):
        next(iterator)


def test_position_is_that_of_the_delivered_batch():
    """The state is not that of what was read ahead, and resumes at the next batch."""
    torch.manual_seed(0)
    batches = prefetch(DataLoader(range(40), 4, shuffle=True), 4)
    iterator = iter(batches)
    seen = [key for _ in range(3) for key in next(iterator).tolist()]
    time.sleep(0.02)
    state = batches.state_dict()
    assert state["position"] == 12
    batches.close()
    resumed = prefetch(DataLoader(range(40), 4, shuffle=True), 2)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    seen += [key for batch in resumed for key in batch.tolist()]
    assert sorted(seen) == list(range(40))
    assert resumed.state_dict()["epoch"] == 1


def test_source_without_state_says_so():
    """A plain iterable has no position: a ConfigError that names it."""
    with pytest.raises(ConfigError, match="Counted"):
        prefetch(Counted(3)).state_dict()


def test_shuffled_torch_loader_draws_as_without():
    """A prefetched torch loader shuffles from the same global draw as a bare one."""
    results = []
    for wrap in (lambda loader: loader, prefetch):
        torch.manual_seed(1)
        loader = wrap(torch_data.DataLoader(range(10), 2, shuffle=True))
        results.append([(batch.tolist(), torch.rand(1).item()) for batch in loader])
    assert results[0] == results[1]


def test_negative_depth_is_refused():
    """A negative depth is a ConfigError."""
    with pytest.raises(ConfigError, match="depth"):
        prefetch([], -1)


def test_depth_zero_needs_no_thread():
    """With depth 0 items are made when asked for, in this thread, and the state is exact."""
    source = Counted(5)
    batches = iter(prefetch(source, 0))
    assert next(batches) == 0
    assert source.read == 1
    assert not thread_names()
    assert list(batches) == [1, 2, 3, 4]
    loader = prefetch(DataLoader(range(6), 2), 0)
    next(iter(loader))
    assert loader.state_dict()["position"] == 2


def test_set_epoch_is_passed_on():
    """set_epoch reaches the source."""
    sampler = torch_data.DistributedSampler(range(10), 1, 0)
    prefetch(DataLoader(range(10), sampler=sampler)).set_epoch(4)
    assert sampler.epoch == 4
