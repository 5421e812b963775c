"""Which steps a directory holds, which ones stay, and what dead runs left behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Final

__all__ = [
    "LATEST",
    "MANIFEST",
    "clean_leftovers",
    "discard",
    "list_steps",
    "prune",
    "step_name",
    "temporary_name",
]

LATEST: Final = "latest"
MANIFEST: Final = "trainpath.manifest.json"

_STEP = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(tmp|trash)-step-(\d{8,})-.*")


def step_name(step: int) -> str:
    """Return the name of the directory of a committed step."""
    return f"step-{step:08d}"


def temporary_name(step: int, token: str) -> str:
    """Return the name of the directory of a step that is still being written."""
    return f".tmp-{step_name(step)}-{token}"


def list_steps(directory: Path) -> list[int]:
    """Return the committed steps in ascending order (those that have a manifest)."""
    steps = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(directory):
            match = _STEP.fullmatch(entry.name)
            if match and (Path(entry.path) / MANIFEST).exists():
                steps.append(int(match[1]))
    return sorted(steps)


def prune(directory: Path, *, keep: int, committed: int) -> list[int]:
    """Delete all but the newest `keep` steps; the one just committed always stays.

    Returns:
        The steps deleted.
    """
    others = [step for step in list_steps(directory) if step != committed]
    gone = others[: max(0, len(others) - (keep - 1))]
    for step in gone:
        discard(directory / step_name(step))
    return gone


def discard(path: Path) -> None:
    """Delete a directory so that it disappears at once from under its name."""
    doomed = path
    if not path.name.startswith("."):
        doomed = path.with_name(f".trash-{path.name}-{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clean_leftovers(directory: Path) -> list[str]:
    """Delete what dead runs left behind; call it only while holding the lease.

    A directory that was being replaced when its run died is put back first.

    Returns:
        The names that were cleaned up.
    """
    (directory / f".{LATEST}.tmp").unlink(missing_ok=True)
    names = sorted(entry.name for entry in os.scandir(directory) if _LEFTOVER.fullmatch(entry.name))
    for name in names:
        path = directory / name
        match = _LEFTOVER.fullmatch(name)
        step = directory / step_name(int(match[2])) if match else path
        replaced = name.startswith(".trash-") and "-replaced" in name
        if replaced and not step.exists() and (path / MANIFEST).exists():
            path.rename(step)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return names
