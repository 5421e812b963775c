"""What runs inside one rank of `spawn`: set up like torchrun would, call, report, leave."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import importlib.util
import os
import pickle
import resource
import signal
import sys
import traceback
from dataclasses import dataclass
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["Job", "LogFile", "Outcome", "run_rank"]

_PR_SET_PDEATHSIG = 1


class LogFile:
    """An anonymous file for the output of one rank, which the parent can read at any time.

    It lives in memory and has no name, so that nothing is left even after a kill -9.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("trainpath-rank-log", os.MFD_CLOEXEC) if fd is None else fd

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to the rank as a duplicate of the descriptor."""
        return _open_log, (reduction.DupFd(self.fd),)

    def text(self) -> str:
        """Return everything written so far."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0).decode(errors="replace")

    def close(self) -> None:
        """Release the memory; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _open_log(duplicate: Any) -> LogFile:
    return LogFile(duplicate.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank is to do.

    Attributes:
        environ: The complete environment of the rank.
        directory: Its working directory.
        modules: Names and files of the modules that `call` needs.
        call: The pickled function and its arguments.
        backend: Backend of the process group to initialise, or None for no group.
        collective_timeout_s: Timeout of that group.
        log: Where standard output and error go.
    """

    environ: dict[str, str]
    directory: str
    modules: tuple[tuple[str, str], ...]
    call: bytes
    backend: str | None
    collective_timeout_s: float
    log: LogFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the call ended: a pickled result, or the text of an exception."""

    result: bytes | None = None
    error: str | None = None


def run_rank(job: Job, parent: Connection) -> None:
    """Run `job` in this fresh process and send its `Outcome` to `parent`.

    A rank that succeeded waits until the parent lets it go, so that no rank tears its
    connections down while another still communicates. A rank that failed leaves at once,
    as it would under torchrun.
    """
    _isolate(job)
    outcome = _call(job)
    parent.send_bytes(pickle.dumps(outcome))
    if outcome.error is None:
        try:
            parent.recv_bytes()
        except EOFError:
            return
        _destroy_process_group()
    # multiprocessing ends its children without exit handlers; a script under torchrun runs them.
    atexit._run_exitfuncs()  # noqa: SLF001


def _isolate(job: Job) -> None:
    """Take environment, directory and output of `job`; die when the parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()  # the parent can end this rank with everything it started
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.clear()
    os.environ.update(job.environ)
    os.chdir(job.directory)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(job.log.fd, 1)
    os.dup2(job.log.fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    faulthandler.enable(job.log.fd)  # the parent asks a hung rank for its stacks by SIGABRT


def _call(job: Job) -> Outcome:
    try:
        for name, file in job.modules:
            _ensure_module(name, file)
        fn: Callable[..., object]
        fn, args = pickle.loads(job.call)
        _init_process_group(job)
        return Outcome(result=pickle.dumps(fn(*args)))
    except BaseException as error:  # SystemExit too: a rank that exits has not returned
        return Outcome(error="".join(traceback.format_exception(error)))


def _ensure_module(name: str, file: str) -> None:
    """Import `name` from `file` unless an import would find that same file by itself.

    pytest's importlib mode names test modules as if they could be imported, without
    putting their folder on the path; pickle would not find them in a new process.
    """
    if name in sys.modules:
        return
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is not None and found.origin is not None and os.path.samefile(found.origin, file):
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {name} from {file}: not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _init_process_group(job: Job) -> None:
    """Join the job's group by env://, the way a script under torchrun does."""
    if (threads := job.environ.get("OMP_NUM_THREADS")) is not None:
        import torch

        torch.set_num_threads(int(threads))  # torch was imported before this environment
    if job.backend is None:
        return
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(job.backend, timeout=timedelta(seconds=job.collective_timeout_s))


def _destroy_process_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
