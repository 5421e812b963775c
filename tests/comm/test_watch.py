"""watch_backward() finds backward, and DDP's wait after it, from the parameters alone."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainpath.comm import watch_backward
from trainpath.metrics import StepClock
from trainpath.metrics import segments as S
from trainpath.testing import spawn


class Forks(nn.Module):
    """Two branches, each of its own parameters; `side` says which one is used."""

    def __init__(self, depth=10):
        super().__init__()
        self.left = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))
        self.right = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))
        self.side = "left"

    def forward(self, x):
        return getattr(self, self.side)(x)


def run(model, clock, sides):
    """One step for each side; return the segment entered first in each backward."""
    for side in sides:
        model.side = side
        loss = model(torch.ones(2, 3)).sum()
        clock.switch(S.PYTHON)
        loss.backward()
        clock.end_step()
    return [record.segments_ns[S.BACKWARD] > 0 for record in clock.drain()[0]]


def test_backward_is_marked_and_few_hooks_stay():
    """The first passes need a hook on every parameter, the later ones on a few."""
    model = Forks()
    clock = StepClock()
    watch = watch_backward(model.parameters(), clock)
    total = watch.num_hooks

    seen = run(model, clock, ["left"] * 5)

    assert total == 40
    assert watch.num_hooks <= 17
    assert seen == [True] * 5
    assert watch.num_backwards == 5
    assert [segment for _, segment in clock.stamps()][-2:] == [S.PYTHON, S.PYTHON]


def test_alternating_graphs_are_learned():
    """Two graphs without a common parameter, taken in turn, are both marked."""
    model = Forks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clock = StepClock()
    watch = watch_backward(parameters, clock)

    assert run(model, clock, ["left", "right"] * 4) == [True] * 8
    assert watch.num_hooks <= 10


def test_a_graph_that_begins_elsewhere_is_learned():
    """A graph that was never seen is noticed, and learned from its next pass on."""
    model = Forks()
    clock = StepClock()
    watch = watch_backward(model.parameters(), clock)
    run(model, clock, ["left"] * 4)
    few = watch.num_hooks

    changed = run(model, clock, ["right"])
    learning = watch.num_hooks
    later = run(model, clock, ["right"] * 4)

    assert changed == [True]
    assert few < learning == 40
    assert later == [True] * 4
    assert watch.num_hooks <= 18


def test_a_failed_backward_does_not_blind_the_watch():
    """The pass after one that raised is marked again."""
    model = nn.Linear(3, 1)
    clock = StepClock()
    watch = watch_backward(model.parameters(), clock)

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_context, x):
            return x.clone()

        @staticmethod
        def backward(_context, _gradient):
            raise ArithmeticError

    x = torch.ones(2, 3, requires_grad=True)
    try:
        model(Broken.apply(x)).sum().backward()
    except ArithmeticError as error:
        failed = error
    model(x).sum().backward()

    assert failed is not None
    assert watch.num_backwards == 1


def test_close_removes_the_hooks():
    """A closed watch sees and marks nothing more."""
    model = Forks()
    clock = StepClock()
    watch = watch_backward(model.parameters(), clock)
    run(model, clock, ["left"])

    watch.close()
    watch.close()

    assert run(model, clock, ["left"]) == [False]
    assert watch.num_hooks == 0


def ddp_waits():
    """Train stock DDP with rank 1 late in step 2, watched from the optimizer."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Forks(3).left)
    clock = StepClock()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    watch = watch_backward(optimizer.param_groups[0]["params"], clock)
    for step in range(4):
        loss = ddp(torch.ones(2, 3)).sum()
        if step == 2 and dist.get_rank() == 1:
            time.sleep(0.3)
        loss.backward()
        clock.end_step()
    watch.close()
    return clock.drain()[0], [segment for _, segment in clock.stamps()]


def test_the_wait_of_stock_ddp_is_seen():
    """On the rank that is early, DDP's finaliser lies between arrival and departure."""
    (early, segments), (late, _) = spawn(ddp_waits, 2)

    step = [S.BACKWARD, S.COMM_TRANSFER, S.PYTHON, S.PYTHON]
    assert segments == step * 4
    assert early[2].depart_ns - early[2].arrive_ns > 0.25e9
    assert early[2].segments_ns[S.COMM_TRANSFER] > 0.25e9
    assert late[2].arrive_ns - early[2].arrive_ns > 0.25e9
    assert late[2].segments_ns[S.COMM_TRANSFER] < 0.25e9
