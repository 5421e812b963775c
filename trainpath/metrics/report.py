"""The report: where the step time went, over all ranks, and what comes next."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainpath.errors import ConfigError
from trainpath.metrics.figures import (
    CheckpointCost,
    OwnCost,
    SegmentFigures,
    StragglerFigures,
    checkpoint_cost,
    own_cost,
    segment_figures,
    straggler_figures,
)
from trainpath.metrics.join import join
from trainpath.metrics.records import RankLog, rank_file_name
from trainpath.metrics.segments import COMM_STRAGGLER, NUM_SEGMENTS, SEGMENTS, STALL_SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from trainpath.metrics.join import Joined

__all__ = ["DEFAULT_WARMUP", "DEFAULT_WINDOW", "Report", "Verdict"]

DEFAULT_WARMUP = 3
"""First steps of a run that are left out: workers start, buffers fill, kernels are chosen."""

DEFAULT_WINDOW = 4096
"""Newest steps that a report covers."""

_COMPUTE_BOUND = 0.03  # no stall above this share: the rest is noise
_NOISY = 0.10  # share of the time in which somebody waited for a core
_TAIL_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The bottleneck, what its removal would give, and what comes next.

    Attributes:
        bottleneck: The segment that costs most ("compute" if none costs 3 %).
        exposed_s: Step time spent in it, with the waits it caused on other ranks.
        predicted_step_s: The step without it.
        gain: Share of the step that would go away.
        next: The next bottleneck.
        text: The same in a sentence or two.
    """

    bottleneck: str
    exposed_s: float
    predicted_step_s: float
    gain: float
    next: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where the step time of a run went. `print(report)` shows it.

    Attributes:
        mode: What was measured: `on`, `observe`.
        world_size: Ranks of the job.
        ranks: Ranks whose steps are in here.
        num_steps: Steps in here, of each rank.
        first_step: The first of them.
        last_step: The last of them.
        total_steps: Steps the run has made, those not in here included.
        warmup: Steps left out at the beginning of the run.
        step_s: Mean step; the segments' `exposed_s` sum to it.
        step_p50_s: Median step.
        step_p95_s: 95th percentile.
        step_max_s: Longest.
        segments: Figures per segment.
        stragglers: The ranks that made others wait, the most expensive first.
        checkpoint: What a checkpoint cost; None without one.
        own_cost: What measuring cost.
        cpu_pressure: Share of the time in which a task of this machine waited for a core
            (/proc/pressure/cpu); None if unknown.
        notes: What is missing, odd or uncertain in here.

    Guarantee:
        A report never fails for want of data: what is missing is said in `notes`.
    """

    mode: str
    world_size: int
    ranks: tuple[int, ...]
    num_steps: int
    first_step: int
    last_step: int
    total_steps: int
    warmup: int
    step_s: float
    step_p50_s: float
    step_p95_s: float
    step_max_s: float
    segments: dict[str, SegmentFigures]
    stragglers: tuple[StragglerFigures, ...]
    checkpoint: CheckpointCost | None
    own_cost: OwnCost
    cpu_pressure: float | None
    notes: tuple[str, ...]

    @classmethod
    def from_directory(cls, directory: str | Path, *, warmup: int = DEFAULT_WARMUP) -> Report:
        """Read the `rank-*.jsonl` files of a run, finished, killed or still running.

        Args:
            directory: The run's metrics directory.
            warmup: Steps left out at the beginning.

        Raises:
            ConfigError: There is no such file in it.
        """
        logs = _read_directory(Path(directory))
        info = logs[0].info
        return cls.from_logs(
            logs,
            world_size=info.world_size if info is not None else len(logs),
            mode=info.mode if info is not None else "unknown",
            warmup=warmup,
            notes=[
                f"rank {log.rank} has no footer: it was killed, or is still running"
                for log in logs
                if log.status is None or log.status.reason is None
            ],
        )

    @classmethod
    def nothing(cls, *, mode: str, world_size: int) -> Report:
        """Return the report of a run that is not measured, which says so."""
        log = RankLog.empty(0, window=1)
        note = f"mode '{mode}' measures nothing: set TRAINPATH_MODE=observe or on"
        return cls.from_logs([log], world_size=world_size, mode=mode, warmup=0, notes=[note])

    @classmethod
    def from_logs(
        cls,
        logs: Sequence[RankLog],
        *,
        world_size: int,
        mode: str,
        warmup: int = DEFAULT_WARMUP,
        notes: Sequence[str] = (),
    ) -> Report:
        """Make the report of the ranks in `logs` (at least one, rank order)."""
        if warmup < 0:
            raise ConfigError(f"warmup must be 0 or more steps, not {warmup}")
        said = [*notes, *_missing(logs, world_size)]
        present = [log for log in logs if log.steps] or list(logs[:1])
        joined, left_out = _join_kept(present, warmup, said)
        if not joined.steps and len(present) > 1:
            said.append(f"the ranks have no step in common; this is rank {present[0].rank} alone")
            present = present[:1]
            joined, left_out = _join_kept(present, warmup, said)
        if joined.clock_error_ns:
            said.append(
                "clocks of different hosts were aligned by the departures; arrivals compare "
                f"within {joined.clock_error_ns / 1e6:.2f} ms"
            )
        walls = joined.wall_ns.reshape(-1) / 1e9
        empty = walls.size == 0
        p50, p95 = (0.0, 0.0) if empty else np.percentile(walls, [50, 95]).tolist()
        return cls(
            mode=mode,
            world_size=world_size,
            ranks=joined.ranks,
            num_steps=len(joined.steps),
            first_step=joined.steps[0] if joined.steps else 0,
            last_step=joined.steps[-1] if joined.steps else 0,
            total_steps=max((_total_steps(log) for log in logs), default=0),
            warmup=left_out,
            step_s=0.0 if empty else float(walls.mean()),
            step_p50_s=p50,
            step_p95_s=p95,
            step_max_s=0.0 if empty else float(walls.max()),
            segments={} if empty else segment_figures(joined, _parallelism(present)),
            stragglers=() if empty else straggler_figures(joined),
            checkpoint=None if empty else checkpoint_cost(joined, present),
            own_cost=own_cost(logs),
            cpu_pressure=_cpu_pressure(logs),
            notes=tuple(dict.fromkeys(said)),
        )

    @property
    def stall_share(self) -> float:
        """Share of the step in which the step thread waited or collected garbage."""
        return sum(self.segments[SEGMENTS[i]].share for i in STALL_SEGMENTS if self.segments)

    @property
    def noisy(self) -> bool:
        """Whether the machine was so busy that times are not to be trusted."""
        return self.cpu_pressure is not None and self.cpu_pressure > _NOISY

    @property
    def verdict(self) -> Verdict:
        """The bottleneck, the gain of its removal, and the next one."""
        candidates = [f for f in self.segments.values() if f.gone is not None]
        if not candidates:
            text = "nothing measured yet: no step has ended"
            return Verdict(
                bottleneck="", exposed_s=0, predicted_step_s=0, gain=0, next="", text=text
            )
        worst = max(candidates, key=lambda f: (f.exposed_s + f.caused_s, f.exposed_s))
        cost_s = worst.exposed_s + worst.caused_s
        if cost_s < _COMPUTE_BOUND * self.step_s or worst.gone is None:
            return self._compute_bound(worst)
        gone = worst.gone
        caused = ""
        if worst.caused_s >= 0.005 * self.step_s:
            culprits = [str(row.rank) for row in self.stragglers if row.cause == worst.name]
            who = f"on rank {', '.join(culprits[:4])} " if culprits else ""
            caused = f", and {who}it makes the others wait {worst.caused_s / self.step_s:.1%} more"
        if worst.name == SEGMENTS[COMM_STRAGGLER] and self.stragglers:
            row = self.stragglers[0]
            caused = f", mostly for rank {row.rank}, which is late by {row.cause}"
        why = "which hides behind it now" if gone.next_is_hidden else "the largest that remains"
        text = (
            f"{worst.name} is the bottleneck: {worst.share:.1%} of the step{caused}. "
            f"Without it {_ms(self.step_s)} -> {_ms(gone.step_s)} ms a step "
            f"(-{gone.gain:.0%}); next: {gone.next}, {why}."
        )
        return Verdict(
            bottleneck=worst.name,
            exposed_s=cost_s,
            predicted_step_s=gone.step_s,
            gain=gone.gain,
            next=gone.next,
            text=text,
        )

    def _compute_bound(self, worst: SegmentFigures) -> Verdict:
        step_s = worst.gone.step_s if worst.gone is not None else self.step_s
        text = (
            f"compute bound: no stall costs {_COMPUTE_BOUND:.0%} of the step; the largest is "
            f"{worst.name} with {worst.share:.1%}."
        )
        return Verdict(
            bottleneck="compute",
            exposed_s=self.step_s - worst.exposed_s,
            predicted_step_s=step_s,
            gain=1 - step_s / self.step_s,
            next=worst.name,
            text=text,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON; times in seconds, shares from 0 to 1."""
        return {
            "schema": "trainpath.report/1",
            **asdict(self),
            "stall_share": self.stall_share,
            "noisy": self.noisy,
            "verdict": asdict(self.verdict),
        }

    def print(self) -> None:
        """Print: in colour on a terminal, as plain ASCII elsewhere."""
        from trainpath.metrics.render import print_report  # noqa: PLC0415 - pays for rich

        print_report(self)

    def __str__(self) -> str:
        from trainpath.metrics.render import report_text  # noqa: PLC0415 - imports us

        return report_text(self)

    def __rich__(self) -> RenderableType:
        from trainpath.metrics.render import rich_report  # noqa: PLC0415 - pays for rich

        return rich_report(self)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds >= 0.01 else f"{seconds * 1e3:.3f}"


