"""Measuring the data path: the step clock, lineage, reports and comparisons."""

from __future__ import annotations

from trainpath.metrics.clock import NULL_CLOCK, NullClock, Span, StepClock, StepRecord
from trainpath.metrics.compare import Comparison, compare
from trainpath.metrics.recorder import Recorder
from trainpath.metrics.report import Report
from trainpath.metrics.segments import SEGMENTS

__all__ = [
    "NULL_CLOCK",
    "SEGMENTS",
    "Comparison",
    "NullClock",
    "Recorder",
    "Report",
    "Span",
    "StepClock",
    "StepRecord",
    "compare",
]
