"""The writer process: copies the image to disk, syncs it, commits it.

Started by exec, without torch, in a session of its own: it outlives a killed trainer for as
long as it takes to commit what was handed to it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import signal
import socket
import time
import traceback
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainpath.checkpoint import commit
from trainpath.checkpoint.retention import discard, temporary_name
from trainpath.checkpoint.wire import is_readable, receive, send

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main"]

_SLICE: Final = 8 << 20
_IDLE_S: Final = 1.0


def main(socket_fd: int, trainer: int) -> None:
    """Serve one trainer until it closes the socket or dies."""
    with contextlib.suppress(OSError):
        os.nice(10)
    channel = socket.socket(fileno=socket_fd)
    while True:
        if not is_readable(channel, _IDLE_S):
            if os.getppid() != trainer:
                return
            continue
        try:
            message, fds = receive(channel)
        except EOFError:
            return
        job = pickle.loads(message)
        try:
            reply = _Write(job, fds, trainer).run()
        finally:
            for fd in fds:
                os.close(fd)
        with contextlib.suppress(OSError):  # nobody may be left to tell
            send(channel, pickle.dumps(reply))


class _Write:
    """One save of one rank."""

    def __init__(self, job: dict[str, Any], fds: list[int], trainer: int) -> None:
        self._job = job
        self._fds = fds
        self._trainer = trainer
        self._deadline: float = time.monotonic() + job["timeout_s"]
        self._orphaned = False
        self._num_steps = 0
        self._folder = Path(job["directory"]) / temporary_name(job["step"], job["token"])

    def run(self) -> dict[str, Any]:
        """Write and commit; return what the trainer is told."""
        job = self._job
        start = time.monotonic_ns()
        num_bytes = job["image_size"] + len(job["values"])
        reply: dict[str, Any] = {"start_ns": start, "bytes": num_bytes, "errno": 0, "error": ""}
        try:
            reply["written_ns"], reply["durable_ns"] = self._run()
        except commit.AbandonedError as error:
            reply["error"] = str(error)
        except OSError as error:
            reply["errno"] = error.errno or 0
            reply["error"] = commit.explain(error, job, num_bytes)
        except Exception:
            reply["error"] = f"the writer failed:\n{traceback.format_exc()}"
        if reply["error"]:
            if job["rank"] == 0:
                discard(self._folder)
            else:
                commit.mark_failed(self._folder, job, reply["error"])
        reply["num_steps"] = self._num_steps
        return reply

    def _run(self) -> tuple[int, int]:
        job = self._job
        if commit.is_committed(job):  # in an earlier life
            if job["rank"] == 0:
                commit.finish(job, self._step)
            now = time.monotonic_ns()
            return now, now
        self._step("mkdir")
        self._folder.mkdir(exist_ok=True)
        # Once rank 0 may have read our record, our files must not change any more.
        if not commit.has_done(self._folder, job):
            files = {}
            if job["image_size"]:
                files[job["image_name"]] = self._write_image()
            if job["values"]:
                files[job["values_name"]] = self._write_values()
            self._step("fsync names")
            commit.sync_directory(self._folder)
            commit.mark_done(self._folder, job, files, self._step)
        written_ns = time.monotonic_ns()
        if job["rank"] == 0:
            return written_ns, commit.commit(self._folder, job, self._alive, self._step)
        commit.wait_for_commit(self._folder, job, self._alive)
        return written_ns, time.monotonic_ns()

    def _alive(self) -> float:
        """Return the deadline; it comes closer once the trainer is gone."""
        if not self._orphaned and os.getppid() != self._trainer:
            self._orphaned = True
            orphan_s: float = self._job["orphan_s"]
            self._deadline = min(self._deadline, time.monotonic() + orphan_s)
        return self._deadline

    def _step(self, _name: str) -> None:
        """Count an operation on the disk; a test may ask for a death at one of them."""
        self._num_steps += 1
        fault = self._job.get("fault")
        if fault and fault["at"] == self._num_steps:
            if fault["kill"] in {"trainer", "both"}:
                os.kill(self._trainer, signal.SIGKILL)
            if fault["kill"] in {"writer", "both"}:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault["kill"] == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)

    def _write_image(self) -> dict[str, Any]:
        job = self._job
        with mmap.mmap(self._fds[0], job["image_size"]) as memory, memoryview(memory) as view:
            payloads = []
            for offset, length, crc_at in job["payloads"]:
                crc = _crc(view, offset, length)
                for at in crc_at:
                    view[at : at + 4] = crc.to_bytes(4, "little")
                if length:
                    payloads.append((offset, length, crc))
            pieces = _cover(view, payloads)
            self._write_data(self._folder / job["image_name"], view)
            return {"size": job["image_size"], "pieces": pieces}

    def _write_values(self) -> dict[str, Any]:
        job = self._job
        data = memoryview(job["values"])
        self._write_data(self._folder / job["values_name"], data)
        return {"size": len(data), "pieces": [[0, len(data), zlib.crc32(data)]]}

    def _write_data(self, path: Path, view: memoryview) -> None:
        self._step(f"open {path.name}")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._step(f"allocate {path.name}")
            _allocate(fd, len(view))
            offset = 0
            while offset < len(view):
                self._step(f"write {path.name}")
                offset += os.pwrite(fd, view[offset : offset + _SLICE], offset)
            self._step(f"fsync {path.name}")
            os.fsync(fd)
        finally:
            os.close(fd)


def _allocate(fd: int, size: int) -> None:
    """Reserve the space before the first byte, so that a full disk is told at once."""
    allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if allocate is None:
        return
    try:
        allocate(fd, 0, size)
    except OSError as error:
        if commit.cannot_reserve(error):
            return
        raise


def _crc(view: memoryview, offset: int, length: int) -> int:
    crc = 0
    for start in range(offset, offset + length, _SLICE):
        crc = zlib.crc32(view[start : min(start + _SLICE, offset + length)], crc)
    return crc


def _cover(view: memoryview, payloads: list[tuple[int, int, int]]) -> list[list[int]]:
    """Return checksummed pieces that cover the whole file, without reading a payload twice."""
    pieces = []
    end = 0
    for offset, length, crc in payloads:
        pieces.append([end, offset - end, _crc(view, end, offset - end)])
        pieces.append([offset, length, crc])
        end = offset + length
    if end < len(view):
        pieces.append([end, len(view) - end, _crc(view, end, len(view) - end)])
    return pieces