def _join_kept(logs: Sequence[RankLog], warmup: int, notes: list[str]) -> tuple[Joined, int]:
    """Join without the warm-up steps; with them if nothing else is there."""
    first = max((log.steps[0].step for log in logs if log.steps), default=0)
    last = min((log.steps[-1].step for log in logs if log.steps), default=0)
    begins_here = all(log.total_steps == len(log.steps) for log in logs)
    left_out = warmup if begins_here else 0
    if left_out and first + left_out > last:
        if logs[0].steps:
            notes.append(f"fewer than {warmup + 1} steps: the warm-up steps are in the figures")
        left_out = 0
    return join(logs, warmup=first + left_out), left_out


def _missing(logs: Sequence[RankLog], world_size: int) -> list[str]:
    """Say what the figures lack."""
    notes = []
    known = {log.rank: log for log in logs}
    lacking = [rank for rank in range(world_size) if rank not in known or not known[rank].steps]
    if lacking and len(lacking) < world_size:
        notes.append(f"no steps of rank {_ranks(lacking)}: waits for it are not explained")
    last = {log.rank: log.steps[-1].step for log in logs if log.steps}
    newest = max(last.values(), default=0)
    behind = [rank for rank, step in last.items() if step < newest]
    if behind:
        upto = min(last[rank] for rank in behind)
        notes.append(f"steps after {upto} of {newest} are missing of rank {_ranks(behind)}")
    for log in logs:
        notes += _odd(log)
    return notes


