"""The segments of a training step: what the step thread can be doing.

A segment is a small int (an index into `SEGMENTS`), so that charging one costs an
array access. The names are what reports, JSONL files and traces print.
"""

from __future__ import annotations

from typing import Final

__all__ = ["DATA_SEGMENTS", "SEGMENTS", "STALL_SEGMENTS", "segment_index"]

SEGMENTS: Final = (
    "data.queue",  # high: every worker is busy with other batches; more workers or depth
    "data.storage",  # high: the origin or disk is slow to answer (time to first byte, local reads)
    "data.network",  # high: the bytes of a remote object are still arriving
    "data.cache",  # high: waiting for another process's download, checks, publication
    "data.decode",  # high: user code of the data set (decode, augment) is the limit
    "data.collate",  # high: building the batch from its samples
    "data.transport",  # high: handing the batch from the worker to the step thread
    "h2d",  # high: host-to-device copies are not overlapped
    "forward",  # compute; the CPU time of the loss function too (see `ModelHooks`)
    "backward",  # compute
    "optimizer",  # compute
    "comm.transfer",  # high: gradients on the wire although every rank has arrived
    "comm.straggler",  # high: this rank waits for a slower one; see what made that one late
    "ckpt.capture",  # high: small state copied inside save()
    "ckpt.fence",  # high: staging has not finished before optimizer.step()
    "ckpt.backpressure",  # high: an earlier checkpoint is still being written
    "python.gc",  # high: the garbage collector runs inside the step
    "python",  # anything else on the step thread: logging, user code, waits
)

DATA_QUEUE: Final = 0
DATA_STORAGE: Final = 1
DATA_NETWORK: Final = 2
DATA_CACHE: Final = 3
DATA_DECODE: Final = 4
DATA_COLLATE: Final = 5
DATA_TRANSPORT: Final = 6
H2D: Final = 7
FORWARD: Final = 8
BACKWARD: Final = 9
OPTIMIZER: Final = 10
COMM_TRANSFER: Final = 11
COMM_STRAGGLER: Final = 12
CKPT_CAPTURE: Final = 13
CKPT_FENCE: Final = 14
CKPT_BACKPRESSURE: Final = 15
PYTHON_GC: Final = 16
PYTHON: Final = 17

NUM_SEGMENTS: Final = len(SEGMENTS)
DATA_SEGMENTS: Final = tuple(range(DATA_QUEUE, DATA_TRANSPORT + 1))
STALL_SEGMENTS: Final = (
    *DATA_SEGMENTS,
    H2D,
    COMM_TRANSFER,
    COMM_STRAGGLER,
    CKPT_CAPTURE,
    CKPT_FENCE,
    CKPT_BACKPRESSURE,
    PYTHON_GC,
)


def segment_index(name: str) -> int:
    """Return the index of the segment called `name` (ValueError if there is none)."""
    return SEGMENTS.index(name)
