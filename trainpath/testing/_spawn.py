"""Run a function on real ranks: processes of their own, joined in a gloo process group."""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import types
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from trainpath.errors import ConfigError, TrainpathError
from trainpath.testing._rank import Job, LogFile, Outcome, SharedFile, run_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = ["RankFailure", "SpawnError", "spawn"]

_PRELOAD = ["torch", "torch.distributed", "trainpath.testing._rank"]
_MAIN_MODULES = ["pytest"]
_LEAVE_S = 2.0  # for a rank to leave, or to write the stacks of its threads
_LOG_TAIL = 40  # lines of output shown for a rank that failed


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """Why one rank has no result.

    Attributes:
        rank: The rank.
        reason: One line: raised, killed by a signal, exited, or still running.
        traceback: Traceback of the exception, or None where there was none.
        output: What the rank printed; the stacks of its threads if it had to be ended.
    """

    rank: int
    reason: str
    traceback: str | None
    output: str

    def __str__(self) -> str:
        parts = [f"rank {self.rank} {self.reason}"]
        if self.traceback is not None:
            parts.append(self.traceback.rstrip())
        if self.output.strip():
            tail = "\n".join(self.output.rstrip().splitlines()[-_LOG_TAIL:])
            parts.append(f"output of rank {self.rank}:\n{tail}")
        return "\n".join(parts)


class SpawnError(TrainpathError, RuntimeError):
    """At least one rank did not return.

    Attributes:
        failures: One `RankFailure` for each rank without a result, by rank; in the order
            of time, so that the likely cause comes first.
        results: What the other ranks returned, by rank.
    """

    def __init__(self, failures: Mapping[int, RankFailure], results: Mapping[int, Any]) -> None:
        self.failures = dict(failures)
        self.results = dict(results)
        total = len(failures) + len(results)
        shown = "\n\n".join(str(failure) for failure in failures.values())
        super().__init__(f"{len(failures)} of {total} ranks did not return\n\n{shown}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by arguments, as the message is built from them."""
        return type(self), (self.failures, self.results)


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
    backend: str | None = "gloo",
    grace_s: float = 5.0,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks and return what each returned, by rank.

    Each rank is a process with the environment that torchrun would give it (`RANK`,
    `LOCAL_RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...), the parent's working directory and,
    unless `backend` is None, an initialised default process group.

    Args:
        fn: A function at the top level of a module; test modules work in every import
            mode of pytest, a script needs the usual `if __name__ == "__main__"`.
        world_size: Number of ranks.
        args: Picklable arguments, the same for every rank.
        timeout_s: All ranks are killed when it runs out, counted from when all of them
            are running. Collectives time out a little earlier, so that a hang usually
            shows as a traceback.
        env: Variables on top of the current environment of this process.
        backend: Backend of the default process group; None leaves initialising to `fn`
            (`init_process_group()` by `env://` works as under torchrun).
        grace_s: How long the others may go on once a rank has failed, so that they can
            say how they saw it; then they are ended.

    Returns:
        The results in rank order.

    Raises:
        SpawnError: A rank raised, was killed, exited or was still running at the deadline.
            It holds the traceback and output of each, and the results of the others.
        ConfigError: A bad argument, or a function that cannot be pickled.

    Cost:
        The first call starts multiprocessing's forkserver and imports torch in it once
        (about two seconds of CPU); it ends with this process. Then a rank costs one fork.
        One store thread in this process while the call runs.

    Guarantee:
        When it returns or raises, by whatever cause, all ranks and the processes in their
        sessions are gone, and no file was ever created. If this process is killed, the
        ranks die with it.
    """
    _check(world_size, timeout_s, env or {})
    call, modules = _pickle_call(fn, args)
    with _agent_store() as port:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                job = Job(
                    environ=_environ(rank, world_size, port, env or {}),
                    directory=os.getcwd(),  # noqa: PTH109
                    modules=modules,
                    call=call,
                    backend=backend,
                    collective_timeout_s=max(1.0, 0.75 * timeout_s),
                )
                ranks.append(_Rank(rank, job))
            _collect(ranks, timeout_s=timeout_s, grace_s=grace_s)
            return _results(ranks)
        finally:
            for each in ranks:
                each.close()


def _check(world_size: int, timeout_s: float, env: Mapping[str, str]) -> None:
    """Refuse arguments of `spawn` that cannot work."""
    if not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size must be a positive int, not {world_size!r}")
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    if not all(isinstance(text, str) for pair in env.items() for text in pair):
        raise ConfigError(f"env must map strings to strings, not {dict(env)!r}")


def _pickle_call(
    fn: Callable[..., Any], args: Sequence[Any]
) -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """Return the pickled call and the names and files of the modules it needs."""
    pickled = io.BytesIO()
    pickler = _ModulePickler(pickled)
    try:
        pickler.dump((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"spawn cannot send {fn!r} and its arguments to the ranks: {error}; the function "
            "must stand at the top level of a module and the arguments must be picklable"
        ) from error
    return pickled.getvalue(), tuple(pickler.modules.items())


class _ModulePickler(pickle.Pickler):
    """A pickler that notes which source files the pickled functions and classes come from."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: dict[str, str] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Note the module of `obj`; pickle it as usual."""
        if isinstance(obj, type | types.FunctionType) and obj.__module__ != "__main__":
            module = sys.modules.get(obj.__module__)
            file = getattr(module, "__file__", None)
            if file is not None and file.endswith(".py"):
                self.modules.setdefault(obj.__module__, os.path.realpath(file))
        return NotImplemented


@contextmanager
def _agent_store() -> Iterator[int]:
    """Host the job's store in this process, as torchrun's agent does; yield its port.

    Here it outlives every rank, and the port is known and taken before a rank starts.
    """
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )
    try:
        yield store.port
    finally:
        del store


def _environ(rank: int, world_size: int, port: int, env: Mapping[str, str]) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",  # torchrun's default
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **env,
    }


