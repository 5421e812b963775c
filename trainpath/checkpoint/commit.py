"""From files in a temporary directory to a checkpoint: proof first, then one rename.

Runs in the writer process; needs the standard library only. No collective: each rank leaves
a `rank-*.done.json` beside its data, rank 0's writer waits for all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import pickle
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainpath.checkpoint.retention import (
    LATEST,
    MANIFEST,
    discard,
    prune,
    step_name,
)
from trainpath.checkpoint.template import END, PREFIX, fill, mapping, piece

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "METADATA",
    "AbandonedError",
    "commit",
    "is_committed",
    "mark_done",
    "mark_failed",
    "read_manifest",
    "sync_directory",
    "wait_for_commit",
    "write_file",
]

METADATA: Final = ".metadata"
_FORMAT: Final = 1
_POLL_S: Final = 0.005

Step = "Callable[[str], None]"


class AbandonedError(Exception):
    """This checkpoint cannot be committed; the text says why."""


def write_file(path: Path, data: bytes, step: Callable[[str], None]) -> None:
    """Write a small file and sync it: written, flushed, then synced."""
    step(f"open {path.name}")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            step(f"write {path.name}")
            view = view[os.write(fd, view) :]
        step(f"fsync {path.name}")
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _publish(path: Path, data: bytes, step: Callable[[str], None]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    write_file(temporary, data, step)
    step(f"rename {path.name}")
    temporary.rename(path)


def _done_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.done.json"


def _failed_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.failed.json"


def mark_done(
    folder: Path, job: dict[str, Any], files: dict[str, Any], step: Callable[[str], None]
) -> None:
    """Say that all data of this rank is on disk, and what it is."""
    record = {
        "token": job["token"],
        "plan": job["plan_digest"],
        "world_size": job["world_size"],
        "files": files,
        "groups": job["groups"],
    }
    _publish(_done_path(folder, job["rank"]), json.dumps(record).encode(), step)


def mark_failed(folder: Path, job: dict[str, Any], reason: str) -> None:
    """Tell rank 0 not to wait for this rank, if the disk still takes a few bytes."""
    with contextlib.suppress(OSError):
        _failed_path(folder, job["rank"]).write_text(json.dumps({"reason": reason}))


def has_done(folder: Path, job: dict[str, Any]) -> bool:
    """Whether an earlier life of this writer has finished this rank's part."""
    try:
        record = json.loads(_done_path(folder, job["rank"]).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(record["token"] == job["token"])


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a committed step, checked against its own checksum.

    Raises:
        OSError: There is none, or it cannot be read.
        ValueError: It is damaged.
    """
    record = json.loads((folder / MANIFEST).read_bytes())
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise ValueError(f"{MANIFEST} is not one of format {_FORMAT}")
    claimed = record.pop("crc32", None)
    if claimed != zlib.crc32(_canonical(record)):
        raise ValueError(f"{MANIFEST} does not match its own checksum")
    return record


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()


def is_committed(job: dict[str, Any]) -> bool:
    """Whether this very save is visible under its final name."""
    try:
        manifest = read_manifest(Path(job["directory"]) / step_name(job["step"]))
    except (OSError, ValueError):
        return False
    return bool(manifest["token"] == job["token"])


def wait_for_commit(folder: Path, job: dict[str, Any], alive: Callable[[], float]) -> None:
    """Wait, on a rank other than 0, until rank 0's writer has committed.

    Args:
        folder: The temporary directory.
        job: What is being written.
        alive: Returns the deadline (monotonic seconds), which may move.
    """
    while True:
        gone = not folder.exists()
        if is_committed(job):
            return
        if gone:
            raise AbandonedError("rank 0 gave this checkpoint up; its own error says why")
        if time.monotonic() > alive():
            raise AbandonedError("rank 0 did not commit it before the deadline")
        time.sleep(_POLL_S)


def _collect(folder: Path, job: dict[str, Any], alive: Callable[[], float]) -> list[dict[str, Any]]:
    """Wait for the done records of all ranks."""
    records: dict[int, dict[str, Any]] = {}
    while len(records) < job["world_size"]:
        for rank in range(job["world_size"]):
            if rank in records:
                continue
            with contextlib.suppress(FileNotFoundError):
                failure = json.loads(_failed_path(folder, rank).read_bytes() or b"{}")
                raise AbandonedError(f"rank {rank} failed: {failure.get('reason', 'disk full?')}")
            with contextlib.suppress(FileNotFoundError):
                records[rank] = json.loads(_done_path(folder, rank).read_bytes())
        if len(records) < job["world_size"]:
            if time.monotonic() > alive():
                missing = sorted(set(range(job["world_size"])) - records.keys())
                raise AbandonedError(f"ranks {missing} did not finish writing before the deadline")
            time.sleep(_POLL_S)
    ordered = [records[rank] for rank in range(job["world_size"])]
    for rank, record in enumerate(ordered):
        if record["plan"] != job["plan_digest"]:
            raise AbandonedError(
                f"rank {rank} saved tensors of other names, shapes or dtypes than rank 0; "
                "CheckpointManager needs the same state on every rank"
            )
    return ordered


def commit(
    folder: Path,
    job: dict[str, Any],
    alive: Callable[[], float],
    step: Callable[[str], None],
) -> int:
    """Prove and publish the checkpoint, on rank 0; the rename is the commit point.

    Returns:
        When it was durable, in monotonic nanoseconds.
    """
    directory = Path(job["directory"])
    final = directory / step_name(job["step"])
    records = _collect(folder, job, alive)
    files, metadata, qualified = _assemble(folder, job, records)
    write_file(folder / METADATA, metadata, step)
    manifest = {
        "format": _FORMAT,
        "step": job["step"],
        "token": job["token"],
        "world_size": job["world_size"],
        "rank_local": qualified,
        "torch": job["torch"],
        "files": {
            **files,
            METADATA: {"size": len(metadata), "pieces": [[0, len(metadata), zlib.crc32(metadata)]]},
        },
        "metadata_sha256": hashlib.sha256(metadata).hexdigest(),
    }
    manifest["crc32"] = zlib.crc32(_canonical(manifest))
    write_file(folder / MANIFEST, json.dumps(manifest).encode(), step)
    step("fsync directory")
    sync_directory(folder)
    step("rename step")
    _replace(folder, final)
    step("fsync parent")
    sync_directory(directory)
    durable_ns = time.monotonic_ns()
    finish(job, step)
    return durable_ns


def finish(job: dict[str, Any], step: Callable[[str], None]) -> None:
    """Do what follows a commit and may be repeated or lost: pointer, tidying, retention."""
    directory = Path(job["directory"])
    name = step_name(job["step"])
    with contextlib.suppress(OSError):
        _publish(directory / LATEST, f"{name}\n".encode(), step)
        step("tidy")
        for path in (directory / name).glob("rank-*.done.json"):
            path.unlink(missing_ok=True)
        step("prune")
        prune(directory, keep=job["keep"], committed=job["step"])
        step("fsync pruned")
        sync_directory(directory)


def _replace(folder: Path, final: Path) -> None:
    """Rename over a step of the same number, in one operation where the kernel can."""
    if not final.exists():
        folder.rename(final)
        return
    if _exchange(folder, final):
        discard(folder)
        return
    old = final.with_name(f".trash-{final.name}-{os.getpid()}-replaced")
    final.rename(old)
    folder.rename(final)
    discard(old)


def _exchange(one: Path, other: Path) -> bool:
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    at_cwd, exchange = -100, 2
    return bool(renameat2(at_cwd, os.fsencode(one), at_cwd, os.fsencode(other), exchange) == 0)


def _assemble(
    folder: Path, job: dict[str, Any], records: list[dict[str, Any]]
) -> tuple[dict[str, Any], bytes, list[str]]:
    """Return the files that belong to the checkpoint, its `.metadata`, and the groups per rank.

    A group of values that is equal on all ranks is taken from rank 0 only.
    """
    plan = pickle.loads(job["metadata"])
    templates = plan["templates"]
    entries, paths, storage = list(plan["entries"]), list(plan["paths"]), list(plan["storage"])
    files: dict[str, Any] = {}
    for record in records:
        files.update(record["files"])
    used = set()
    qualified = []
    for name, group in records[0]["groups"].items():
        per_rank = _per_rank(name, group, records)
        if per_rank:
            qualified.append(name)
        for rank, record in enumerate(records if per_rank else records[:1]):
            for item in record["groups"][name]["items"]:
                path = tuple(item["path"])
                if per_rank:
                    path = (name, f"rank_{rank:05d}", *path[1:])
                used.add(item["file"])
                key = piece(".".join(map(str, path)))
                described = item["entry"].encode("latin-1") or plan["object"]
                entries.append((key, described))
                paths.append((key, piece(path)))
                where = (piece(item["file"]), piece(item["offset"]), piece(item["length"]))
                offset = item["index"].encode("latin-1")
                storage.append(
                    (fill(templates["index"], key, offset), fill(templates["storage"], *where))
                )
    for name in [name for name in files if name.endswith("_1.distcp") and name not in used]:
        del files[name]
        (folder / name).unlink(missing_ok=True)
    root = fill(templates["root"], mapping(entries), mapping(paths), mapping(storage))
    return files, PREFIX + root + END, qualified


def _per_rank(name: str, group: dict[str, Any], records: list[dict[str, Any]]) -> bool:
    if group["share"] != "auto":
        return bool(group["share"] == "local")
    for rank, record in enumerate(records):
        if name not in record["groups"]:
            raise AbandonedError(f"rank {rank} saved no {name!r}, but rank 0 did")
    return any(record["groups"][name]["digest"] != group["digest"] for record in records)


def explain(error: OSError, job: dict[str, Any], num_bytes: int) -> str:
    """Return what an `OSError` of the writer means for the user."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return (
            f"no space left in {job['directory']} for the {num_bytes} bytes of rank {job['rank']}; "
            "free some, or keep fewer checkpoints"
        )
    return f"{error.strerror or error} ({error.filename or job['directory']})"


def cannot_reserve(error: OSError) -> bool:
    """Whether the file system has no way to reserve space (rather than no space)."""
    return error.errno in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
