"""The background half of a save: stage it, have it written, tell how it went."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from trainpath.checkpoint.commit import mark_failed
from trainpath.checkpoint.generation import pack_values
from trainpath.checkpoint.metadata import image_name, values_name
from trainpath.checkpoint.retention import discard, temporary_name
from trainpath.checkpoint.supervise import WriterProcess
from trainpath.errors import CheckpointWriteError
from trainpath.metrics import Span
from trainpath.metrics import segments as S
from trainpath.overlap import Background

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainpath.checkpoint.generation import Generation
    from trainpath.metrics import StepClock

__all__ = ["MARGIN_S", "Saver"]

_log = logging.getLogger("trainpath.checkpoint")

# How long a writer whose trainer is gone still waits for the other ranks.
_ORPHAN_S: Final = 10.0
# The writer tells that it missed the deadline; this much later we stop listening.
MARGIN_S: Final = 5.0


class Saver:
    """Owns the staging thread and the writer process of one manager.

    Args:
        directory: Where the steps go.
        rank: This rank.
        world_size: How many ranks save together.
        keep: How many committed steps stay.
        clock: Gets the background work as spans.
        timeout_s: Deadline of writing and committing one step.
        inherit: Descriptors that the writer keeps open (the lease).

    Attributes:
        writer: The writer process.
        error: What failed and has not been told yet.

    Cost:
        One thread, from the first save on, and one process.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        keep: int,
        clock: StepClock,
        timeout_s: float,
        inherit: Sequence[int],
    ) -> None:
        self._directory = directory
        self._rank = rank
        self._clock = clock
        self._timeout_s = timeout_s
        self._common = {
            "directory": str(directory),
            "rank": rank,
            "world_size": world_size,
            "keep": keep,
            "timeout_s": timeout_s,
            "orphan_s": _ORPHAN_S,
            "image_name": image_name(rank),
            "values_name": values_name(rank),
            "torch": str(torch.__version__),
        }
        self.error: CheckpointWriteError | None = None
        self._background = Background("trainpath-ckpt-staging", depth=1)
        self.writer = WriterProcess(inherit=inherit)

    def submit(self, generation: Generation, plan_digest: str, description: bytes | None) -> None:
        """Stage and write `generation` in the background; one at a time.

        Args:
            generation: What was captured.
            plan_digest: What the ranks compare at the commit.
            description: The pieces of `.metadata`, on rank 0.
        """
        job = self._common | {
            "step": generation.handle.step,
            "token": generation.token,
            "plan_digest": plan_digest,
            "metadata": description,
        }
        self._background.submit(lambda: self._work(generation, job), timeout_s=self._timeout_s)

    def _work(self, generation: Generation, job: dict[str, Any]) -> None:
        """Run on the background thread; never raises."""
        try:
            self._stage(generation)
            self._write(generation, job)
        except CheckpointWriteError as error:
            self._fail(generation, job, error)
        except Exception as error:
            text = f"step {generation.handle.step} could not be saved: {error}"
            wrapped = CheckpointWriteError(text)
            wrapped.__cause__ = error
            self._fail(generation, job, wrapped)
        finally:
            generation.finished.set()

    def _stage(self, generation: Generation) -> None:
        start = time.monotonic_ns()
        generation.stage()
        staged = generation.handle.staged
        staged.settle()
        staged.wait(0)  # raises if it was given up meanwhile
        self._span("ckpt staging", S.CKPT_FENCE, start, time.monotonic_ns(), generation)

    def _write(self, generation: Generation, job: dict[str, Any]) -> None:
        image = generation.image
        data, groups = pack_values(generation.values, job["values_name"])
        job = job | {
            "image_size": image.size,
            "payloads": image.payloads,
            "values": data,
            "groups": groups,
        }
        generation.handed_over = True
        reply = self.writer.write(job, [image.fd], timeout_s=self._timeout_s + MARGIN_S)
        handle = generation.handle
        handle.num_bytes = reply["bytes"]
        handle.durable_ns = reply["durable_ns"] - generation.began_ns
        start, end = reply["start_ns"], reply["durable_ns"]
        self._span("ckpt writer", S.CKPT_BACKPRESSURE, start, end, generation)
        handle.durable.settle()

    def _span(self, lane: str, segment: int, start: int, end: int, generation: Generation) -> None:
        name = f"step {generation.handle.step}"
        self._clock.add_span(
            Span(lane=lane, segment=segment, start_ns=start, end_ns=end, name=name)
        )

    def _fail(
        self, generation: Generation, job: dict[str, Any], error: CheckpointWriteError
    ) -> None:
        _log.error("%s", error)
        self.error = error
        generation.fail(error)
        # The other ranks must not wait for what will not come. A save that got as far as its
        # writer has a directory; if that is gone, rank 0 has given up already.
        folder = self._directory / temporary_name(job["step"], job["token"])
        if self._rank == 0:
            discard(folder)
            return
        if not generation.handed_over:
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
        mark_failed(folder, job, str(error))

    def close(self) -> None:
        """End thread and process; safe to call twice."""
        try:
            self._background.close()
        finally:
            self.writer.close()