class _Rank:
    """One rank as the parent sees it."""

    def __init__(self, rank: int, job: Job) -> None:
        context = multiprocessing.get_context("forkserver")
        # The main script, so most often pytest, is imported again by each rank; what is
        # in the server already costs nothing there. No effect once the server runs.
        loaded = [name for name in _MAIN_MODULES if name in sys.modules]
        context.set_forkserver_preload([*_PRELOAD, *loaded])
        self.rank = rank
        self.outcome: Outcome | None = None
        self._why_ended: str | None = None
        self._log = LogFile.create()
        self._pipe, child = context.Pipe()
        life, self._life = (SharedFile(fd) for fd in os.pipe())  # closes when we die
        self._process: ForkServerProcess = context.Process(
            target=run_rank,
            args=(job, child, self._log, life),
            name=f"trainpath-rank-{rank}",
        )
        try:
            self._process.start()
        except BaseException:
            self._release()
            raise
        finally:
            child.close()
            life.close()

    @property
    def sources(self) -> list[Connection | int]:
        """What to wait for: its outcome, or its end."""
        if self._pipe.closed:
            return [] if self._process.exitcode is not None else [self._process.sentinel]
        return [self._pipe, self._process.sentinel]

    @property
    def pending(self) -> bool:
        """Whether it may still send an outcome."""
        return self.outcome is None and not self._pipe.closed

    @property
    def failed(self) -> bool:
        """Whether it will have no result."""
        return not self.pending and (self.outcome is None or self.outcome.error is not None)

    def receive(self) -> None:
        """Take the outcome if it is there, or learn that none will come."""
        has_ended = self._process.exitcode is not None  # asked first: nothing is sent after it
        try:
            if self._pipe.poll():
                self.outcome = pickle.loads(self._pipe.recv_bytes())
            elif has_ended:
                self._pipe.close()
        except (EOFError, ConnectionResetError):
            self._pipe.close()

    def let_go(self) -> None:
        """Tell a rank that is done that all others are done, too."""
        if not self._pipe.closed:
            try:
                self._pipe.send_bytes(b"")
            except BrokenPipeError:
                self._pipe.close()

    def has_ended(self, deadline: float) -> bool:
        """Wait until `deadline` for the process to end; tell whether it has."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        return self._process.exitcode is not None

    def abort(self, why: str) -> None:
        """Ask a rank that still runs for the stacks of its threads, which ends it, too."""
        if self._process.exitcode is None:
            self._why_ended = why
            os.kill(self._pid, signal.SIGABRT)

    def failure(self) -> RankFailure | None:
        """Return why this rank counts as failed, if it does."""
        code = self._process.exitcode
        traceback = None if self.outcome is None else self.outcome.error
        when = "after" if self.outcome else "before"
        if traceback is not None:
            reason = f"raised {traceback.rstrip().splitlines()[-1]}"
        elif self._why_ended is not None:
            done = "had returned but its process still ran" if self.outcome else "still ran"
            reason = f"{done} {self._why_ended}"
        elif code is not None and code < 0:
            reason = f"was killed by {signal.Signals(-code).name} {when} it returned"
        elif self.outcome is None or code not in (0, None):
            reason = f"exited with code {code} {when} it returned"
        else:
            return None
        return RankFailure(
            rank=self.rank, reason=reason, traceback=traceback, output=self._log.text()
        )

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Where its failure stands: died without a word, raised, ended by us; by time."""
        outcome = self.outcome
        ended_s = 0.0 if outcome is None else outcome.ended_s
        return self._why_ended is not None, outcome is not None, ended_s

    def result(self) -> Any:
        """Return what the rank returned."""
        if self.outcome is None or self.outcome.result is None:
            raise RuntimeError(f"rank {self.rank} has no result")
        return pickle.loads(self.outcome.result)

    def show_output(self) -> None:
        """Pass what the rank printed on to this process's standard output."""
        if text := self._log.text():
            lines = "".join(f"[rank {self.rank}] {line}\n" for line in text.splitlines())
            sys.stdout.write(lines)

    def close(self) -> None:
        """End whatever of its session still runs and release everything."""
        alive = self._process.exitcode is None
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        if alive:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # it had no session of its own yet
        self._process.join()
        self._process.close()
        self._release()

    def _release(self) -> None:
        for end in (self._pipe, self._log, self._life):
            end.close()

    @property
    def _pid(self) -> int:
        if self._process.pid is None:
            raise RuntimeError(f"rank {self.rank} was not started")
        return self._process.pid


