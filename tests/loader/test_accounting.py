"""Where the loader's waits are charged: delays put into one stage land in its segment."""

from __future__ import annotations

import time

import pytest
import torch
import webdataset
from torch.utils import data as torch_data

from trainpath.loader import DataLoader, TarDataset, observed, prefetch
from trainpath.metrics import StepClock
from trainpath.metrics import segments as S
from trainpath.metrics.lineage import stage

DELAY_S = 0.03


class Delayed(torch_data.Dataset):
    """Takes its time in decode, or in a stage it names itself."""

    def __init__(self, segment):
        self.segment = segment

    def __len__(self):
        return 12

    def __getitem__(self, key):
        if self.segment == S.DATA_DECODE:
            time.sleep(DELAY_S / 2)
        elif self.segment != S.DATA_COLLATE:
            with stage(self.segment):
                time.sleep(DELAY_S / 2)
        return torch.tensor(key)


class DelayedStream(torch_data.IterableDataset):
    """Takes its time in decode."""

    def __iter__(self):
        for key in range(12):
            time.sleep(DELAY_S / 2)
            yield torch.tensor(key)


def slow_collate(samples):
    """Take time in collate."""
    time.sleep(DELAY_S)
    return torch.stack(samples)


def drain(loader, clock):
    """Iterate over a loader, a step per batch; return the steps and the batches' stages."""
    clock.start()
    for _ in loader:
        clock.end_step()
    records, _ = clock.drain()
    assert all(sum(record.segments_ns) == record.wall_ns for record in records)
    return records, clock.batches()


def charged_s(records, segment):
    """Return the seconds charged to a segment."""
    return sum(record.segments_ns[segment] for record in records) / 1e9


def data_s(records):
    """Return the seconds charged to the data path."""
    return sum(charged_s(records, segment) for segment in S.DATA_SEGMENTS)


def host(dataset, kind, num_workers, clock, collate_fn):
    """Return a loader of batches of two."""
    options = {"batch_size": 2, "num_workers": num_workers, "collate_fn": collate_fn}
    if kind == "ours":
        return DataLoader(dataset, clock=clock, **options)
    return observed(torch_data.DataLoader(dataset, **options), clock)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", ["ours", "observed"])
@pytest.mark.parametrize("segment", [S.DATA_DECODE, S.DATA_COLLATE, S.DATA_NETWORK])
def test_delay_lands_in_its_segment(segment, kind, num_workers):
    """A delay in decode, collate or a stage marked inside is what the wait is charged to."""
    clock = StepClock()
    collate_fn = slow_collate if segment == S.DATA_COLLATE else None
    loader = host(Delayed(segment), kind, num_workers, clock, collate_fn)
    records, batches = drain(loader, clock)
    assert len(records) == 6
    steady = records[1:]  # the first step also waits for the workers to start
    # With workers the next batch is begun while this one is handed over.
    share = 0.6 if num_workers else 0.9
    assert charged_s(steady, segment) >= share * DELAY_S * len(steady)
    assert charged_s(steady, segment) >= 0.6 * data_s(steady)
    if num_workers:
        stages = [stage for _, stages, _ in batches for stage in stages]
        busy = sum(end - start for made, start, end in stages if made == segment) / 1e9
        assert busy >= 0.9 * 5 * DELAY_S
        assert {lane for lane, _, _ in batches} == {"worker 0"}
        assert clock.parallelism[S.DATA_DECODE] == 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_delays_are_decode(num_workers):
    """Time in an iterable dataset's own code is data.decode."""
    clock = StepClock()
    loader = DataLoader(DelayedStream(), 2, num_workers=num_workers, clock=clock)
    records, _ = drain(loader, clock)
    assert charged_s(records[2:], S.DATA_DECODE) >= 0.5 * data_s(records[2:])
    loader.close()


class SlowOrigin:
    """A cache whose every download takes a while."""

    def __init__(self, directory):
        self.directory = directory

    def open(self, url):
        """Return the file of that name after a wait on the network."""
        with stage(S.DATA_NETWORK):
            time.sleep(4 * DELAY_S)
        return (self.directory / url.rpartition("/")[2]).open("rb")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_waiting_for_a_shard_is_charged_to_the_network(tmp_path, num_workers):
    """Also while the plan itself waits for a shard, the wait is what the download does."""
    for shard in range(3):
        with webdataset.TarWriter(str(tmp_path / f"{shard}.tar")) as writer:
            for number in range(4):
                writer.write({"__key__": str(number), "cls": number})
    dataset = TarDataset("s3://b/{0..2}.tar", cache=SlowOrigin(tmp_path), fields=["cls"])
    clock = StepClock()
    with DataLoader(dataset, 2, num_workers=num_workers, clock=clock) as loader:
        records, _ = drain(loader, clock)
    assert len(records) == 6
    assert charged_s(records, S.DATA_NETWORK) >= 0.8 * 3 * 4 * DELAY_S
    assert charged_s(records, S.DATA_NETWORK) >= 0.7 * data_s(records)


@pytest.mark.parametrize("depth", [0, 2])
def test_prefetch_charges_the_source_as_decode(depth):
    """A wait for a prefetched iterable is charged to what the thread does."""
    clock = StepClock()
    source = torch_data.DataLoader(Delayed(S.DATA_DECODE), batch_size=2)
    records, batches = drain(prefetch(source, depth, clock=clock), clock)
    assert len(records) == 6
    assert charged_s(records, S.DATA_DECODE) >= 0.8 * data_s(records)
    assert {lane for lane, _, _ in batches} == ({"prefetch"} if depth else set())


def test_prefetched_batches_cost_no_wait():
    """While the step is longer than the loading, the data path is charged almost nothing."""
    clock = StepClock()
    with DataLoader(Delayed(S.DATA_DECODE), 2, num_workers=2, clock=clock) as loader:
        clock.start()
        for _ in loader:
            time.sleep(2 * DELAY_S)
            clock.end_step()
    records, _ = clock.drain()
    assert data_s(records[2:]) < 0.2 * charged_s(records[2:], S.PYTHON)


def test_clock_can_be_set_later():
    """A clock given after construction is used and told the number of workers."""
    loader = DataLoader(Delayed(S.DATA_DECODE), 2)
    loader.clock = clock = StepClock()
    records, _ = drain(loader, clock)
    assert charged_s(records, S.DATA_DECODE) > 0
