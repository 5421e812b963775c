"""What a step would take if one segment were gone, and what would limit it then.

Exposed time is not the gain: with segment s gone, the step takes
`max(T - exposed_s, max_j P_j of the others)`, because a resource that works in the
background cannot deliver steps faster than its own service period P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainpath.metrics.segments import (
    COMM_STRAGGLER,
    COMM_TRANSFER,
    DATA_SEGMENTS,
    NUM_SEGMENTS,
    PYTHON,
    SEGMENTS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Prediction", "service_periods", "without"]

# One worker does all data stages of a batch in turn: they share one service period.
_DATA = frozenset(DATA_SEGMENTS)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The step without one segment.

    Attributes:
        step_s: Predicted step time.
        gain: Share of the step that goes away, 0 to 1.
        next: The next bottleneck: the segment that limits the step then.
        next_is_hidden: Whether that segment works in the background now and limits the
            step by its service period; otherwise it is the largest exposed one that remains.
    """

    step_s: float
    gain: float
    next: str
    next_is_hidden: bool


def service_periods(busy: Sequence[float], parallelism: Sequence[int]) -> list[float]:
    """Return P per segment: background seconds a step over the units that share the work."""
    return [seconds / units for seconds, units in zip(busy, parallelism, strict=True)]


def without(
    segment: int,
    step_s: float,
    *,
    exposed: Sequence[float],
    periods: Sequence[float],
    caused_s: float = 0.0,
) -> Prediction:
    """Predict the step with `segment` gone.

    Args:
        segment: Its index.
        step_s: The step now.
        exposed: Exposed seconds per segment.
        periods: Service period per segment.
        caused_s: Wait of other ranks that the segment caused: it goes away too.
    """
    rest = max(0.0, step_s - exposed[segment] - caused_s)
    resources: dict[int, float] = {}
    for index in range(NUM_SEGMENTS):
        # Waiting for a slow rank is not work: no transfer is behind it, nor it behind one.
        if index == segment or (segment == COMM_STRAGGLER and index == COMM_TRANSFER):
            continue
        if index not in _DATA:
            resources[index] = periods[index]
    loader = {index: periods[index] for index in _DATA if index != segment}
    largest = max(loader, key=lambda index: loader[index])
    resources[largest] = sum(loader.values())
    limit = max(resources, key=lambda index: resources[index])
    # In steady state no period is longer than the step it delivered; what is above is
    # concurrency that `parallelism` does not know of.
    period = min(resources[limit], step_s)
    if period > rest:
        return Prediction(period, 1 - period / step_s, SEGMENTS[limit], True)
    remaining = [
        (seconds, index)
        for index, seconds in enumerate(exposed)
        if index != segment and seconds > 0
    ]
    following = SEGMENTS[max(remaining)[1]] if remaining else SEGMENTS[PYTHON]
    return Prediction(rest, 1 - rest / step_s, following, False)
