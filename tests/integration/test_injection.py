"""A known delay, put anywhere into the step, is found in its segment."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import trainpath
from trainpath.cache import ShardCache
from trainpath.metrics import Report
from trainpath.testing import ObjectServer, spawn

STEPS = 16
WARMUP = 3
BATCH = 4
DELAY_S = 0.04

INLINE = ("decode", "collate", "checkpoint", "optimizer", "python")

slept = [0.0]


def inject(seconds=DELAY_S):
    """Sleep, and note how long it really took."""
    before = time.monotonic()
    time.sleep(seconds)
    slept[-1] += time.monotonic() - before


class Samples(Dataset):
    """Small samples; decoding one may take its share of the delay."""

    def __init__(self, decode=False):
        self.decode = decode

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        if self.decode:
            inject(DELAY_S / BATCH)
        return torch.full((4,), float(index))


class RemoteSamples(Dataset):
    """One object of a slow server per batch, read through the cache."""

    def __init__(self, url, directory):
        self.url = url
        self.cache = ShardCache(directory, revalidate="never")

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        if index % BATCH == 0:
            with self.cache.open(f"{self.url}/object-{index // BATCH}") as file:
                file.read()
        return torch.full((4,), float(index))


class SlowWork:
    """A collective whose result comes later, on every rank."""

    def __init__(self, work):
        self.work = work
        self.late = True

    def wait(self, timeout=None):
        if self.late:
            self.late = False
            inject()
        return self.work.wait(timeout)

    def __getattr__(self, name):
        return getattr(self.work, name)


class SlowBackward(torch.autograd.Function):
    """Identity whose backward takes the delay."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        inject()
        return gradient


class Model(nn.Module):
    """One linear layer, with the delay in its backward if asked for."""

    def __init__(self, late):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.late = late

    def forward(self, x):
        y = self.linear(x)
        return SlowBackward.apply(y) if self.late else y


class SlowSGD(torch.optim.SGD):
    """SGD whose step takes the delay."""

    def step(self, closure=None):
        inject()
        return super().step(closure)


class State:
    """Something to checkpoint; taking its state may take the delay."""

    def __init__(self, slow):
        self.slow = slow

    def state_dict(self):
        if self.slow:
            inject()
        return {"value": 1}

    def load_state_dict(self, state_dict):
        pass


def slow_collate(samples):
    """Collate with the delay."""
    inject()
    return default_collate(samples)


def train(case, directory, url, workers=0):
    """Train with the delay of `case`; return the seconds slept in each step."""
    torch.manual_seed(0)
    del slept[:]
    slept.append(0.0)
    model = Model(late=case == "straggler" and dist.get_rank() == 1)
    optimizer_class = SlowSGD if case == "optimizer" else torch.optim.SGD
    optimizer = optimizer_class(model.parameters(), lr=1e-4)
    dataset = Samples(decode=case == "decode")
    if case == "storage":
        dataset = RemoteSamples(url, f"{directory}/cache-{dist.get_rank()}")
    collate = slow_collate if case == "collate" else None
    loader = DataLoader(dataset, batch_size=BATCH, collate_fn=collate, num_workers=workers)
    saving = case in ("checkpoint", "saving")
    run = trainpath.accelerate(
        model,
        optimizer,
        loader,
        metrics_dir=Path(directory) / "metrics",
        checkpoint_dir=Path(directory) / "ckpt" if saving else None,
        save_every=1 if saving else None,
        extra={"state": State(slow=case == "checkpoint")} if saving else None,
    )
    with run:
        for x in run.loader:
            model(x).sum().backward()
            if case == "python":
                inject()
            optimizer.step()
            optimizer.zero_grad()
            slept.append(0.0)
    return slept[:STEPS]


def all_cases(directory, url):
    """Run every case on this rank; return the seconds slept per step of each."""
    results = {}
    for case in (*INLINE, "storage", "straggler", "saving"):
        results[case] = train(case, f"{directory}/{case}", url)
    for case in ("decode", "collate"):
        train(case, f"{directory}/{case}-worker", url, workers=1)
    original = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: SlowWork(original(*args, **kwargs))
    try:
        results["network"] = train("network", f"{directory}/network", url)
    finally:
        dist.all_reduce = original
    return results


