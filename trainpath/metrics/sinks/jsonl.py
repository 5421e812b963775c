"""JSON lines: one complete object a line, whatever kills the process."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["JsonLines"]


class JsonLines:
    """Appends lines to a file; a `Sink`.

    Args:
        path: The file; made if missing, continued if there.

    Attributes:
        problem: Why writing stopped (a full disk, say); empty while all is well.

    Cost:
        One write(2) per call, no buffer, no thread.

    Guarantee:
        Lines are written in whole calls, so a killed process leaves complete lines. A line
        cut by a full disk is ended before the next one. Nothing raises after construction.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._pid = os.getpid()
        self._cut = _ends_in_the_middle(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of one step."""
        self.append(json.dumps({"kind": "values", "step": step, **values}) + "\n")

    def append(self, lines: str) -> None:
        """Append complete lines (each ends in a newline)."""
        if self._fd < 0 or not lines or os.getpid() != self._pid:
            return
        data = (b"\n" if self._cut else b"") + lines.encode()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._cut = self._cut or written > 0
            self.problem = f"{self.path} lacks lines: {error.strerror}"
        else:
            self._cut = False

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _ends_in_the_middle(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
