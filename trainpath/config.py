"""Settings of a run: frozen, with overrides from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from trainpath.errors import ConfigError

__all__ = ["Mode", "Settings"]

Mode = Literal["off", "observe", "on"]

MODE_VARIABLE: Final = "TRAINPATH_MODE"
METRICS_VARIABLE: Final = "TRAINPATH_METRICS_DIR"
CACHE_VARIABLE: Final = "TRAINPATH_CACHE_DIR"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `accelerate()` was asked for, after the environment has been read.

    Attributes:
        mode: `on` is everything; `observe` measures, with the stock parts in our places;
            `off` is `observe` without the measuring.
        metrics_dir: Where each rank writes its steps (None: kept in memory only).
        cache_dir: Node-local shard cache (None: no cache).
        checkpoint_dir: Where checkpoints go (None: none are made).
        save_every: Steps between automatic checkpoints (None: only on request).
        keep: How many checkpoints are kept.
        preempt_deadline_s: From SIGTERM to the end of the process, at most.
    """

    mode: Mode
    metrics_dir: Path | None
    cache_dir: Path | None
    checkpoint_dir: Path | None
    save_every: int | None
    keep: int
    preempt_deadline_s: float

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r} "
                f"(from the mode argument or {MODE_VARIABLE})"
            )
        if self.save_every is not None and self.save_every < 1:
            raise ConfigError(f"save_every must be at least 1 step, got {self.save_every}")
        if self.save_every is not None and self.checkpoint_dir is None:
            raise ConfigError("save_every needs checkpoint_dir: say where the checkpoints go")
        if self.keep < 1:
            raise ConfigError(f"keep must be at least 1 checkpoint, got {self.keep}")
        if self.preempt_deadline_s <= 0:
            raise ConfigError(f"preempt_deadline_s must be positive, got {self.preempt_deadline_s}")

    @classmethod
    def resolve(
        cls,
        *,
        mode: str | None,
        metrics_dir: str | Path | None = None,
        cache_dir: str | Path | None = None,
        checkpoint_dir: str | Path | None = None,
        save_every: int | None = None,
        keep: int = 2,
        preempt_deadline_s: float = 25.0,
    ) -> Settings:
        """Fill what was not given from the environment.

        An explicit argument wins, except that `TRAINPATH_MODE` wins over `mode`, so that
        one script can be its own baseline without being edited.
        """
        return cls(
            mode=os.environ.get(MODE_VARIABLE) or mode or "on",  # type: ignore[arg-type]
            metrics_dir=_path(metrics_dir, METRICS_VARIABLE),
            cache_dir=_path(cache_dir, CACHE_VARIABLE),
            checkpoint_dir=Path(checkpoint_dir) if checkpoint_dir else None,
            save_every=save_every,
            keep=keep,
            preempt_deadline_s=preempt_deadline_s,
        )


def _path(given: str | Path | None, variable: str) -> Path | None:
    value = given if given is not None else os.environ.get(variable)
    return Path(value) if value else None