def rows_of(directory, rank):
    """Return the seconds per segment of every step of one rank."""
    lines = (directory / "metrics" / f"rank-{rank:05d}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{name: ns / 1e9 for name, ns in row["seg"].items()} for row in rows if "wall_ns" in row]


@pytest.fixture(scope="module")
def injected(tmp_path_factory):
    """Run all cases once; return their directory and what each rank slept."""
    directory = tmp_path_factory.mktemp("injected")
    with ObjectServer(latency_s=DELAY_S / 2) as server:
        for index in range(STEPS):
            server.put(f"object-{index}", b"x" * 1000)
        slept_by_rank = spawn(all_cases, 2, args=(str(directory), server.url), timeout_s=100)
    return directory, slept_by_rank


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "segment"),
    [
        ("decode", "data.decode"),
        ("collate", "data.collate"),
        ("network", "comm.transfer"),
        ("checkpoint", "ckpt.capture"),
        ("optimizer", "optimizer"),
        ("python", "python"),
    ],
)
def test_delay_lands_in_its_segment(injected, case, segment):
    """Every rank: at least 90 % of the delay is there, within 5 % or 2 ms of what was slept."""
    directory, slept_by_rank = injected
    for rank, results in enumerate(slept_by_rank):
        rows = rows_of(directory / case, rank)[WARMUP:]
        expected = results[case][WARMUP:]
        assert len(rows) == len(expected) == STEPS - WARMUP
        found = [row.get(segment, 0.0) for row in rows]
        excess = statistics.median(f - s for f, s in zip(found, expected, strict=True))
        if case == "checkpoint":  # taking the rest of the state takes time too
            rest = [row[segment] for row in rows_of(directory / "saving", rank)[WARMUP:]]
            excess -= statistics.median(rest)

        assert sum(found) >= 0.9 * sum(expected)
        assert abs(excess) <= max(0.05 * DELAY_S, 0.002), (rank, found, expected)


@pytest.mark.timeout(120)
def test_slow_origin_lands_in_storage(injected):
    """The server's latency, two round trips a batch, is time to first byte: data.storage."""
    directory, _ = injected
    for rank in range(2):
        rows = rows_of(directory / "storage", rank)[WARMUP:]
        data = [{n: s for n, s in row.items() if n.startswith("data.")} for row in rows]
        storage = sum(row["data.storage"] for row in data)

        assert storage >= 0.9 * DELAY_S * len(rows)
        assert storage >= 0.9 * sum(sum(row.values()) for row in data)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["decode", "collate"])
def test_delay_in_a_worker_is_told_by_lineage(injected, case):
    """With a worker process at least 90 % of the waits for data are charged to what it did."""
    directory, _ = injected
    rows = [
        row for rank in range(2) for row in rows_of(directory / f"{case}-worker", rank)[WARMUP:]
    ]
    waits = sum(s for row in rows for n, s in row.items() if n.startswith("data."))
    found = sum(row.get(f"data.{case}", 0.0) for row in rows)

    # The rank that is behind waits for its data, the other one mostly for that rank.
    assert waits >= 0.5 * DELAY_S * (STEPS - WARMUP)
    assert found >= 0.9 * waits


@pytest.mark.timeout(120)
def test_slow_rank_is_the_culprit(injected):
    """One rank's delay is backward there, a straggler's wait on the other, with its cause."""
    directory, slept_by_rank = injected
    expected = sum(slept_by_rank[1]["straggler"][WARMUP:])
    found = sum(row["backward"] for row in rows_of(directory / "straggler", 1)[WARMUP:])
    report = Report.from_directory(directory / "straggler" / "metrics", warmup=WARMUP)
    waited = report.segments["comm.straggler"].exposed_s * 2 * report.num_steps

    assert 0.9 * expected <= found
    assert 0.9 * expected <= waited
    worst = report.stragglers[0]
    assert (worst.rank, worst.cause) == (1, "backward")
    assert worst.num_late >= 0.9 * report.num_steps
