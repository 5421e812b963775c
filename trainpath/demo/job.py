"""The demo's processes: the object server and the torchrun jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainpath.errors import DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Job", "serve"]


@contextmanager
def serve(root: Path, *, rate: float, latency_s: float) -> Iterator[str]:
    """Serve `root` by an object server process on loopback; yield its URL."""
    command = [sys.executable, "-m", "trainpath.testing.object_server", "--exit-with-parent"]
    command += ["--root", str(root), "--rate", str(rate), "--latency", str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline() if server.stdout else ""
            yield json.loads(line)["url"]
        finally:
            server.terminate()
            server.wait(10)


class Job:
    """A torchrun job of the demo's training script, in a session of its own.

    Args:
        arms: What to train, one after another ("stock-0", "trainpath-1").
        work: Directory for logs, metrics and checkpoints, one subdirectory an arm.
        urls: The shards.
        epochs: Passes over them.
        num_ranks: Processes.
    """

    def __init__(
        self, arms: list[str], *, work: Path, urls: list[str], epochs: int, num_ranks: int
    ) -> None:
        urls_file = work / "urls.txt"
        urls_file.write_text("\n".join(urls))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", str(num_ranks), "-m", "trainpath.demo.train", *arms]
        command += ["--work", str(work), "--urls", str(urls_file), "--epochs", str(epochs)]
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by finish or kill
        self._process = subprocess.Popen(
            command,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def finish(self, timeout_s: float) -> None:
        """Wait for the end of the job.

        Raises:
            ChildProcessError: It failed; the message holds the end of its output.
            DeadlineError: It did not end in time, and was killed.
        """
        try:
            self.wait_for(lambda: self._process.poll() is not None, timeout_s)
            if self._process.returncode != 0:
                raise ChildProcessError(f"training failed:\n{self._tail()}")
        finally:
            self.kill()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until `condition()`, or the end of the job, or the deadline."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            ended = self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                tail = self._tail()
                self.kill()
                if ended:
                    raise ChildProcessError(f"training ended too early:\n{tail}")
                raise DeadlineError(f"training took over {timeout_s:.0f} s:\n{tail}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill -9 torchrun and every rank; safe to call on an ended job."""
        with suppress(ProcessLookupError):
            for rank in _children(self._process.pid):
                os.kill(rank, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._output.close()

    def _tail(self) -> str:
        self._output.seek(0)
        lines = self._output.read().splitlines()
        told = [line for line in lines if line.startswith("[rank")]
        return "\n".join((told or lines)[-60:])


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []
