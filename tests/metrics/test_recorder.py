"""The recorder: files, rows across ranks, ends of every kind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from torch.distributed import HashStore

from trainpath.errors import ConfigError
from trainpath.metrics import NULL_CLOCK, Recorder, Report, Span, StepClock
from trainpath.metrics import segments as S
from trainpath.metrics.exchange import Collector, Publisher


@pytest.fixture(autouse=True)
def fresh_job(monkeypatch):
    """Make each test a job of its own: ranks count their recorders from zero."""
    monkeypatch.setattr("trainpath.metrics.recorder._num_made", Counter())


def do_steps(clock, number):
    """Do steps on `clock`: a cut wait, compute, one exchange of gradients."""
    for _ in range(number):
        clock.ask()
        begin = clock.now_ns()
        while clock.now_ns() < begin + 60_000:
            pass
        stages = [(S.DATA_DECODE, begin, begin + 50_000)]
        clock.got(stages, S.FORWARD)
        clock.add_stages("worker 0", stages, "batch")
        clock.switch(S.BACKWARD)
        clock.depart(clock.arrive())
        clock.switch(S.OPTIMIZER)
        clock.end_step()


def read_lines(path):
    """Return the objects of a JSONL file; every line must be complete."""
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


class CountingStore:
    """A store that fails the test if anybody waits for a missing key."""

    def __init__(self):
        self.store = HashStore()
        self.keys = set()

    def set(self, key, value):
        """Put."""
        self.keys.add(key)
        self.store.set(key, value)

    def check(self, keys):
        """Look."""
        return self.store.check(keys)

    def get(self, key):
        """Get, never a missing one."""
        assert self.store.check([key])
        return self.store.get(key)


def test_files_of_an_orderly_run(tmp_path):
    """Header, one line a step that sums to its wall, footer, trace and report are written."""
    clock = StepClock()
    clock.set_parallelism(S.DATA_DECODE, 2)
    with Recorder(clock, directory=tmp_path, mode="observe") as recorder:
        do_steps(clock, 20)
        now = clock.now_ns()
        clock.add_span(Span("ckpt writer", S.CKPT_BACKPRESSURE, now - 10, now, "write 19"))
        do_steps(clock, 1)
        recorder.flush()
        assert len(read_lines(tmp_path / "rank-00000.jsonl")) >= 22

    header, *rows, footer = read_lines(tmp_path / "rank-00000.jsonl")
    steps = [row for row in rows if row["kind"] == "step"]
    assert (header["rank"], header["world_size"], header["mode"]) == (0, 1, "observe")
    assert header["pid"] == os.getpid()
    assert [row["step"] for row in steps] == list(range(21))
    assert all(sum(row["seg"].values()) == row["wall_ns"] for row in steps)
    assert all(row["arrive_ns"] <= row["depart_ns"] for row in steps)
    assert sum(row["busy"].get("data.decode", 0) for row in steps) == 21 * 50_000
    assert [row["name"] for row in rows if row["kind"] == "span"] == ["write 19"]
    assert (footer["kind"], footer["reason"], footer["num_steps"]) == ("footer", "end", 21)
    assert footer["parallelism"] == {"data.decode": 2}
    assert footer["clock_ns"] > 0
    assert footer["helper_ns"] > 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["num_steps"] == 18
    assert report["checkpoint"]["num_saves"] == 1
    assert Report.from_directory(tmp_path).segments["data.decode"].busy_s == pytest.approx(5e-5)


def test_trace_is_a_chrome_trace(tmp_path):
    """The trace has complete events in microseconds, and a name for every process and thread."""
    clock = StepClock()
    with Recorder(clock, directory=tmp_path):
        do_steps(clock, 5)

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {event["pid"] for event in events} == {0}
    assert {names[event["tid"]] for event in spans} == {"steps", "step thread", "worker 0"}
    steps = [event for event in spans if event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == [f"step {i}" for i in range(5)]
    assert all(event["dur"] >= 0 for event in spans)
    inside = [
        event["dur"]
        for event in spans
        if names[event["tid"]] == "step thread" and event["ts"] < steps[-1]["ts"]
    ]
    walls = sum(step["dur"] for step in steps[:-1])
    assert sum(inside) == pytest.approx(walls, rel=0.05)


def test_rows_of_all_ranks_reach_rank_0(tmp_path):
    """Rank 0 joins the rows of the others through the store, and merges their traces."""
    store = CountingStore()
    clocks = [StepClock() for _ in range(3)]
    recorders = [
        Recorder(
            clock,
            directory=tmp_path,
            rank=rank,
            world_size=3,
            store=store,
            interval_s=0.05,
            steps_per_s=float("inf"),
            warmup=0,
        )
        for rank, clock in enumerate(clocks)
    ]
    for clock in clocks:
        do_steps(clock, 150)

    report = recorders[0].report(timeout_s=20)
    alone = recorders[1].report(timeout_s=5)
    for recorder in reversed(recorders):
        recorder.close()

    assert (report.ranks, report.num_steps) == ((0, 1, 2), 150)
    assert not any("missing" in note or "no steps of" in note for note in report.notes)
    assert (alone.ranks, alone.world_size) == ((1,), 1)
    assert Report.from_directory(tmp_path, warmup=0).ranks == (0, 1, 2)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}


def test_a_silent_rank_is_waited_for_no_longer_than_asked(tmp_path):
    """Without the rows of a rank the report comes at the deadline and says who is missing."""
    clock = StepClock()
    with Recorder(
        clock, world_size=2, store=HashStore(), interval_s=0.05, steps_per_s=float("inf")
    ) as recorder:
        do_steps(clock, 5)
        begin = time.monotonic()

        report = recorder.report(timeout_s=0.3)

        assert 0.3 <= time.monotonic() - begin < 5
        assert report.num_steps == 2
        assert any("no steps of rank 1" in note for note in report.notes)


def test_the_store_holds_a_bounded_amount():
    """A rank that nobody reads overwrites its own keys; the reader counts what it lost."""
    store = CountingStore()
    publisher = Publisher(store, "p", rank=1, header="")
    collector = Collector(store, "p", [1])
    publisher.publish(["a\n"], "status\n")
    assert list(collector.fetch()) == [(1, ["a", "status"])]
    assert list(collector.fetch()) == []
    for index in range(100):
        publisher.publish([f"{index}\n"], "")

    fetched = list(collector.fetch())

    assert len(store.keys) == 32
    assert [lines for _, lines in fetched] == [[str(index)] for index in range(68, 100)]
    assert collector.num_lost == 68
    publisher.publish([f"{index}\n" for index in range(130)], "s\n")
    assert [len(lines) for _, lines in collector.fetch()] == [65, 65, 3]


def test_a_broken_store_is_said_and_harmless():
    """A store whose server is gone costs a note in the report, nothing else."""

    class Gone:
        def set(self, *_args):
            raise ConnectionError("connection reset")

        def check(self, *_args):
            raise ConnectionError("connection reset")

        get = check

    clock = StepClock()
    with Recorder(
        clock, rank=0, world_size=2, store=Gone(), interval_s=0.05, steps_per_s=float("inf")
    ) as recorder:
        do_steps(clock, 5)
        report = recorder.report(timeout_s=0.2)
        report = recorder.report(timeout_s=0.2)

    assert report.num_steps == 2
    assert any("connection reset" in note for note in report.notes)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_and_harmless(tmp_path):
    """Where the disk is full, steps go on in memory and the report says that lines are missing."""
    (tmp_path / "rank-00000.jsonl").symlink_to("/dev/full")
    (tmp_path / f"report.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    clock = StepClock()
    with Recorder(clock, directory=tmp_path) as recorder:
        do_steps(clock, 5)
        recorder.flush()
        report = recorder.report()

    assert report.num_steps == 2
    assert any("No space left" in note for note in report.notes)
    assert not list(tmp_path.glob("*.tmp"))


def test_unwritable_directory(tmp_path):
    """A directory that cannot be made is one clear error at once, not later in a thread."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"rank 0 cannot write metrics to .*file"):
        Recorder(StepClock(), directory=tmp_path / "file" / "below")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"rank": 2, "world_size": 2},
        {"interval_s": 0},
        {"window": 0},
        {"warmup": -1},
        {"steps_per_s": 0},
    ],
)
def test_bad_arguments(kwargs):
    """Arguments that make no sense are refused."""
    with pytest.raises(ConfigError):
        Recorder(StepClock(), **kwargs)