def _collect(ranks: list[_Rank], *, timeout_s: float, grace_s: float) -> None:
    """Take every outcome; once a rank has failed, wait only `grace_s` for the others."""
    deadline = time.monotonic() + timeout_s
    why = f"at the deadline of {timeout_s:g} s"
    has_failed = False
    while pending := [rank for rank in ranks if rank.pending]:
        if not has_failed and any(rank.failed for rank in ranks):
            has_failed = True
            if time.monotonic() + grace_s < deadline:
                deadline = time.monotonic() + grace_s
                why = f"{grace_s:g} s after another rank had failed"
        sources = [source for rank in pending for source in rank.sources]
        if not connection.wait(sources, max(0.0, deadline - time.monotonic())):
            break
        for rank in pending:
            rank.receive()
    _end(ranks, deadline, why)


def _end(ranks: list[_Rank], deadline: float, why: str) -> None:
    """Let the ranks that are done leave until `deadline`, and end the others."""
    for rank in ranks:
        rank.let_go()
    # Their exit handlers may take a moment even if the deadline is near.
    deadline = max(deadline, time.monotonic() + _LEAVE_S)
    waiting = [rank for rank in ranks if not rank.pending]
    late = [rank for rank in ranks if rank.pending]
    late += [rank for rank in waiting if not late and not rank.has_ended(deadline)]
    for rank in late:
        rank.abort(why)
    stacks_deadline = time.monotonic() + _LEAVE_S
    for rank in ranks:
        rank.has_ended(stacks_deadline)


def _results(ranks: list[_Rank]) -> list[Any]:
    """Return the results, or raise with everything known about the ranks that have none."""
    in_order = sorted(ranks, key=lambda rank: rank.order)
    failures = {rank.rank: failure for rank in in_order if (failure := rank.failure())}
    returned = [rank for rank in ranks if rank.rank not in failures]
    results = {rank.rank: rank.result() for rank in returned}
    for rank in returned:
        rank.show_output()
    if failures:
        raise SpawnError(failures, results)
    return [results[rank.rank] for rank in ranks]
