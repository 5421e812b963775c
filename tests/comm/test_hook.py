"""comm_hook() measures torch DDP and leaves its bits alone."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trainpath.comm import comm_hook
from trainpath.errors import ConfigError
from trainpath.metrics import StepClock
from trainpath.testing import spawn


def build():
    """A model of several DDP buckets, alike on all ranks."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 1))
    return DistributedDataParallel(model, bucket_cap_mb=0.1)


def train(ddp, clock=None, late_in=None, steps=5):
    """Train; return the parameters of each step."""
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for step in range(steps):
        x = torch.randn(4, 6, generator=generator)
        loss = ddp(x).square().mean()
        if step == late_in and dist.get_rank() == 1:
            time.sleep(0.3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if clock is not None:
            clock.end_step()
        seen.append([p.detach().clone() for p in ddp.parameters()])
    return seen


def equal(left, right):
    """Whether two trainings agree to the bit."""
    return all(
        torch.equal(a, b)
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def measured():
    """Train stock DDP and DDP with our hook; return equality and what the clock saw."""
    expected = train(build())
    clock = StepClock()
    ddp = build()
    hook = comm_hook(ddp, clock=clock)
    same = equal(expected, train(ddp, clock, late_in=3))
    records, spans = clock.drain(final=True)
    stats = hook.stats()
    hook.close()
    hook.close()
    train(ddp, steps=1)
    silent = clock.drain(final=True)
    again = comm_hook(ddp, clock=clock)
    train(ddp, clock, steps=2)  # the last bucket's end may be noticed in the step after
    back = len(clock.drain(final=True)[1]) > 0 and again is hook
    copied = copy.deepcopy(ddp.module)  # the module inside has no trace of us
    copied(torch.ones(1, 6)).sum().backward()
    return same, records, spans, stats, silent, back


def refused():
    """Return the errors of a second hook and of a plain model."""
    messages = []
    ddp = build()
    ddp.register_comm_hook(None, allreduce_hook)
    for model in (ddp, ddp.module):
        try:
            comm_hook(model)
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_hook_keeps_the_bits_and_marks_the_waits():
    """Equal to DDP without a hook on three ranks; DDP's own wait lies between the marks."""
    results = spawn(measured, 3)

    assert all(same for same, *_ in results)
    (_, early, spans, stats, silent, back), (_, late, *_), _ = results
    assert all(0 < record.arrive_ns <= record.depart_ns for record in early)
    assert late[3].arrive_ns - early[3].arrive_ns > 0.25e9
    assert early[3].depart_ns - early[3].arrive_ns > 0.25e9
    assert {span.lane for span in spans} == {"gradients"}
    assert stats["num_steps"] == 5
    assert stats["bytes_sent"] == stats["bytes_reduced"] * 4 // 3
    assert silent == ([], [])
    assert back


@pytest.mark.timeout(40)
def test_a_second_hook_is_refused():
    """DDP takes one hook only; a plain model takes none. Both errors say what to do."""
    second, plain = spawn(refused, 1)[0]

    assert "has a communication hook already" in second
    assert "GradientReducer(model)" in plain
