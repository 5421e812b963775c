"""What runs inside one rank of `spawn`: set up like torchrun would, call, report, leave."""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import importlib.util
import multiprocessing
import os
import pickle
import resource
import select
import signal
import sys
import time
import traceback
import types
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import reduction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["Job", "LogFile", "Outcome", "SharedFile", "run_rank"]

_F_SETSIG = 10  # from linux/fcntl.h


class SharedFile:
    """A file descriptor that travels to the rank as a duplicate."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        """Let multiprocessing pass the descriptor."""
        return _open_shared, (type(self), reduction.DupFd(self.fd))

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LogFile(SharedFile):
    """An anonymous file for the output of one rank, which the parent can read at any time.

    It lives in memory and has no name, so that nothing is left even after a kill -9.
    """

    @classmethod
    def create(cls) -> LogFile:
        """Make an empty one."""
        return cls(os.memfd_create("trainpath-rank-log", os.MFD_CLOEXEC))

    def text(self) -> str:
        """Return everything written so far."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0).decode(errors="replace")


def _open_shared(kind: type[SharedFile], duplicate: Any) -> SharedFile:
    return kind(duplicate.detach())


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
    """

    environ: dict[str, str]
    directory: str
    modules: tuple[tuple[str, str], ...]
    call: bytes
    backend: str | None
    collective_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the call ended: a pickled result, or the text of an exception, and when."""

    result: bytes | None = None
    error: str | None = None
    ended_s: float = field(default_factory=time.monotonic)


def run_rank(job: Job, parent: Connection, log: LogFile, life: SharedFile) -> None:
    """Run `job` in this fresh process and send its `Outcome` to `parent`.

    All output goes to `log`; `life` is the reading end of a pipe that closes when the
    parent dies, which ends this rank.

    A rank that succeeded waits until the parent lets it go, so that no rank tears its
    connections down while another still communicates. A rank that failed leaves at once,
    as it would under torchrun.
    """
    _isolate(log, life)
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


def _isolate(log: LogFile, life: SharedFile) -> None:
    """Start a session, die with the parent, and send all output to the log."""
    os.setsid()  # the parent can end this rank with everything it started
    # The kernel kills the session when the pipe closes. That adds no thread and no handler
    # to what runs here, and works although our direct parent is only the fork server.
    fcntl.fcntl(life.fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life.fd, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(life.fd, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([life.fd], [], [], 0)[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log.fd, 1)
    os.dup2(log.fd, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    faulthandler.enable(log.fd)  # the parent asks a hung rank for its stacks by SIGABRT


def _call(job: Job) -> Outcome:
    try:
        os.environ.clear()
        os.environ.update(job.environ)
        os.chdir(job.directory)
        for name, file in job.modules:
            _ensure_module(name, file)
        fn: Callable[..., object]
        fn, args = pickle.loads(job.call)
        _behave_like_torchrun()
        _init_process_group(job)
        return Outcome(result=pickle.dumps(fn(*args)))
    except BaseException as error:  # SystemExit too: a rank that exits has not returned
        return Outcome(error="".join(traceback.format_exception(error)))


def _behave_like_torchrun() -> None:
    """Undo what the fork server changes: the default start method, and the OpenMP threads.

    Without it a data loader's workers in a rank would start by the fork server too, and
    import torch each time; and torch was imported before this environment was known.
    """
    multiprocessing.set_start_method(None, force=True)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


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
    if found is not None and found.origin is not None and Path(found.origin).samefile(file):
        return
    for position in (i for i, letter in enumerate(name) if letter == "."):
        _ensure_package(name[:position])
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


def _ensure_package(name: str) -> None:
    """Stand in for a package that only pytest imagines: pickle imports it by name."""
    try:
        importlib.import_module(name)
    except ImportError:
        sys.modules[name] = types.ModuleType(name)


def _init_process_group(job: Job) -> None:
    """Join the job's group, as `init_process_group()` does under torchrun.

    It returns when every rank has joined: no rank may fail while another still connects.
    """
    if job.backend is None:
        return
    rank, world_size = int(job.environ["RANK"]), int(job.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=job.collective_timeout_s)
    store = TCPStore("127.0.0.1", int(job.environ["MASTER_PORT"]), timeout=timeout)
    dist.init_process_group(
        job.backend, store=store, rank=rank, world_size=world_size, timeout=timeout
    )
    if store.add("trainpath-joined", 1) == world_size:
        store.set("trainpath-all-joined", "")
    store.wait(["trainpath-all-joined"])


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