def test_close_twice_and_report_afterwards(tmp_path):
    """A second close does nothing, a report still works, and the thread is gone."""
    clock = StepClock()
    recorder = Recorder(clock, directory=tmp_path)
    do_steps(clock, 5)
    recorder.close(reason="KeyboardInterrupt")
    size = (tmp_path / "rank-00000.jsonl").stat().st_size
    recorder.close()
    recorder.flush()

    assert (tmp_path / "rank-00000.jsonl").stat().st_size == size
    assert "ended by: KeyboardInterrupt" in str(recorder.report())
    assert not any(t.name == "trainpath-metrics" for t in threading.enumerate())


def test_null_clock_and_empty_run(tmp_path):
    """Nothing measured is a report without steps, not an error."""
    with Recorder(NULL_CLOCK, directory=tmp_path) as recorder:
        assert recorder.report().num_steps == 0
    assert Report.from_directory(tmp_path).num_steps == 0


def test_window_bounds_memory():
    """Only the newest `window` steps are kept; the report says so."""
    clock = StepClock()
    with Recorder(clock, window=10) as recorder:
        do_steps(clock, 30)
        report = recorder.report()

    assert (report.first_step, report.last_step, report.total_steps) == (20, 29, 30)
    assert any("newest 10 of 30 steps" in note for note in report.notes)


