"""The pool of worker processes, seen from the step process.

A worker is started the way torch would start it (`start_context`), talks through one
channel, and is waited for together with all others: no polling, no helper thread. The
death of a worker is an event like any other.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import time
import weakref
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final

import torch

from trainpath.errors import ConfigError
from trainpath.loader._forkserver import ForkserverContext
from trainpath.loader._worker import run_worker
from trainpath.loader.transport import TensorPickler, channel_pair

if TYPE_CHECKING:
    import pickle
    from collections.abc import Iterator

    from trainpath.loader._worker import WorkerSpec
    from trainpath.loader.transport import Channel

__all__ = ["WorkerPool", "describe_exit", "start_context"]

_JOIN_S: Final = 5.0
_MAX_SENT_BYTES: Final = 64 << 20
_MAIN: Final = b"__main__"


def start_context(spec: WorkerSpec, wanted: Any) -> Any:
    """Return the multiprocessing context to start workers with.

    Args:
        spec: What the workers get.
        wanted: The user's `multiprocessing_context`, or None.

    Returns:
        `wanted`, or the start method the user set globally, or else fork as torch does on
        Linux; but not from a process with a CUDA context, unless the workers' arguments
        cannot be sent to a fork server (unpicklable, large, or from the main script).
    """
    if wanted is not None:
        return wanted
    method = multiprocessing.get_start_method(allow_none=True)
    has_context = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if (method == "forkserver" or (has_context and method != "spawn")) and _is_portable(spec):
        return ForkserverContext()
    return multiprocessing.get_context(method or "fork")


def _is_portable(spec: WorkerSpec) -> bool:
    """Whether a spec can be sent: it pickles, to little, and holds nothing of the main script.

    A large data set is inherited by fork instead: sending it would copy it per worker.
    """
    probe = _Probe()
    try:
        probe.dump(spec)
    except Exception:
        return False
    return True


class _Probe(io.RawIOBase):
    """Takes a pickle and fails at what should not be sent; keeps nothing."""

    def __init__(self) -> None:
        self._length = 0
        self._tail = b""

    def dump(self, value: object) -> None:
        """Pickle `value` into nothing."""
        TensorPickler(self, protocol=5, buffer_callback=self._count).dump(value)

    def _count(self, buffer: pickle.PickleBuffer) -> None:
        self._add(buffer.raw().nbytes)

    def write(self, data: Any, /) -> int:
        """Check a piece of the pickle."""
        piece = bytes(memoryview(data)[: len(_MAIN) - 1])
        if _MAIN in self._tail + piece or _MAIN in bytes(data):
            raise ConfigError("refers to the main script")
        self._tail = bytes(data)[1 - len(_MAIN) :]
        self._add(len(data))
        return len(data)

    def _add(self, length: int) -> None:
        self._length += length
        if self._length > _MAX_SENT_BYTES:
            raise ConfigError("is too large to be sent to each worker")


def describe_exit(exitcode: int | None) -> str:
    """Say how a process ended: "was killed by SIGKILL", "exited with code 3"."""
    if exitcode is None:
        return "closed its channel"
    if exitcode >= 0:
        return f"exited with code {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


class _Member:
    """One running worker: its process and our end of its channel."""

    def __init__(self, process: Any, channel: Channel) -> None:
        self.process = process
        self.channel = channel
        self.gone = False


class WorkerPool:
    """Worker processes and their channels.

    Args:
        spec: What every worker gets.
        context: The multiprocessing context to start them with.

    Cost:
        `spec.num_workers` daemon processes with two or three threads each; two file
        descriptors per worker here.

    Guarantee:
        Workers end with the step process, also when that is killed: they wait on its
        process descriptor and ask the kernel for a parent-death signal.
    """

    def __init__(self, spec: WorkerSpec, context: Any) -> None:
        self._spec = spec
        self._context = context
        self._members: list[_Member] = []
        self._owner = os.getpid()
        self.closed = False
        self._finalizer = weakref.finalize(self, _end, self._members, self._owner)
        try:
            for worker in range(spec.num_workers):
                self._members.append(self._launch(worker))
        except BaseException:
            self.close()
            raise

    def _launch(self, worker: int) -> _Member:
        ours, theirs = channel_pair()
        forks = self._context.get_start_method() == "fork"
        # A fork inherits our ends of all channels: it must close them, or the others would
        # never see the end of a channel.
        inherited = [member.channel for member in self._members] if forks else []
        process = self._context.Process(
            target=run_worker,
            args=(worker, self._spec, theirs, [ours, *inherited] if forks else []),
            name=f"trainpath-loader-{worker}",
            daemon=True,
        )
        try:
            process.start()
        except BaseException:
            ours.hang_up()
            raise
        finally:
            theirs.close()
        return _Member(process, ours)

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [member.process.pid for member in self._members]

    def send(self, worker: int, message: object) -> None:
        """Send a message; one to a dead worker is dropped (its death is an event to come)."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._members[worker].channel.send(message)

    def wait(self, timeout_s: float) -> Iterator[tuple[int, Any]]:
        """Yield (worker, message) for all that is here, waiting for the first.

        The message None means that the worker is dead and all it sent was yielded.
        Nothing is yielded when `timeout_s` passed.
        """
        sources: dict[Any, tuple[int, bool]] = {}
        for worker, member in enumerate(self._members):
            if not member.gone:
                sources[member.channel] = (worker, False)
                sources[member.process.sentinel] = (worker, True)
        ready = connection.wait(list(sources), timeout_s)
        dead = []
        for source in ready:
            worker, is_sentinel = sources[source]
            if is_sentinel:
                dead.append(worker)
                continue
            try:
                yield worker, self._members[worker].channel.recv()
            except EOFError:
                dead.append(worker)
        for worker in dict.fromkeys(dead):
            yield from self._bury(worker)

    def _bury(self, worker: int) -> Iterator[tuple[int, Any]]:
        member = self._members[worker]
        while connection.wait([member.channel.fileno()], 0):
            try:
                yield worker, member.channel.recv()
            except EOFError:
                break
        member.gone = True
        yield worker, None

    def exit_of(self, worker: int) -> tuple[int, str]:
        """Return (pid, how it ended) of a dead worker."""
        process = self._members[worker].process
        process.join(_JOIN_S)
        return process.pid, describe_exit(process.exitcode)

    def respawn(self, worker: int) -> None:
        """Replace a dead worker by a new process."""
        dead = self._members[worker]
        self._members[worker] = self._launch(worker)
        _stop([dead])

    def close(self) -> None:
        """End and join all workers (by closing their channels); safe to call twice."""
        self.closed = True
        self._finalizer()


def _end(members: list[_Member], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the step process: the workers are not its children
    _stop(members)
    members.clear()


def _stop(members: list[_Member]) -> None:
    """End and join processes: by closing their channels, in `_JOIN_S`, or else by force."""
    for member in members:
        member.channel.hang_up()
    for force in ("", "terminate", "kill"):
        deadline = time.monotonic() + _JOIN_S
        alive = [member.process for member in members if member.process.is_alive()]
        for process in alive:
            if force:
                getattr(process, force)()
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))
    for member in members:
        with contextlib.suppress(ValueError):  # not even killed: asleep in the kernel
            member.process.close()
