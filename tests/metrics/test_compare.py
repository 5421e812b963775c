"""Comparing two runs against a named baseline."""

from __future__ import annotations

import json

import pytest

from trainpath.errors import ConfigError
from trainpath.metrics import Report, compare


def report_of(logs, mode, parts, **kwargs):
    """Report on one rank."""
    steps = logs.chain(parts)
    log = logs.log_of(steps, mode=mode, **kwargs)
    return Report.from_logs([log], world_size=1, mode=mode, warmup=0)


def test_what_was_removed(logs):
    """Removed is before minus after, per segment; what became worse is printed too."""
    before = report_of(logs, "observe", [logs.segments(data_network=60, forward=40)] * 20)
    after = report_of(logs, "on", [logs.segments(data_cache=5, forward=45)] * 20)

    comparison = compare(before, after)

    changes = {change.name: change.removed_s for change in comparison.segments}
    assert changes["data.network"] == pytest.approx(0.060)
    assert changes["data.cache"] == pytest.approx(-0.005)
    assert changes["forward"] == pytest.approx(-0.005)
    assert comparison.stall_removed_s == pytest.approx(0.055)
    assert comparison.speedup == pytest.approx(2)
    assert comparison.baseline == "observe"
    text = str(comparison)
    assert "baseline 'observe' 100.0 ms" in text
    assert "2.00x" in text
    assert "new" in text
    assert str(after.verdict) in text
    assert text.isascii()
    assert json.dumps(comparison.to_dict())


def test_uncertain_comparisons_say_so(logs):
    """Equal modes, few steps and a busy machine are noted, not refused."""
    one = report_of(logs, "on", [logs.segments(forward=40)] * 5, cpu_stall_us=900_000)

    notes = " ".join(compare(one, one).notes)

    assert "both runs are of mode 'on'" in notes
    assert "fewer than 10 steps" in notes
    assert "busy during 'before'" in notes


def test_nothing_to_compare(logs):
    """A run without steps is refused by name."""
    full = report_of(logs, "on", [logs.segments(forward=40)] * 5)
    empty = report_of(logs, "on", [])

    with pytest.raises(ConfigError, match="'before' has no finished steps"):
        compare(empty, full)
    with pytest.raises(ConfigError, match="'after' has no finished steps"):
        compare(full, empty)


def test_rich_rendering(logs):
    """A terminal gets the same table."""
    from rich.console import Console

    before = report_of(logs, "observe", [logs.segments(data_network=60, forward=40)] * 20)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(compare(before, before))

    assert "data.network" in capture.get()
