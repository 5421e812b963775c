"""Gradient communication on loopback, two ranks, one core each where there are two.

Claim: GradientReducer gives gradients equal to torch DDP's, bit for bit, on the same model and
batches. It is not faster here: it has taken 1 to 9 % more CPU time of a step than DDP, whose
reducer is C++, and the times of steps differ by less than they scatter. Three arms, interleaved
block by block in one pair of processes: stock DDP, the reducer, and no communication at all
(`no_sync`, the floor).

    python bench/comm_overlap.py [--blocks 7] [--steps 8] [--width 1024] [--layers 8]

One JSON line per arm: median, min and max seconds of a step on rank 0, CPU seconds of a
step summed over both ranks, load of others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainpath.comm import GradientReducer
from trainpath.testing import spawn


def build(layers, width):
    """Return the same model on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


class Arm:
    """One way to reduce, with its own copy of the model."""

    def __init__(self, name, layers, width):
        self.name = name
        model = build(layers, width)
        self.parameters = list(model.parameters())
        self.reducer = None
        self.context = contextlib.nullcontext
        self.call = model
        if name == "reducer":
            self.reducer = GradientReducer(model)
        else:
            self.call = DistributedDataParallel(model)
            if name == "no_comm":
                self.context = self.call.no_sync
        self.seconds = []
        self.cpu_seconds = []

    def block(self, batches):
        """Run one block of steps and note the time of each."""
        dist.barrier()
        for x in batches:
            cpu = time.process_time()
            start = time.perf_counter()
            with self.context():
                self.call(x).square().mean().backward()
            self.seconds.append(time.perf_counter() - start)
            self.cpu_seconds.append(time.process_time() - cpu)
            self.last = [p.grad.clone() for p in self.parameters]
            for parameter in self.parameters:
                parameter.grad = None


def rank_main(blocks, steps, layers, width, batch):
    """Interleave the arms and return their times."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    arms = [Arm(name, layers, width) for name in ("ddp", "reducer", "no_comm")]
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(batch, width, generator=generator) for _ in range(steps)]
    for arm in arms:
        arm.block(batches[:3])  # DDP and the reducer cut their buckets anew
        arm.seconds.clear()
        arm.cpu_seconds.clear()
    for number in range(blocks):
        for arm in arms if number % 2 == 0 else reversed(arms):
            arm.block(batches)
    equal = all(map(torch.equal, arms[0].last, arms[1].last))
    return {arm.name: (arm.seconds, arm.cpu_seconds, equal) for arm in arms}


def main():
    """Print one JSON line per arm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    values = (options.blocks, options.steps, options.layers, options.width, options.batch)
    results = spawn(rank_main, 2, args=values, timeout_s=600)
    megabytes = options.layers * options.width * (options.width + 1) * 4 / 1e6
    for name in ("ddp", "reducer", "no_comm"):
        seconds, _, equal = results[0][name]
        cpu = [sum(pair) for pair in zip(*(r[name][1] for r in results), strict=True)]
        print(
            json.dumps(
                {
                    "bench": "comm_overlap",
                    "arm": name,
                    "gradients_mb": round(megabytes, 1),
                    "median_s": round(statistics.median(seconds), 5),
                    "min_s": round(min(seconds), 5),
                    "max_s": round(max(seconds), 5),
                    "cpu_median_s": round(statistics.median(cpu), 5),
                    "cpu_min_s": round(min(cpu), 5),
                    "steps": len(seconds),
                    "gradients_equal_ddp": equal if name == "reducer" else None,
                    "load_before": round(load, 2),
                }
            )
        )


if __name__ == "__main__":
    main()
