"""The recorder: drains the step clock on a helper thread, keeps, writes and shares it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING

from trainpath.errors import ConfigError
from trainpath.metrics.costs import Costs
from trainpath.metrics.exchange import Collector, KeyValueStore, Publisher
from trainpath.metrics.records import (
    CKPT_SEGMENTS,
    RankLog,
    RankStatus,
    encode_info,
    encode_span,
    encode_status,
    encode_step,
    own_info,
    rank_file_name,
)
from trainpath.metrics.report import DEFAULT_WARMUP, DEFAULT_WINDOW, Report
from trainpath.metrics.segments import SEGMENTS
from trainpath.metrics.sinks.chrome import ChromeTrace
from trainpath.metrics.sinks.jsonl import JsonLines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from trainpath.metrics.clock import Span, StepClock, StepRecord
    from trainpath.types import Sink

__all__ = ["Recorder"]

_TRACE_STEPS = 200
_TRACE_SPANS = 20_000
_TOTAL_ROWS = 65_536  # steps in memory, all ranks together
_POLL_S = 0.02
_num_made: Counter[int] = Counter()  # recorders that share rows, by rank: names their keys


class Recorder:
    """Records what a step clock measures, for one rank.

    Args:
        clock: The clock to drain; nobody else may drain it.
        directory: Where `rank-00000.jsonl` goes (one file per rank), and at the end
            `trace.json` and rank 0's `report.json`; None keeps everything in memory.
        rank: This rank.
        world_size: Number of ranks.
        mode: Name of what is measured; the baseline's name in comparisons.
        store: Key-value store of the job (`set`, `get`, `check` as a torch `Store`), through
            which rank 0 gets the others' rows; every rank must make its recorders in the
            same order.
        interval_s: How often the helper thread works.
        window: Newest steps kept for the report.
        warmup: First steps that the report leaves out.
        sinks: More destinations, called on the helper thread.
        steps_per_s: Most steps a second that are recorded. Of a faster run only every second,
            fourth, ... step is, the same ones on every rank, and the report says so: recording
            one takes some 35 us of CPU time, too much for 1 % of a step of 5 ms
            (`bench/clock_cost.py`). Infinity records all.

    Cost:
        One thread (`trainpath-metrics`; `bench/clock_cost.py` shows its CPU time), 0.5 KB a
        step in the file; up to `window` steps of memory (1.5 KB each; 65536 in all on rank
        0). The store holds at most 2048 rows of each rank. The step thread does nothing.

    Guarantee:
        Lines are complete however the process ends; what a kill loses is at most the last
        `interval_s`. Trouble with the disk, the store or a sink never reaches the training
        loop: it is said in the report. A forked child records nothing.
    """

    def __init__(
        self,
        clock: StepClock,
        *,
        directory: str | Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        mode: str = "on",
        store: KeyValueStore | None = None,
        interval_s: float = 1.0,
        window: int = DEFAULT_WINDOW,
        warmup: int = DEFAULT_WARMUP,
        sinks: Sequence[Sink] = (),
        steps_per_s: float = 64.0,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank {rank} is not one of {world_size} ranks")
        if interval_s <= 0 or window < 1 or warmup < 0 or not steps_per_s > 0:
            raise ConfigError(
                "interval_s, window and steps_per_s must be positive, warmup not negative"
            )
        self._clock = clock
        self._rank = rank
        self._world_size = world_size
        self._mode = mode
        self._interval_s = interval_s
        self._warmup = warmup
        self._sinks = list(sinks)
        self._pid = os.getpid()
        kept = min(window, max(64, _TOTAL_ROWS // world_size)) if rank == 0 else window
        self._info = own_info(rank, world_size, mode)
        ranks = range(world_size) if rank == 0 and store is not None else [rank]
        self._logs = {r: RankLog.empty(r, window=kept) for r in ranks}
        self._logs[rank].begin(self._info)
        self._directory = None if directory is None else Path(directory)
        self._file = self._open_file()
        self._spans: deque[Span] = deque(maxlen=_TRACE_SPANS)
        self._publisher: Publisher | None = None
        self._collector: Collector | None = None
        if store is not None and world_size > 1:
            self._join_exchange(store)
        self._problems: dict[str, str] = {}
        self._costs = Costs(clock, steps_per_s)
        self._parallelism = clock.parallelism
        self._lock = threading.Lock()
        self._served = threading.Condition(threading.Lock())
        self._num_requested = 0
        self._num_served = 0
        self._wake = threading.Event()
        self._reason: str | None = None
        self._closed = False
        self._write([encode_info(self._info)])
        self._thread = threading.Thread(target=self._work, name="trainpath-metrics", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def _open_file(self) -> JsonLines | None:
        if self._directory is None:
            return None
        path = self._directory / rank_file_name(self._rank)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return JsonLines(path)
        except OSError as error:
            raise ConfigError(
                f"rank {self._rank} cannot write metrics to {path}: {error.strerror}; give a "
                "writable metrics_dir, or none to keep them in memory"
            ) from error

    def _join_exchange(self, store: KeyValueStore) -> None:
        # A connection of its own, where the store can make one: a call of the training
        # thread that waits for a key must not hold up ours, nor ours its.
        with contextlib.suppress(RuntimeError, AttributeError):
            store = store.clone()  # type: ignore[attr-defined]
        prefix = f"metrics/{_num_made[self._rank]}"
        _num_made[self._rank] += 1
        if self._rank == 0:
            self._collector = Collector(store, prefix, range(1, self._world_size))
        else:
            header = encode_info(self._info)
            self._publisher = Publisher(store, prefix, rank=self._rank, header=header)

    # The helper thread.

    def _work(self) -> None:
        while True:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            with self._served:
                requested = self._num_requested
            final = self._reason is not None
            try:
                self._cycle(final=final, asked=requested != self._num_served)
            except Exception as error:
                self._problem("helper thread", error)
            with self._served:
                self._num_served = requested
                self._served.notify_all()
            if final:
                return

    def _cycle(self, *, final: bool, asked: bool = False) -> None:
        """Drain, keep, write and share."""
        steps, spans = self._clock.drain(final=final)
        self._clock.record_every = self._costs.affordable(self._clock.record_every)
        self._spans.extend(spans)
        lines = []
        if self._file is not None or self._publisher is not None:
            lines = [encode_step(step) for step in steps]
            lines += [encode_span(span) for span in spans if span.segment in CKPT_SEGMENTS]
        self._send_to_sinks(steps)
        changed = self._clock.parallelism != self._parallelism
        self._parallelism = self._clock.parallelism
        with self._lock:
            own = self._logs[self._rank]
            own.add(steps, spans)
            own.status = status = self._status(fresh=asked or final)
        if changed and not final:
            lines.append(encode_status(status))
        self._write(lines)
        if final:
            self._write([encode_status(self._status(), kind="footer")])
            if self._rank != 0:
                self._write_trace()
        self._share(lines, final=final)

    def _share(self, lines: list[str], *, final: bool) -> None:
        try:
            if self._publisher is not None and (lines or final):
                self._publisher.publish(lines, encode_status(self._status()))
            if self._collector is not None:
                for rank, text in self._collector.fetch():
                    with self._lock:
                        self._read_peer(self._logs[rank], text)
        except Exception as error:  # whatever a store raises when its server is gone
            self._problem("store of the job", error)

    @staticmethod
    def _read_peer(log: RankLog, lines: list[str]) -> None:
        # Slots repeat the header; only the first one begins the log.
        log.read(line for line in lines if log.info is None or '"header"' not in line[:20])

    def _send_to_sinks(self, steps: list[StepRecord]) -> None:
        for sink in list(self._sinks):
            try:
                for step in steps:
                    sink.write(step.step, _values(step))
            except Exception as error:
                self._sinks.remove(sink)
                self._problem(f"sink {type(sink).__name__}, no longer used", error)

    def _write(self, lines: list[str]) -> None:
        if self._file is not None and lines:
            self._file.append("".join(lines))
            if self._file.problem:
                self._problems["file"] = self._file.problem

    def _problem(self, where: str, error: BaseException) -> None:
        text = str(error).partition("\n")[0][:200]
        self._problems.setdefault(where, f"{where}: {type(error).__name__}: {text}")

    def _status(self, *, fresh: bool = False) -> RankStatus:
        lost = self._collector.num_lost if self._collector is not None else 0
        problems = list(self._problems.values())
        if lost:
            problems.append(f"{lost} messages of other ranks were overwritten before being read")
        if self._clock.num_skipped:
            problems.append(
                f"{self._clock.num_skipped} short steps were not recorded, which keeps the cost of "
                "measuring under 1 %"
            )
        return RankStatus(
            num_steps=self._logs[self._rank].total_steps + self._clock.num_skipped,
            dropped_steps=self._clock.num_dropped,
            dropped_spans=self._clock.num_spans_dropped,
            parallelism=self._parallelism,
            elapsed_ns=self._costs.elapsed_ns(),
            clock_ns=self._costs.clock_ns(),
            helper_ns=self._costs.helper_ns(self._thread),
            cpu_stall_us=self._costs.cpu_stall_us(fresh=fresh),
            reason=self._reason,
            problems=tuple(problems),
        )

    # The caller's threads.

    def report(self, *, timeout_s: float = 5.0) -> Report:
        """Return where the step time went so far.

        On rank 0 it is about all ranks: it waits at most `timeout_s` for their rows up to
        its own last step, and says which are missing. On other ranks it is about the rank.
        """
        deadline = time.monotonic() + timeout_s
        notes: list[str] = []
        if self._pid == os.getpid():
            if not self._serve(deadline):
                notes.append("the helper thread is late: the newest steps are not in here")
            self._wait_for_peers(deadline, self._has_all_rows)
            acquired = self._lock.acquire(timeout=max(0.1, timeout_s))
            try:
                return self._make_report(notes)
            finally:
                if acquired:
                    self._lock.release()
        return self._make_report(["made in a forked child: nothing newer than the fork"])

    def _make_report(self, notes: list[str]) -> Report:
        if self._rank != 0:
            notes.append(f"rank {self._rank} alone; rank 0's report joins all ranks")
        return Report.from_logs(
            list(self._logs.values()),
            world_size=self._world_size if self._rank == 0 else 1,
            mode=self._mode,
            warmup=self._warmup,
            notes=notes,
        )

    def flush(self, *, timeout_s: float = 5.0) -> None:
        """Write and share the steps finished so far."""
        if self._pid == os.getpid():
            self._serve(time.monotonic() + timeout_s)

    def _serve(self, deadline: float) -> bool:
        """Have the helper work once, from now; return whether it did before the deadline."""
        with self._served:
            self._num_requested += 1
            mine = self._num_requested
            self._wake.set()
            while self._num_served < mine:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._thread.is_alive():
                    return not self._thread.is_alive()
                self._served.wait(min(remaining, 0.5))
        return True

    def _wait_for_peers(self, deadline: float, done: Callable[[RankLog], bool]) -> None:
        if self._collector is None:
            return
        while time.monotonic() < deadline and self._thread.is_alive():
            with self._lock:
                if all(done(log) for rank, log in self._logs.items() if rank != 0):
                    return
            time.sleep(_POLL_S)
            self._serve(deadline)

    def _has_all_rows(self, log: RankLog) -> bool:
        own = self._logs[self._rank].steps
        return _has_ended(log) or not own or bool(log.steps and log.steps[-1].step >= own[-1].step)

    def close(self, *, reason: str = "end", timeout_s: float = 2.0) -> None:
        """Write the rest, and on rank 0 the trace and the report; safe to call twice.

        Args:
            reason: Why it ends, for the footer: "end" for an orderly end.
            timeout_s: How long to wait for the helper thread, and on rank 0 for the end of
                the other ranks.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        deadline = time.monotonic() + timeout_s
        if self._directory is not None:
            self._wait_for_peers(deadline, _has_ended)
        else:
            self._wait_for_peers(deadline, self._has_all_rows)
        self._reason = reason
        self._wake.set()
        self._thread.join(max(0.5, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._problem("close", TimeoutError(f"the helper thread is stuck for {timeout_s} s"))
        if self._rank == 0:
            self._write_trace()
            self._write_report()
        for sink in [*self._sinks, *([self._file] if self._file is not None else [])]:
            with contextlib.suppress(OSError):
                sink.close()

    def _write_trace(self) -> None:
        """Write the newest steps as a Chrome trace; rank 0 adds what the others have written."""
        if self._directory is None:
            return
        name = "trace.json" if self._rank == 0 else f"trace-{self._rank:05d}.json"
        trace = ChromeTrace(self._directory / name, self._rank)
        steps = list(self._logs[self._rank].steps)[-_TRACE_STEPS:]
        if steps:
            since = steps[0].start_ns
            trace.add_steps(steps)
            trace.add_stamps(self._clock.stamps(), since, self._clock.now_ns())
            trace.add_spans(span for span in list(self._spans) if span.end_ns >= since)
            for lane, stages, name in self._clock.batches():
                if stages[-1][2] >= since:
                    trace.add_batch(lane, stages, name)
        if self._rank == 0:
            boot = self._info.boot_id
            for rank, log in self._logs.items():
                if rank != 0 and _has_ended(log) and log.info and log.info.boot_id == boot:
                    trace.merge(self._directory / f"trace-{rank:05d}.json")
        try:
            trace.close()
        except OSError as error:
            self._problem("trace", error)

    def _write_report(self) -> None:
        if self._directory is None:
            return
        with self._lock:
            report = self._make_report([])
        path = self._directory / "report.json"
        temporary = path.with_name(f"report.json.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            self._problem("report.json", error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.close(reason="end" if error is None else type(error).__name__)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(reason="end" if kind is None else kind.__name__)


def _has_ended(log: RankLog) -> bool:
    return log.status is not None and log.status.reason is not None


def _values(step: StepRecord) -> dict[str, float]:
    values = {"step_s": step.wall_ns / 1e9}
    for name, nanoseconds in zip(SEGMENTS, step.segments_ns, strict=True):
        values[f"{name}_s"] = nanoseconds / 1e9
    return values