def _odd(log: RankLog) -> list[str]:
    notes = []
    if log.num_sessions > 1:
        notes.append(f"rank {log.rank} was started {log.num_sessions} times; this is the last run")
    if log.num_bad_lines:
        notes.append(f"rank {log.rank}: {log.num_bad_lines} unreadable lines were left out")
    if log.total_steps > len(log.steps):
        notes.append(f"the newest {len(log.steps)} of {_total_steps(log)} steps are covered")
    gaps = [s for s in log.steps if sum(s.segments_ns) != s.wall_ns]
    if gaps:
        notes.append(f"rank {log.rank}: the parts of {len(gaps)} steps do not sum to their wall")
    status = log.status
    if status is not None:
        if status.dropped_steps or status.dropped_spans:
            notes.append(
                f"rank {log.rank} lost {status.dropped_steps} steps and {status.dropped_spans} "
                "spans: they came faster than they were drained"
            )
        if status.reason not in (None, "end"):
            notes.append(f"rank {log.rank} ended by: {status.reason}")
        notes += [f"rank {log.rank}: {problem}" for problem in status.problems]
    return notes


def _total_steps(log: RankLog) -> int:
    # Of a large file only the newest lines were read; the rank itself knows.
    return max(log.total_steps, log.status.num_steps if log.status is not None else 0)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _parallelism(logs: Sequence[RankLog]) -> list[int]:
    rows = [log.status.parallelism for log in logs if log.status is not None]
    return [max((row[i] for row in rows), default=1) for i in range(NUM_SEGMENTS)]


def _cpu_pressure(logs: Sequence[RankLog]) -> float | None:
    shares = [
        log.status.cpu_stall_us * 1000 / log.status.elapsed_ns
        for log in logs
        if log.status is not None and log.status.cpu_stall_us >= 0 and log.status.elapsed_ns
    ]
    return max(shares, default=None)


def _read_directory(directory: Path) -> list[RankLog]:
    paths = {int(path.stem[5:]): path for path in directory.glob("rank-[0-9]*.jsonl")}
    if not paths:
        raise ConfigError(
            f"no {rank_file_name(0)} in {directory}: give the metrics_dir (TRAINPATH_METRICS_DIR) "
            "of a run that has begun"
        )
    logs: list[RankLog] = []
    for rank in sorted(paths):
        # Files of ranks beyond the world are of an earlier, larger job.
        if logs and logs[0].info is not None and rank >= logs[0].info.world_size:
            break
        log = RankLog.empty(rank, window=DEFAULT_WINDOW)
        log.read(_lines(paths[rank]))
        logs.append(log)
    return logs


def _lines(path: Path) -> list[str]:
    """Return the complete lines of a file; of a large one the first and the newest."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = b""
        if size > 2 * _TAIL_BYTES:
            head = file.readline()
            file.seek(size - _TAIL_BYTES)
            file.readline()
        data = head + file.read()
    lines = data.decode(errors="replace").split("\n")
    # What follows the last newline is being written, or was cut by a full disk.
    return [line for line in lines[:-1] if line]
