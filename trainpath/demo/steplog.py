"""One line per step and rank: the loss to the bit and the samples, to compare runs by."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["StepLog", "StepRow", "read_steps"]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step of one rank; `loss` is hexadecimal, so equality is equality of bits."""

    rank: int
    step: int
    loss: str
    samples: tuple[int, ...]


class StepLog:
    """Appends the steps of one rank to `directory/steps-RANK.jsonl`."""

    def __init__(self, directory: Path, rank: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = _path(directory, rank).open("a", buffering=1)

    def write(self, step: int, loss: float, samples: list[int]) -> None:
        """Append one step."""
        row = {"step": step, "loss": loss.hex(), "samples": samples}
        self._file.write(json.dumps(row) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_steps(directory: Path, rank: int) -> list[StepRow]:
    """Read what `StepLog` wrote, in order; a line cut by a kill is left out."""
    path = _path(directory, rank)
    if not path.exists():
        return []
    rows = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            row = json.loads(line)
            rows.append(StepRow(rank, row["step"], row["loss"], tuple(row["samples"])))
    return rows


def _path(directory: Path, rank: int) -> Path:
    return directory / f"steps-{rank}.jsonl"
