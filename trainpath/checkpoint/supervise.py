"""The trainer's side of the writer process: start it, hand it work, replace it when it dies."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainpath.checkpoint.wire import is_readable, receive, send
from trainpath.errors import CheckpointWriteError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WriterProcess"]

_ATTEMPTS: Final = 3
_POLL_S: Final = 0.2
_SOURCE: Final = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from trainpath.checkpoint.writer import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class WriterProcess:
    """A writer process that is replaced when it dies; used by one thread at a time.

    Args:
        inherit: Descriptors that it keeps open for as long as it lives (the lease).

    Attributes:
        fault: For tests: goes with the next job, once (see `writer`).
        num_started: How many processes there have been.

    Cost:
        One Python process without torch: about 10 MB and 30 ms to start.
    """

    def __init__(self, *, inherit: Sequence[int] = ()) -> None:
        self._inherit = tuple(inherit)
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self.fault: dict[str, Any] | None = None
        self.give_up_at = math.inf  # monotonic seconds; ends also a job that is under way
        self.num_started = 0
        self._start()

    @property
    def pid(self) -> int | None:
        """The process, or None if there is none now."""
        return None if self._process is None else self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).parents[2])
        arguments = [root, str(theirs.fileno()), str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _SOURCE, *arguments],
                stdin=subprocess.DEVNULL,
                # Pipes of the launcher must not stay open for as long as the writer lives.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs.fileno(), *self._inherit),
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise CheckpointWriteError(
                error.errno, f"the checkpoint writer could not be started: {error}"
            ) from error
        finally:
            theirs.close()
        self._channel = ours
        self.num_started += 1

    def write(self, job: dict[str, Any], fds: Sequence[int], *, timeout_s: float) -> dict[str, Any]:
        """Have one job written, again by a new process if one dies over it.

        Raises:
            CheckpointWriteError: It failed, with the reason.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in range(_ATTEMPTS):
            if self._process is None or self._process.poll() is not None:
                self._stop()
                self._start()
            fault, self.fault = self.fault, None
            try:
                reply = self._exchange({**job, "fault": fault}, fds, deadline)
            except (EOFError, OSError):
                died = self._stop()
                if attempt + 1 == _ATTEMPTS:
                    raise CheckpointWriteError(
                        f"step {job['step']}: the checkpoint writer of rank {job['rank']} died "
                        f"{_ATTEMPTS} times over it (last exit status {died})"
                    ) from None
                continue
            if reply["error"]:
                text = (
                    f"step {job['step']} was not saved in {job['directory']} "
                    f"(rank {job['rank']}): {reply['error']}"
                )
                number = reply["errno"]
                raise CheckpointWriteError(number, text) if number else CheckpointWriteError(text)
            return reply
        raise CheckpointWriteError(f"step {job['step']} was not saved")  # pragma: no cover

    def _exchange(self, job: dict[str, Any], fds: Sequence[int], deadline: float) -> dict[str, Any]:
        channel, process = self._channel, self._process
        if channel is None or process is None:
            raise EOFError
        channel.settimeout(max(_POLL_S, deadline - time.monotonic()))
        send(channel, pickle.dumps(job), fds)
        while True:
            # Not by a timeout of the reading: it could go off between two parts of a message.
            if is_readable(channel, _POLL_S):
                reply: dict[str, Any] = pickle.loads(receive(channel)[0])
                return reply
            if process.poll() is not None:
                raise EOFError
            if time.monotonic() > min(deadline, self.give_up_at):
                self._stop()
                return {
                    "errno": 0,
                    "error": "the writer did not answer before the deadline and was ended",
                }

    def _stop(self, *, patience_s: float = 0.0) -> int | None:
        """End the process, after `patience_s` by force; return its exit status."""
        if self._channel is not None:
            # Processes that were forked meanwhile, such as loader workers, hold a copy of
            # this end: closing ours alone would not tell the writer.
            with contextlib.suppress(OSError):
                self._channel.shutdown(socket.SHUT_RDWR)
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            return process.wait(patience_s) if patience_s else process.poll() or self._kill(process)
        except subprocess.TimeoutExpired:
            return self._kill(process)

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> int | None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(10)
        return None

    def close(self) -> None:
        """Let the process end; safe to call twice."""
        self._stop(patience_s=5.0)
