"""Reports as text: plain ASCII of at most 40 lines, and rich tables on a terminal."""

from __future__ import annotations

import math
import sys
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import JustifyMethod, RenderableType

    from trainpath.metrics.figures import SegmentFigures
    from trainpath.metrics.report import Report

__all__ = ["add_up", "print_report", "report_text", "rich_report", "show"]

_MAX_STRAGGLERS = 3
_MAX_NOTES = 6
_BAR = 16

_HEADER = ("segment", "ms", "share", "", "p95 ms", "max ms", "hidden", "if gone", "then")


def add_up(values: Sequence[float], total: float, decimals: int) -> list[float]:
    """Round so that the printed values sum to the printed total (largest remainder).

    Args:
        values: Non-negative values that sum to `total`.
        total: Their sum.
        decimals: Digits after the point.
    """
    unit = 10**decimals
    floors = [math.floor(value * unit) for value in values]
    missing = round(total * unit) - sum(floors)
    order = sorted(range(len(values)), key=lambda i: floors[i] - values[i] * unit)
    for index in order[: max(0, missing)]:
        floors[index] += 1
    return [floor / unit for floor in floors]


def report_text(report: Report) -> str:
    """Return the report as plain ASCII, at most 40 lines."""
    lines = [_title(report), *_summary(report), ""]
    rows = _rows(report)
    if rows:
        lines += [_line(_HEADER), *map(_line, rows), ""]
    lines += _findings(report)
    return _ascii("\n".join(lines))


def rich_report(report: Report) -> RenderableType:
    """Return the report for a rich console."""
    from rich.console import Group  # noqa: PLC0415 - a report is printed once
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _HEADER:
        justify: JustifyMethod = "left" if name in ("segment", "", "then") else "right"
        table.add_column(name, justify=justify, min_width=14 if name == "segment" else None)
    worst = report.verdict.bottleneck
    for row in _rows(report):
        style = "bold red" if row[0] == worst else "bold" if row[0] == "sum" else ""
        table.add_row(*[Text(cell, no_wrap=True) for cell in row], style=style)
    title = Text(_title(report), style="bold")
    texts = [Text(line) for line in _summary(report)]
    findings = [Text(line) for line in _findings(report)]
    return Group(title, *texts, Text(""), table, Text(""), *findings)


def print_report(report: Report) -> None:
    """Print in colour on a terminal, as plain text elsewhere."""
    show(report, str(report))


def show(renderable: RenderableType, plain: str) -> None:
    """Print `renderable` by rich if stdout is a terminal, else `plain`."""
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415

        Console().print(renderable)
    else:
        sys.stdout.write(plain + "\n")
        sys.stdout.flush()


def _title(report: Report) -> str:
    ranks = f"{report.world_size} rank{'s' if report.world_size != 1 else ''}"
    if len(report.ranks) != report.world_size:
        ranks += f" (figures of {len(report.ranks)})"
    if not report.num_steps:
        return f"trainpath: {ranks}, mode {report.mode}, no steps"
    steps = f"{report.num_steps} step{'s' if report.num_steps != 1 else ''}"
    left_out = f", first {report.warmup} left out" if report.warmup else ""
    span = f"{report.first_step} to {report.last_step}{left_out}"
    return f"trainpath: {ranks}, {steps} ({span}), mode {report.mode}"


def _summary(report: Report) -> list[str]:
    if not report.num_steps:
        return []
    pressure = "unknown"
    if report.cpu_pressure is not None:
        pressure = f"{report.cpu_pressure:.1%}{', NOISY' if report.noisy else ''}"
    digits = _decimals(report)
    p50, p95, longest = (
        f"{1e3 * s:.{digits}f}" for s in (report.step_p50_s, report.step_p95_s, report.step_max_s)
    )
    mean = f"{1e3 * report.step_s:.{digits}f}"
    rate = f"{1 / report.step_s:.2f} steps/s; stalls {report.stall_share:.1%}"
    step = f"step {mean} ms (p50 {p50}, p95 {p95}, max {longest})"
    return [f"{step}, {rate}; cpu pressure {pressure}"]


