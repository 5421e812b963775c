"""The hooks that tell the clock about forward, backward and the optimizer."""

from __future__ import annotations

import threading
import time

import torch
from torch import nn

from trainpath.metrics import SEGMENTS, StepClock
from trainpath.metrics.hooks import ModelHooks, OptimizerHooks

DELAY_S = 0.03


class Slow(torch.autograd.Function):
    """Identity that sleeps in forward and backward."""

    @staticmethod
    def forward(ctx, x, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class SlowModel(nn.Module):
    """A linear layer with a known delay each way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return Slow.apply(self.linear(x), DELAY_S, 2 * DELAY_S)


class SlowSGD(torch.optim.SGD):
    """SGD with a known delay."""

    def step(self, closure=None):
        time.sleep(3 * DELAY_S)
        return super().step(closure)


def run_step(model, optimizer, clock):
    """Do one step with a delay in plain Python; return milliseconds per segment."""
    model(torch.ones(2, 4)).sum().backward()
    time.sleep(4 * DELAY_S)
    optimizer.step()
    record = clock.drain()[0][-1]
    assert sum(record.segments_ns) == record.wall_ns
    return {name: ns / 1e9 for name, ns in zip(SEGMENTS, record.segments_ns, strict=True)}


def test_each_delay_lands_in_its_segment():
    """Known delays in forward, backward, optimizer and Python are charged there."""
    model, clock = SlowModel(), StepClock()
    optimizer = SlowSGD(model.parameters(), lr=0.1)
    ended = []
    hooks = [ModelHooks(model, clock), OptimizerHooks([optimizer], clock, lambda: ended.append(1))]
    run_step(model, optimizer, clock)
    clock.start()
    parts = run_step(model, optimizer, clock)

    for segment, factor in (("forward", 1), ("backward", 2), ("optimizer", 3), ("python", 4)):
        assert parts[segment] >= factor * DELAY_S
        assert parts[segment] <= factor * DELAY_S + 0.9 * DELAY_S, parts
    assert ended == [1, 1]
    for hook in hooks:
        hook.close()
        hook.close()
    assert not model._forward_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_the_last_of_several_optimizers_ends_the_step():
    """A GAN-like loop with two optimizers counts one step a round."""
    model, clock = nn.Linear(2, 2), StepClock()
    first = torch.optim.SGD([model.weight], lr=0.1)
    second = torch.optim.SGD([model.bias], lr=0.1)
    ended = []
    hooks = OptimizerHooks([first, second], clock, lambda: ended.append(1))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        first.step()
        second.step()
    hooks.close()

    assert len(ended) == 3
    assert [record.step for record in clock.drain()[0]] == [0, 1, 2]


def test_evaluation_under_no_grad_is_forward_only():
    """Without gradients there is no backward to wait for."""
    model, clock = nn.Linear(2, 2), StepClock()
    hooks = ModelHooks(model, clock)
    with torch.no_grad():
        model(torch.ones(1, 2))
    clock.end_step()
    hooks.close()

    record = clock.drain()[0][0]
    assert record.segments_ns[SEGMENTS.index("forward")] > 0
    assert record.segments_ns[SEGMENTS.index("backward")] == 0


def busy_loss(output):
    """Return a loss whose computation takes 30 ms of CPU time."""
    until = time.thread_time() + DELAY_S
    while time.thread_time() < until:
        pass
    return output.sum()


def sleepy_loss(output):
    """Return a loss that is computed after a sleep of 60 ms."""
    time.sleep(2 * DELAY_S)
    return output.sum()


def test_what_the_loss_computes_is_forward_and_a_sleep_is_python():
    """CPU time between forward and backward is the loss, part of forward; a sleep is not."""
    model, clock = nn.Linear(4, 1), StepClock()
    hooks = ModelHooks(model, clock)
    for loss in (sleepy_loss, busy_loss, sleepy_loss):
        loss(model(torch.ones(2, 4))).backward()
        clock.end_step()
    hooks.close()

    _, busy, sleepy = clock.drain()[0]

    forward, python = SEGMENTS.index("forward"), SEGMENTS.index("python")
    assert busy.segments_ns[forward] >= 0.9e9 * DELAY_S
    assert sleepy.segments_ns[python] >= 0.9 * 2e9 * DELAY_S
    assert sleepy.segments_ns[forward] < 0.5e9 * DELAY_S
    assert [sum(record.segments_ns) - record.wall_ns for record in (busy, sleepy)] == [0, 0]


def test_a_backward_on_another_thread_leaves_python_alone():
    """CPU times of two threads are not compared: nothing is moved to forward."""
    model, clock = nn.Linear(4, 1), StepClock()
    hooks = ModelHooks(model, clock)
    loss = busy_loss(model(torch.ones(2, 4)))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    clock.end_step()
    hooks.close()

    (record,), _ = clock.drain()

    assert record.segments_ns[SEGMENTS.index("python")] >= 0.9e9 * DELAY_S
