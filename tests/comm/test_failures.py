"""A rank that fails, stays away or leaves: its peers learn of it, and no step is silently wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainpath.comm import GradientReducer
from trainpath.errors import (
    ClosedError,
    ConfigError,
    PeerError,
    PeerTimeoutError,
    UnreducedGradientError,
)
from trainpath.metrics import StepClock
from trainpath.metrics import segments as S
from trainpath.testing import SpawnError, spawn

CAPS = {"bucket_cap_mb": 0.00004, "first_bucket_mb": 0.00004}


class Fuse(torch.autograd.Function):
    """The identity, whose backward raises when it is told to."""

    blow = False

    @staticmethod
    def forward(_context, x):
        return x.clone()

    @staticmethod
    def backward(_context, gradient):
        if Fuse.blow:
            raise ArithmeticError("a bad batch")
        return gradient


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.norm(Fuse.apply(self.first(x))))


def batch(step):
    """The batch of this rank."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, 4, generator=generator)


def gradients(model):
    """Return all gradients as one list."""
    return [p.grad.flatten().tolist() for p in model.parameters()]


def one_bad_backward():
    """Rank 1 fails in the backward of step 2, catches it and goes on, as rank 0 does."""
    torch.manual_seed(0)
    model = Fused()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    reducer = GradientReducer(model, **CAPS)
    reducer.guard(optimizer)
    seen, errors = [], []
    for step in range(5):
        Fuse.blow = step == 2 and dist.get_rank() == 1
        optimizer.zero_grad()
        try:
            model(batch(step)).sum().backward()
        except (ArithmeticError, PeerError) as error:
            errors.append(f"{step} {type(error).__name__} {error}")
            try:
                optimizer.step()
            except UnreducedGradientError as refused:
                errors.append(str(refused))
            continue
        optimizer.step()
        seen.append((step, gradients(model)))
    reducer.close()
    expected = []
    model.train()
    torch.manual_seed(0)
    replica = nn.parallel.DistributedDataParallel(Fused())
    for step in (0, 1, 3, 4):
        Fuse.blow = False
        replica.zero_grad()
        replica(batch(step)).sum().backward()
        expected.append((step, gradients(replica.module)))
    return errors, seen == expected, reducer.stats()["num_steps"]


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)
        self.times = 1

    def forward(self, x):
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.last(x)


def changing_graph(overlap):
    """Use the checkpointed block once, then three times."""
    torch.manual_seed(0)
    model = Recomputed()
    with GradientReducer(model, overlap=overlap, **CAPS):
        for times in (1, 1, 3):
            model.times = times
            model.zero_grad()
            try:
                model(batch(times)).sum().backward()
            except ConfigError as error:
                return str(error)
        mine = gradients(model)
    torch.manual_seed(0)
    model = Recomputed()
    model.times = 3
    model(batch(3)).sum().backward()
    mean = []
    for gradient in gradients(model):
        tensor = torch.tensor(gradient)
        dist.all_reduce(tensor)
        mean.append((tensor / 2).tolist())
    return all(
        torch.allclose(torch.tensor(a), torch.tensor(b)) for a, b in zip(mine, mean, strict=True)
    )


def straggler():
    """Rank 1 is 0.3 s late in step 3; return what the clock of each rank says of it."""
    torch.manual_seed(0)
    model = Fused()
    clock = StepClock()
    reducer = GradientReducer(model, clock=clock, **CAPS)
    for step in range(5):
        loss = model(batch(step)).sum()
        before = clock.switch(S.BACKWARD)
        if step == 3 and dist.get_rank() == 1:
            time.sleep(0.3)
        loss.backward()
        found = clock.switch(before)
        clock.end_step()
    reducer.close()
    records, spans = clock.drain(final=True)
    return records, spans, found, reducer.stats()


def cases():
    """All cases after which both ranks are still in step."""
    return {
        "bad": one_bad_backward(),
        "changing": (changing_graph(False), changing_graph(True)),
    }