def _decimals(report: Report) -> int:
    return 1 if report.step_s >= 0.01 else 3


def _rows(report: Report) -> list[tuple[str, ...]]:
    """Return the cells of the table: segments that cost or did something, and their sum."""
    shown = [f for f in report.segments.values() if f.exposed_s or f.busy_s]
    if not shown:
        return []
    digits = _decimals(report)
    shares = add_up([100 * f.share for f in shown], 100.0, 1)
    step_ms = 1e3 * report.step_s
    exposed = add_up([1e3 * f.exposed_s for f in shown], step_ms, digits)
    rows = [
        _row(report, figures, ms=ms, share=share)
        for figures, ms, share in zip(shown, exposed, shares, strict=True)
    ]
    total = ("sum", f"{sum(exposed):.{digits}f}", f"{sum(shares):.1f} %", *[""] * 6)
    return [*rows, total]


def _row(report: Report, figures: SegmentFigures, *, ms: float, share: float) -> tuple[str, ...]:
    digits = _decimals(report)
    gone = then = ""
    if figures.gone is not None and figures.gone.gain >= 0.005:
        gone = f"-{figures.gone.gain:.0%}"
        then = figures.gone.next
    return (
        figures.name,
        f"{ms:.{digits}f}",
        f"{share:.1f} %",
        "#" * round(_BAR * share / 100),
        f"{1e3 * figures.p95_s:.{digits}f}",
        f"{1e3 * figures.max_s:.{digits}f}",
        f"{1e3 * figures.hidden_s:.{digits}f}" if figures.busy_s else "",
        gone,
        then,
    )


def _line(cells: Sequence[str]) -> str:
    name, ms, share, bar, p95, largest, hidden, gone, then = cells
    text = f" {name:<17}{ms:>9}{share:>9} {bar:<{_BAR}}{p95:>9}{largest:>9}{hidden:>9}{gone:>9}"
    return f"{text}  {then}".rstrip()


def _findings(report: Report) -> list[str]:
    lines = textwrap.wrap(str(report.verdict), 84)
    lines = [f"{'' if index else 'verdict':<12}{line}" for index, line in enumerate(lines)]
    lines += [
        f"straggler   rank {row.rank} late in {row.num_late} of {report.num_steps} steps, "
        f"+{1e3 * row.lateness_s:.1f} ms, {row.cause_share:.0%} by {row.cause}; "
        f"the others waited {row.share:.1%} of the job"
        for row in report.stragglers[:_MAX_STRAGGLERS]
    ]
    if len(report.stragglers) > _MAX_STRAGGLERS:
        lines.append(f"straggler   {len(report.stragglers) - _MAX_STRAGGLERS} more ranks were late")
    if report.checkpoint is not None:
        lines.append("checkpoint  " + _checkpoint(report))
    if report.num_steps:
        cost = report.own_cost
        lines.append(
            f"own cost    {cost.clock + cost.helper:.2%} of the time (clock {cost.clock:.2%}, "
            f"helper thread {cost.helper:.2%} CPU)"
        )
    lines += [f"note        {note}" for note in report.notes[:_MAX_NOTES]]
    if len(report.notes) > _MAX_NOTES:
        lines.append(f"note        {len(report.notes) - _MAX_NOTES} more in report.notes")
    return lines


def _checkpoint(report: Report) -> str:
    cost = report.checkpoint
    if cost is None:
        return ""
    saves = f"{cost.num_saves} save{'s' if cost.num_saves != 1 else ''}"
    blocking = f"blocking {1e3 * cost.blocking_s:.1f} ms"
    if cost.durable_s is None:
        return f"{saves}: {blocking} each, interference none seen, durable when save() returns"
    interference = "interference unknown (every step overlaps a save)"
    if cost.interference_s is not None:
        interference = f"interference {1e3 * cost.interference_s:+.1f} ms"
    durable = f"durable after {1e3 * cost.durable_s:.1f} ms at most"
    return f"{saves}: {blocking}, {interference}, {durable}"


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode("ascii")
