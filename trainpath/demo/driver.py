"""Runs the demo: packs, serves, trains both ways, kills, resumes and compares."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from trainpath.demo.corpus import pack
from trainpath.demo.job import Job, serve
from trainpath.demo.steplog import StepRow, read_steps
from trainpath.errors import DeadlineError
from trainpath.metrics import Report, compare

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Outcome", "judge", "run_demo"]

NUM_RANKS = 2
NUM_SHARDS = 8
SAMPLES_PER_SHARD = 24
PASSAGE_BYTES = 8192
EPOCHS = 3
STEPS = EPOCHS * NUM_SHARDS * SAMPLES_PER_SHARD // (8 * NUM_RANKS)
# About half of what the model could take: the stock arm is bound by the link.
RATE_BYTES_PER_S = 1_200_000
LATENCY_S = 0.01
KILL_AT_STEP = STEPS // 2 + 3
DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the demo found.

    Attributes:
        losses_identical: Losses and samples of both arms equal, every step, rank and round.
        samples_identical: The killed and resumed run saw the samples of the whole one.
        resume_exact: Its losses too are those of the whole run, to the bit.
        killed_after_step: The last step logged before the kill -9.
        resumed_at_step: The first step after it.
    """

    losses_identical: bool
    samples_identical: bool
    resume_exact: bool
    killed_after_step: int
    resumed_at_step: int

    @property
    def passed(self) -> bool:
        """Whether every yes is a yes."""
        return self.losses_identical and self.samples_identical and self.resume_exact


def run_demo(*, rounds: int = 2, keep: Path | None = None) -> Outcome:
    """Run the demo and print its one screen.

    Args:
        rounds: Interleaved rounds of each arm.
        keep: Directory for everything the demo makes; None: a temporary one, removed.

    Raises:
        DeadlineError: A job did not end in time.
        ChildProcessError: A job failed; the message holds the end of its output.
    """
    console = Console(highlight=False)
    with _work_directory(keep) as work:
        with console.status("packing the standard library's sources ..."):
            names = pack(
                work / "corpus",
                num_shards=NUM_SHARDS,
                samples_per_shard=SAMPLES_PER_SHARD,
                passage_bytes=PASSAGE_BYTES,
            )
        with serve(work / "corpus", rate=RATE_BYTES_PER_S, latency_s=LATENCY_S) as url:
            urls = [f"{url}/{name}" for name in names]
            outcome = _train_all(console, work, urls, rounds)
        _show(console, work, rounds, outcome)
        return outcome


def _train_all(console: Console, work: Path, urls: list[str], rounds: int) -> Outcome:
    arms = [f"{arm}-{index}" for index in range(rounds) for arm in ("stock", "trainpath")]
    with console.status(f"training {', '.join(arms)} ..."):
        Job(arms, work=work, urls=urls, epochs=EPOCHS, num_ranks=NUM_RANKS).finish(DEADLINE_S)
    with console.status("killing a run in the middle and resuming it ..."):
        killed_after = _kill_midway(work, urls)
        Job(["resumed-0"], work=work, urls=urls, epochs=EPOCHS, num_ranks=NUM_RANKS).finish(
            DEADLINE_S
        )
    return judge(work, rounds, killed_after)


def judge(work: Path, rounds: int, killed_after: int) -> Outcome:
    """Compare the step logs of all arms in `work`, to the bit."""
    whole = _by_step(work / "trainpath-0")
    resumed = _by_step(work / "resumed-0")
    identical = all(
        _by_step(work / f"{arm}-{index}") == whole
        for index in range(rounds)
        for arm in ("stock", "trainpath")
    )
    return Outcome(
        losses_identical=identical and len(whole) == STEPS * NUM_RANKS,
        samples_identical=_samples(resumed) == _samples(whole),
        resume_exact=resumed == whole,
        killed_after_step=killed_after,
        resumed_at_step=_first_step_after(work / "resumed-0", killed_after),
    )


def _kill_midway(work: Path, urls: list[str]) -> int:
    """Start a run, kill -9 all of it in the middle; return the last step it logged."""
    job = Job(["resumed-0"], work=work, urls=urls, epochs=EPOCHS, num_ranks=NUM_RANKS)
    job.wait_for(lambda: _last_step(work / "resumed-0") >= KILL_AT_STEP, DEADLINE_S)
    job.kill()
    last = _last_step(work / "resumed-0")
    if last >= STEPS:
        raise DeadlineError("the run to be killed was over before the kill; nothing was proved")
    return last


def _rows(directory: Path) -> list[StepRow]:
    return [row for rank in range(NUM_RANKS) for row in read_steps(directory, rank)]


def _by_step(directory: Path) -> dict[tuple[int, int], StepRow]:
    """Map (rank, step) to its row; of a step done twice, the later row."""
    return {(row.rank, row.step): row for row in _rows(directory)}


def _samples(rows: dict[tuple[int, int], StepRow]) -> dict[tuple[int, int], tuple[int, ...]]:
    return {key: row.samples for key, row in rows.items()}


def _last_step(directory: Path) -> int:
    return max((row.step for row in _rows(directory)), default=0)


def _first_step_after(directory: Path, killed_after: int) -> int:
    """Return the step at which rank 0's log goes back (or on) after the kill."""
    steps = [row.step for row in read_steps(directory, 0)]
    jumps = [new for old, new in itertools.pairwise(steps) if new != old + 1]
    return jumps[0] if jumps else killed_after + 1


def _show(console: Console, work: Path, rounds: int, outcome: Outcome) -> None:
    """Print the one screen: the last round's tables, then what must be a yes."""
    stock, ours = work / f"stock-{rounds - 1}", work / f"trainpath-{rounds - 1}"
    comparison = compare(
        Report.from_directory(stock / "metrics"), Report.from_directory(ours / "metrics")
    )
    title = (
        f"trainpath demo: {NUM_RANKS} ranks (gloo, this CPU), {STEPS} steps a run, round "
        f"{rounds} of {rounds}, object server at {RATE_BYTES_PER_S / 1e6:.1f} MB/s"
    )
    resumed = (
        f"kill -9 after step {outcome.killed_after_step}, on at step "
        f"{outcome.resumed_at_step}; losses too: {_yes(outcome.resume_exact)}"
    )
    lines = [
        title,
        "before: DataLoader over webdataset, DDP, torch.save   after: accelerate()",
        "",
        str(comparison),
        "",
        f"bytes from the object server: {_megabytes(stock)} before, {_megabytes(ours)} after",
        f"losses identical: {_yes(outcome.losses_identical)}",
        f"samples after kill and resume identical: {_yes(outcome.samples_identical)}  ({resumed})",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def _megabytes(arm: Path) -> str:
    return f"{int((arm / 'bytes_sent').read_text()) / 1e6:.1f} MB"


def _yes(true: bool) -> str:
    return "yes" if true else "NO"


@contextmanager
def _work_directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=False)
        yield keep.resolve()
        return
    # A checkpoint writer that outlived the kill may still be finishing.
    with tempfile.TemporaryDirectory(prefix="trainpath-demo-", ignore_cleanup_errors=True) as work:
        yield Path(work)