@pytest.fixture(scope="module")
def two_ranks():
    """What both ranks saw."""
    return spawn(cases, 2, timeout_s=50)


def test_a_failed_backward_is_told_to_the_peers_and_forgotten(two_ranks):
    """The peers' error names rank and step; the steps after it equal DDP's again."""
    (peer, peer_equal, peer_steps), (failed, failed_equal, failed_steps) = (
        result["bad"] for result in two_ranks
    )

    assert failed[0] == "2 ArithmeticError a bad batch"
    assert peer[0].startswith("2 PeerError the backward of rank 1 failed in step 2")
    assert "zero_grad" in peer[1]
    assert "zero_grad" in failed[1]
    assert peer_equal
    assert failed_equal
    assert peer_steps == failed_steps == 5


def test_a_gradient_that_comes_too_late_is_refused(two_ranks):
    """A graph that repeats a reentrant segment more often than learned gives a way out."""
    for rank, result in enumerate(two_ranks):
        without_overlap, message = result["changing"]
        assert without_overlap is True
        assert f"rank {rank}" in message
        assert "overlap=False" in message


def test_the_clock_shows_the_late_rank():
    """Rank 0 waits for rank 1: arrivals differ by its delay, the wait is comm.transfer."""
    (early, spans, found, stats), (late, _, _, _) = spawn(straggler, 2)

    assert found == S.BACKWARD
    assert all(0 < record.arrive_ns <= record.depart_ns for record in early)
    assert late[3].arrive_ns - early[3].arrive_ns > 0.25e9
    waited = early[3].depart_ns - early[3].arrive_ns
    assert waited > 0.25e9
    assert early[3].segments_ns[S.COMM_TRANSFER] >= waited
    assert early[4].segments_ns[S.COMM_TRANSFER] < 0.25e9
    assert {span.lane for span in spans} == {"gradients"}
    assert {span.segment for span in spans} == {S.COMM_TRANSFER}
    assert sum(span.name.startswith("step 4 ") for span in spans) == stats["num_buckets"] > 1
    assert stats["bytes_sent"] == stats["bytes_reduced"] > 0


def one_stays_away(flag):
    """Rank 1 makes no third backward; rank 0 does, and tries to go on."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    reducer = GradientReducer(model, timeout_s=0.7)
    for step in range(2):
        model(batch(step)).sum().backward()
    messages = []
    if dist.get_rank() == 0:
        for _ in range(2):
            try:
                model(batch(2)).sum().backward()
            except (PeerTimeoutError, ClosedError) as error:
                messages.append(f"{type(error).__name__} {error}")
        Path(flag).touch()
    while not Path(flag).exists():
        time.sleep(0.02)
    reducer.close()
    return messages


def test_a_rank_that_stays_away_is_an_error_not_a_hang(tmp_path):
    """The error names this rank, the step and the bucket; later passes refuse to go on."""
    late, stopped = spawn(one_stays_away, 2, args=(str(tmp_path / "done"),))[0]

    assert late.startswith("PeerTimeoutError rank 0 waited 0.7 s")
    assert "step 2, gradient bucket 0 of 1" in late
    assert "timeout_s" in late
    assert stopped.startswith("ClosedError rank 0")
    assert "PeerTimeoutError in step 2" in stopped


def one_leaves():
    """Rank 1 ends without a word in the middle of the job."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    GradientReducer(model, timeout_s=20)
    model(batch(0)).sum().backward()
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        model(batch(1)).sum().backward()
    except PeerError as error:
        return str(error)
    return None


def test_a_rank_that_leaves_is_an_error_at_once():
    """The lost connection becomes a PeerError that names step and bucket."""
    with pytest.raises(SpawnError) as caught:
        spawn(one_leaves, 2)

    assert set(caught.value.failures) == {1}
    assert "rank 0 lost a peer (step 1, gradient bucket" in caught.value.results[0]
