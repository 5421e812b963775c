"""The few internals of torch's DataLoader that being equal to it needs, typed."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import pin_memory as _pin_memory
from torch.utils.data._utils import worker as _worker

from trainpath.errors import TrainpathError

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["ExceptionWrapper", "caught", "pinned", "reraise", "seed_worker", "set_worker_info"]


class _Failure(ExceptionWrapper):
    """Torch's wrapper, with the message alone beside the whole traceback."""

    def __init__(self, where: str) -> None:
        super().__init__(where=where)  # type: ignore[no-untyped-call]
        self.message = str(sys.exc_info()[1])


class _WorkerTraceback(Exception):  # noqa: N818 - it is shown as a cause, never raised
    """The traceback of a worker as text."""


def caught(where: str) -> ExceptionWrapper:
    """Wrap the exception being handled, with its traceback as text."""
    return _Failure(where)


def reraise(failure: ExceptionWrapper) -> NoReturn:
    """Raise what was wrapped, of the same type.

    One of ours keeps its one-line message and has the worker's traceback as its cause; any
    other has the traceback in its message, as with torch.
    """
    if isinstance(failure, _Failure) and issubclass(failure.exc_type, TrainpathError):
        cause = _WorkerTraceback(f"\n{failure.exc_msg}")
        raise failure.exc_type(f"{failure.message} ({failure.where})") from cause
    failure.reraise()  # type: ignore[no-untyped-call]
    raise RuntimeError(failure.exc_msg)


def pinned(batch: Any) -> Any:
    """Return the batch in page-locked memory, as torch's pin thread would."""
    return _pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]


def seed_worker(worker: int, base_seed: int) -> int:
    """Seed Python's, torch's and numpy's generators as torch's workers do; return the seed."""
    seed = base_seed + worker
    random.seed(seed)
    torch.manual_seed(seed)
    state = _worker._generate_state(base_seed, worker)  # type: ignore[no-untyped-call]  # noqa: SLF001
    np.random.seed(state)  # noqa: NPY002  (user code draws from the global generator)
    return seed


def set_worker_info(worker: int, num_workers: int, seed: int, dataset: Any) -> None:
    """Make `torch.utils.data.get_worker_info()` answer in this process."""
    _worker._worker_info = _worker.WorkerInfo(  # noqa: SLF001
        id=worker, num_workers=num_workers, seed=seed, dataset=dataset
    )
