"""Two runs side by side: which waits went away, against a named baseline."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from trainpath.errors import ConfigError
from trainpath.metrics.segments import SEGMENTS, STALL_SEGMENTS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainpath.metrics.report import Report

__all__ = ["Comparison", "SegmentChange", "compare"]

_HEADER = ("segment", "before ms", "after ms", "removed ms", "of before")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentChange:
    """One segment in both runs, exposed seconds a step.

    Attributes:
        name: The segment.
        before_s: In the baseline.
        after_s: In the run compared with it.
        removed_s: `before_s - after_s`; negative where it became worse.
    """

    name: str
    before_s: float
    after_s: float
    removed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from one run to another. `print(comparison)` shows it.

    Attributes:
        baseline: Mode of the run before: what `removed_s` is measured against.
        after: Mode of the run after.
        before_step_s: Mean step before.
        after_step_s: Mean step after.
        speedup: `before_step_s / after_step_s`: above 1 is faster.
        segments: Every segment that either run has spent time in.
        stall_removed_s: Exposed stall time that went away, a step.
        next: The next bottleneck of the run after.
        notes: What makes the comparison less than exact.
    """

    baseline: str
    after: str
    before_step_s: float
    after_step_s: float
    speedup: float
    segments: tuple[SegmentChange, ...]
    stall_removed_s: float
    next: str
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return {"schema": "trainpath.comparison/1", **asdict(self)}

    def print(self) -> None:
        """Print: in colour on a terminal, as plain ASCII elsewhere."""
        from trainpath.metrics.render import show  # noqa: PLC0415 - pays for rich

        show(self, str(self))

    def __str__(self) -> str:
        lines = [self._title(), "", _line(_HEADER), *map(_line, self._rows()), ""]
        return "\n".join([*lines, *self._findings()])

    def __rich__(self) -> RenderableType:
        from rich.console import Group  # noqa: PLC0415 - printed once
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in _HEADER:
            table.add_column(name, justify="left" if name == "segment" else "right")
        for row in self._rows():
            style = "bold" if row[0] == "step" else "red" if row[3].startswith("-") else ""
            table.add_row(*map(Text, row), style=style)
        findings = [Text(line) for line in self._findings()]
        return Group(Text(self._title(), style="bold"), Text(""), table, Text(""), *findings)

    def _title(self) -> str:
        return (
            f"trainpath: baseline '{self.baseline}' {1e3 * self.before_step_s:.1f} ms a step, "
            f"'{self.after}' {1e3 * self.after_step_s:.1f} ms: {self.speedup:.2f}x"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [(c.name, c.before_s, c.after_s, c.removed_s) for c in self.segments]
        total = self.before_step_s - self.after_step_s
        rows.append(("step", self.before_step_s, self.after_step_s, total))
        return [
            (
                name,
                f"{1e3 * before:.2f}",
                f"{1e3 * after:.2f}",
                f"{1e3 * removed:.2f}",
                f"{removed / before:.0%}" if before else "new",
            )
            for name, before, after, removed in rows
        ]

    def _findings(self) -> list[str]:
        removed = f"{1e3 * self.stall_removed_s:.2f} ms a step against '{self.baseline}'"
        lines = [f"stall removed  {removed}", f"now            {self.next}"]
        return lines + [f"note           {note}" for note in self.notes]


def compare(before: Report, after: Report) -> Comparison:
    """Compare two runs of the same job.

    Args:
        before: The baseline, usually `TRAINPATH_MODE=observe`.
        after: The run to compare with it.

    Raises:
        ConfigError: One of the runs has no steps, so there is nothing to compare.
    """
    for which, report in (("before", before), ("after", after)):
        if not report.num_steps:
            raise ConfigError(f"the run '{which}' has no finished steps; nothing to compare")
    changes = []
    for name in SEGMENTS:
        old, new = before.segments[name].exposed_s, after.segments[name].exposed_s
        if old or new:
            changes.append(SegmentChange(name=name, before_s=old, after_s=new, removed_s=old - new))
    stalls = {SEGMENTS[index] for index in STALL_SEGMENTS}
    return Comparison(
        baseline=before.mode,
        after=after.mode,
        before_step_s=before.step_s,
        after_step_s=after.step_s,
        speedup=before.step_s / after.step_s,
        segments=tuple(changes),
        stall_removed_s=sum(change.removed_s for change in changes if change.name in stalls),
        next=str(after.verdict),
        notes=tuple(_notes(before, after)),
    )


def _notes(before: Report, after: Report) -> list[str]:
    notes = []
    if before.mode == after.mode:
        notes.append(f"both runs are of mode '{before.mode}'")
    if before.world_size != after.world_size:
        notes.append(
            f"{before.world_size} ranks before, {after.world_size} after: a step is not the same "
            "work unless the global batch is"
        )
    if min(before.num_steps, after.num_steps) < 10:
        notes.append("fewer than 10 steps in one of the runs: indicative only")
    for which, report in (("before", before), ("after", after)):
        if report.noisy:
            notes.append(
                f"the machine was busy during '{which}' (cpu pressure {report.cpu_pressure:.0%}); "
                "interleave the runs and repeat"
            )
        notes += [f"{which}: {note}" for note in report.notes[:3]]
    return notes


def _line(cells: tuple[str, ...]) -> str:
    name, *rest = cells
    return (f" {name:<18}" + "".join(f"{cell:>12}" for cell in rest)).rstrip()
