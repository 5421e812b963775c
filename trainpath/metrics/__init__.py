"""Measuring the data path: the step clock, lineage, reports and comparisons."""

from __future__ import annotations

from trainpath.metrics.clock import NULL_CLOCK, NullClock, Span, StepClock, StepRecord
from trainpath.metrics.segments import SEGMENTS

__all__ = ["NULL_CLOCK", "SEGMENTS", "NullClock", "Span", "StepClock", "StepRecord"]
