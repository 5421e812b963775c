"""The lines of a `rank-00000.jsonl` file, and what is kept of one rank.

A file is: one `header`, then a `step` line per step, `span` lines for checkpoint work, a
`status` line when something about the rank changed, and a `footer` (a last status) when it
ended in an orderly way. The same lines travel between ranks.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainpath.metrics.clock import Span, StepRecord
from trainpath.metrics.segments import (
    CKPT_BACKPRESSURE,
    CKPT_CAPTURE,
    CKPT_FENCE,
    NUM_SEGMENTS,
    SEGMENTS,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "CKPT_SEGMENTS",
    "SCHEMA",
    "RankInfo",
    "RankLog",
    "RankStatus",
    "encode_info",
    "encode_span",
    "encode_status",
    "encode_step",
    "own_info",
    "rank_file_name",
]

SCHEMA = "trainpath.metrics/1"
CKPT_SEGMENTS = (CKPT_CAPTURE, CKPT_FENCE, CKPT_BACKPRESSURE)

_KEYS = tuple(f'"{name}":' for name in SEGMENTS)
_INDEX = {name: index for index, name in enumerate(SEGMENTS)}
_MAX_SPANS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What does not change while a rank runs.

    Attributes:
        rank: Its number.
        world_size: The number of ranks.
        mode: `on`, `observe` or `off`.
        host: Name of its host.
        boot_id: Equal for ranks that share one CLOCK_MONOTONIC.
        pid: Its process.
        versions: Versions of what it runs.
        started: Wall-clock time, ISO 8601, UTC.
    """

    rank: int
    world_size: int
    mode: str
    host: str
    boot_id: str
    pid: int
    versions: dict[str, str]
    started: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """What a rank knows about its own measuring so far.

    Attributes:
        num_steps: Steps finished.
        dropped_steps: Steps overwritten before they were drained.
        dropped_spans: Background spans lost in the same way.
        parallelism: Units that work on each segment at once.
        elapsed_ns: Time since the recorder began.
        clock_ns: Step-thread time spent in the clock (switches times their measured cost).
        helper_ns: CPU time of the helper thread.
        cpu_stall_us: `some total` of /proc/pressure/cpu since the recorder began (-1: unknown).
        reason: Why the rank ended (None while it runs).
        problems: What went wrong with the measuring itself.
    """

    num_steps: int = 0
    dropped_steps: int = 0
    dropped_spans: int = 0
    parallelism: tuple[int, ...] = (1,) * NUM_SEGMENTS
    elapsed_ns: int = 0
    clock_ns: int = 0
    helper_ns: int = 0
    cpu_stall_us: int = -1
    reason: str | None = None
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class RankLog:
    """The newest steps of one rank, and its totals.

    Attributes:
        rank: Its number.
        steps: The newest steps, oldest first.
        spans: The newest checkpoint spans.
        info: Its header, if known.
        status: Its newest status, if known.
        total_steps: Steps seen, those no longer in `steps` included.
        total_ns: Their wall time.
        num_sessions: Headers seen: a job that was restarted appends to its file.
        num_bad_lines: Lines that could not be read (the last one of a full disk, say).
    """

    rank: int
    steps: deque[StepRecord]
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=_MAX_SPANS))
    info: RankInfo | None = None
    status: RankStatus | None = None
    total_steps: int = 0
    total_ns: int = 0
    num_sessions: int = 0
    num_bad_lines: int = 0

    @classmethod
    def empty(cls, rank: int, *, window: int) -> RankLog:
        """Return a log that will keep the newest `window` steps."""
        return cls(rank, deque(maxlen=window))

    def add(self, steps: Iterable[StepRecord], spans: Iterable[Span]) -> None:
        """Take finished steps, and those of the spans that tell about checkpoints."""
        for step in steps:
            self.steps.append(step)
            self.total_steps += 1
            self.total_ns += step.wall_ns
        self.spans.extend(span for span in spans if span.segment in CKPT_SEGMENTS)

    def begin(self, info: RankInfo) -> None:
        """Take a header; what came before belongs to an earlier session and is dropped."""
        self.info = info
        self.num_sessions += 1
        self.steps.clear()
        self.spans.clear()
        self.status = None
        self.total_steps = self.total_ns = 0

    def read(self, lines: Iterable[str]) -> None:
        """Take lines of a file or of a message; lines that are not ours are counted."""
        for line in lines:
            try:
                self._read(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                self.num_bad_lines += 1

    def _read(self, row: dict[str, Any]) -> None:
        kind = row.pop("kind")
        if kind == "step":
            self.add([_decode_step(row)], [])
        elif kind == "span":
            segment = _INDEX[row.pop("segment")]
            self.add([], [Span(segment=segment, **row)])
        elif kind == "header":
            if row.pop("schema") != SCHEMA:
                raise ValueError(SCHEMA)
            self.begin(RankInfo(**row))
        else:
            row["parallelism"] = _dense(row["parallelism"], 1)
            row["problems"] = tuple(row["problems"])
            self.status = RankStatus(**row)


def encode_step(record: StepRecord) -> str:
    """Return the line of one step (without json.dumps: this is most of the helper's work)."""
    return (
        f'{{"kind":"step","step":{record.step},"start_ns":{record.start_ns},'
        f'"wall_ns":{record.wall_ns},"seg":{{{_sparse(record.segments_ns)}}},'
        f'"busy":{{{_sparse(record.busy_ns)}}},"after":{{{_sparse(record.after_ns)}}},'
        f'"arrive_ns":{record.arrive_ns},"depart_ns":{record.depart_ns}}}\n'
    )


def encode_span(span: Span) -> str:
    """Return the line of one background span."""
    row = {"kind": "span", **span._asdict(), "segment": SEGMENTS[span.segment]}
    return json.dumps(row, separators=(",", ":")) + "\n"


def encode_info(info: RankInfo) -> str:
    """Return the header line."""
    return json.dumps({"kind": "header", "schema": SCHEMA, **asdict(info)}) + "\n"


def encode_status(status: RankStatus, *, kind: str = "status") -> str:
    """Return a `status` or `footer` line."""
    units = {SEGMENTS[i]: n for i, n in enumerate(status.parallelism) if n != 1}
    return json.dumps({"kind": kind, **asdict(status), "parallelism": units}) + "\n"


def _own_host() -> tuple[str, str]:
    """Return (name of this host, an id that is equal where CLOCK_MONOTONIC is shared)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        # Processes in another time namespace see another CLOCK_MONOTONIC.
        boot += " " + str(Path("/proc/self/ns/time").readlink())
    except OSError:
        boot = socket.gethostname()
    return socket.gethostname(), boot


def own_info(rank: int, world_size: int, mode: str) -> RankInfo:
    """Return the header of this process."""
    host, boot_id = _own_host()
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("trainpath", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return RankInfo(
        rank=rank,
        world_size=world_size,
        mode=mode,
        host=host,
        boot_id=boot_id,
        pid=os.getpid(),
        versions=versions,
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.jsonl"


def _sparse(values: tuple[int, ...]) -> str:
    # One C loop finds the few that are not zero; formatting them is the rest.
    return ",".join([f"{key}{value}" for key, value in zip(_KEYS, values, strict=True) if value])


def _dense(values: dict[str, int], default: int = 0) -> tuple[int, ...]:
    row = [default] * NUM_SEGMENTS
    for name, value in values.items():
        row[_INDEX[name]] = int(value)
    return tuple(row)


def _decode_step(row: dict[str, Any]) -> StepRecord:
    return StepRecord(
        step=int(row["step"]),
        start_ns=int(row["start_ns"]),
        wall_ns=int(row["wall_ns"]),
        segments_ns=_dense(row["seg"]),
        busy_ns=_dense(row["busy"]),
        after_ns=_dense(row.get("after", {})),
        arrive_ns=int(row["arrive_ns"]),
        depart_ns=int(row["depart_ns"]),
    )
