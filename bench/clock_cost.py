"""What measuring costs: CPU time that the clock and its recorder add to a 5 ms CPU step.

    python bench/clock_cost.py [--step-ms 5] [--pairs 1500]

A small MLP really trains on the CPU. One arm has a `StepClock` that watches the garbage
collector, the 10 switches of an accelerated step on two ranks, the CPU time of the loss
function, a data wait cut by the lineage of a batch of eight samples and counted as background
work; the other arm has none of it. Single steps of the two arms alternate (A B, B A, ...) in
one process, so both meet the same machine; compared is the CPU time of the step thread
(median of the differences in pairs). The CPU time of the recorder's helper thread, which
writes its file meanwhile, is added in full. One JSON line per result. Exit status 1 if more
than 1 % is added. On a busy machine the figures rise, because caches are cold more often.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from trainpath.metrics import Recorder, StepClock
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 0.01
SAMPLES = 8


class Job:
    """A model, its optimizer and its data."""

    def __init__(self, width: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = [
            layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
        ]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.samples = [torch.randn(batch // SAMPLES, width) for _ in range(SAMPLES)]
        self.labels = torch.randint(10, (batch // SAMPLES * SAMPLES,))

    def batch(self) -> tuple[torch.Tensor, list[tuple[int, int, int]]]:
        """Make a batch and its lineage, as a worker would: the same work in both arms."""
        asked = time.monotonic_ns()
        x = torch.cat([sample * 0.5 for sample in self.samples])
        piece = (time.monotonic_ns() - asked) // (2 * SAMPLES + 1)
        stages = [
            (S.DATA_DECODE if i % 2 else S.DATA_STORAGE, asked + i * piece, asked + (i + 1) * piece)
            for i in range(2 * SAMPLES)
        ]
        stages.append((S.DATA_COLLATE, stages[-1][2], stages[-1][2] + piece))
        return x, stages


def plain_step(job: Job) -> None:
    x, _ = job.batch()
    loss = torch.nn.functional.cross_entropy(job.model(x), job.labels)
    loss.backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def measured_step(job: Job, clock: StepClock) -> None:
    clock.ask()
    x, stages = job.batch()
    clock.got(stages, S.H2D)
    clock.add_stages("worker 0", stages, "batch 1")
    clock.switch(S.FORWARD)
    output = job.model(x)
    forward_ended = time.thread_time_ns()
    clock.switch(S.PYTHON)
    loss = torch.nn.functional.cross_entropy(output, job.labels)
    clock.switch(S.BACKWARD)
    clock.charge_loss(time.thread_time_ns() - forward_ended)
    loss.backward()
    clock.switch(S.PYTHON)
    clock.depart(clock.arrive())
    clock.switch(S.OPTIMIZER)
    job.optimizer.step()
    clock.end_step()
    job.optimizer.zero_grad()


def find_job(step_s: float) -> Job:
    """Return the narrowest job whose step takes at least `step_s` of CPU time."""
    for width in range(64, 2048, 32):
        job = Job(width, 64)
        for _ in range(3):
            plain_step(job)
        if min(cpu_s(plain_step, job) for _ in range(15)) >= step_s:
            return job
    raise SystemExit("no size of the model takes that long")


def cpu_s(function: Callable[..., None], *args: object) -> float:
    """Return the CPU seconds that a call takes of this thread."""
    begin = time.thread_time_ns()
    function(*args)
    return (time.thread_time_ns() - begin) / 1e9


def interleave(job: Job, num_pairs: int) -> tuple[list[float], list[float], float]:
    """Return CPU seconds of each step of both arms, and of the helper thread a step."""
    plain, measured = [], []
    clock = StepClock()
    clock.watch_gc()
    with (
        tempfile.TemporaryDirectory() as directory,
        Recorder(clock, directory=directory) as recorder,
    ):
        for index in range(num_pairs):
            if index % 2:
                measured.append(cpu_s(measured_step, job, clock))
            plain.append(cpu_s(plain_step, job))
            if index % 2 == 0:
                measured.append(cpu_s(measured_step, job, clock))
        recorder.flush()
        helper = helper_s() / num_pairs
    clock.close()
    return plain, measured, helper


def helper_s() -> float:
    """Return the CPU seconds of the helper thread so far."""
    (thread,) = [t for t in threading.enumerate() if t.name == "trainpath-metrics"]
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--pairs", type=int, default=1500, help="steps of each arm")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    job = find_job(arguments.step_ms / 1e3)
    plain, measured, helper = interleave(job, arguments.pairs)
    step_s = statistics.median(plain)
    thread_s = statistics.median(m - p for p, m in zip(plain, measured, strict=True))
    quiet_s = statistics.quantiles(measured, n=4)[0] - statistics.quantiles(plain, n=4)[0]
    added = (thread_s + helper) / step_s
    result = {
        "bench": "clock_cost",
        "step_cpu_ms": spread(plain),
        "measured_step_cpu_ms": spread(measured),
        "step_thread_us": round(1e6 * thread_s, 1),
        "step_thread_us_of_quiet_quarter": round(1e6 * quiet_s, 1),
        "helper_thread_us": round(1e6 * helper, 1),
        "added": round(added, 5),
        "limit": LIMIT,
        "pairs": arguments.pairs,
        "load": os.getloadavg()[0],
    }
    print(json.dumps(result))
    print(json.dumps(direct()))
    return int(added > LIMIT)


def direct() -> dict[str, object]:
    """Return the parts of the cost, each measured alone, in microseconds of CPU a step."""
    clock = StepClock()
    number = 2000
    begin = time.process_time()
    for _ in range(number):
        for _ in range(20):
            clock.switch(S.PYTHON)
    switches = time.process_time()
    for _ in range(number):
        clock.end_step()
    ends = time.process_time()
    records, _ = clock.drain()
    drained = time.process_time()
    from trainpath.metrics.records import encode_step

    "".join([encode_step(record) for record in records])
    encoded = time.process_time()
    return {
        "bench": "clock_cost.parts_us_a_step",
        "20 switches": round((switches - begin) / number * 1e6, 2),
        "end_step": round((ends - switches) / number * 1e6, 2),
        "drain": round((drained - ends) / number * 1e6, 2),
        "encode": round((encoded - drained) / number * 1e6, 2),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return median, min and max in milliseconds."""
    return {
        "median": round(1e3 * statistics.median(values), 4),
        "min": round(1e3 * min(values), 4),
        "max": round(1e3 * max(values), 4),
    }


if __name__ == "__main__":
    sys.exit(main())