def test_sinks_get_every_step_and_may_fail():
    """A sink gets the seconds of each step; one that raises is dropped and named."""

    class Values:
        def __init__(self):
            self.rows = []
            self.closed = 0

        def write(self, step, values):
            self.rows.append((step, values))

        def close(self):
            self.closed += 1

    class Broken(Values):
        def write(self, step, values):
            raise RuntimeError("quota exceeded")

    good, bad = Values(), Broken()
    clock = StepClock()
    with Recorder(clock, sinks=[bad, good]) as recorder:
        do_steps(clock, 4)
        recorder.flush()
        report = recorder.report()

    assert [step for step, _ in good.rows] == [0, 1, 2, 3]
    for _, values in good.rows:
        parts = sum(value for name, value in values.items() if name != "step_s")
        assert parts == pytest.approx(values["step_s"])
    assert good.closed == 1
    assert any("quota exceeded" in note for note in report.notes)


SCRIPT = """
import os, signal, sys, time
from trainpath.metrics import Recorder, StepClock
clock = StepClock()
recorder = Recorder(clock, directory=sys.argv[1], interval_s=0.02, steps_per_s=float("inf"))
for _ in range(50):
    time.sleep(0.001)
    clock.end_step()
recorder.flush()
clock.end_step()
"""

ENDS = {
    "exit": ("", "end"),
    "exception": ("raise ArithmeticError('boom')", "ArithmeticError"),
    "ctrl-c": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", "KeyboardInterrupt"),
    "kill -9": ("os.kill(os.getpid(), signal.SIGKILL); time.sleep(30)", None),
    "forked child": ("pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)", "end"),
}


@pytest.mark.parametrize("end", ENDS)
def test_ends_of_a_process(tmp_path, end):
    """However a process ends, its lines are complete; but for kill -9 all of them are there."""
    code, reason = ENDS[end]
    script = textwrap.dedent(SCRIPT) + code
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, check=False, timeout=50
    )

    rows = read_lines(tmp_path / "rank-00000.jsonl")
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    footers = [row for row in rows if row["kind"] == "footer"]
    if reason is None:
        assert done.returncode == -signal.SIGKILL
        assert steps == list(range(len(steps)))
        assert len(steps) >= 50
        assert footers == []
        assert any("no footer" in note for note in Report.from_directory(tmp_path).notes)
    else:
        assert steps == list(range(51))
        assert [row["reason"] for row in footers] == [reason]
        assert (tmp_path / "report.json").exists()
        assert (tmp_path / "trace.json").exists()
    assert [path.name for path in tmp_path.glob("*.tmp")] == []


def test_importing_metrics_does_not_import_torch():
    """`trainpath report` must not pay for torch."""
    check = "import sys, trainpath.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_of_a_fast_run_only_some_steps_are_recorded(tmp_path):
    """Beyond `steps_per_s` only multiples of a power of two are kept; the report counts all."""
    clock = StepClock()
    with Recorder(clock, directory=tmp_path, steps_per_s=10.0) as recorder:
        for _ in range(2):
            for _ in range(100):
                clock.end_step()
            recorder.flush()
        report = recorder.report()
        every = clock.record_every

    rows = [json.loads(line) for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert every >= 64
    assert steps[:100] == list(range(100))
    assert all(step % every == 0 for step in steps[101:])
    assert clock.num_skipped == 200 - len(steps) > 0
    assert report.total_steps == 200
    assert any("short steps were not recorded" in note for note in report.notes)
