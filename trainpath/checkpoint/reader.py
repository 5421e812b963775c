"""Prove a checkpoint by its manifest, and read single values out of it."""

from __future__ import annotations

import enum
import io
import json
import logging
import mmap
import pickle
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from trainpath.checkpoint.commit import METADATA, read_manifest
from trainpath.checkpoint.retention import MANIFEST, list_steps, step_name
from trainpath.errors import CheckpointCorruptError, CheckpointNotFoundError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from typing_extensions import Self

__all__ = ["Reader", "find_valid", "verify"]

_log = logging.getLogger("trainpath.checkpoint")

_SLICE: Final = 8 << 20
_TRUSTED: Final = frozenset(
    {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
    }
)


def find_valid(directory: Path, step: int | None) -> int:
    """Return the newest step that is proven, or `step` if it is.

    Raises:
        CheckpointNotFoundError: There is none, or not the one asked for.
        CheckpointCorruptError: The step asked for is damaged.
    """
    steps = list_steps(directory)
    if step is not None:
        if not (directory / step_name(step)).exists():
            raise CheckpointNotFoundError(
                f"there is no step {step} in {directory}; there are {steps or 'no steps'}"
            )
        verify(directory / step_name(step))
        return step
    reasons = []
    for candidate in reversed(steps):
        try:
            verify(directory / step_name(candidate))
        except CheckpointCorruptError as error:
            _log.warning("skipping step %d: %s", candidate, error)
            reasons.append(str(error))
        else:
            return candidate
    damaged = f"; damaged: {'; '.join(reasons)}" if reasons else ""
    raise CheckpointNotFoundError(f"no valid checkpoint in {directory}{damaged}")


def verify(folder: Path) -> dict[str, Any]:
    """Read every byte of a committed step and compare it with the manifest.

    Returns:
        The manifest.

    Raises:
        CheckpointCorruptError: Something is missing or differs.
    """
    try:
        manifest = read_manifest(folder)
        for name, record in manifest["files"].items():
            _verify_file(folder / name, record)
    except FileNotFoundError as error:
        name = Path(error.filename or MANIFEST).name
        raise CheckpointCorruptError(f"{folder} has no {name}; restore another step") from error
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise CheckpointCorruptError(f"{folder}: {error}; restore another step") from error
    return manifest


def _verify_file(path: Path, record: dict[str, Any]) -> None:
    with path.open("rb") as file:
        end = 0
        for offset, length, expected in record["pieces"]:
            if offset != end:
                raise ValueError(f"the manifest skips a part of {path.name}")
            crc, left = 0, length
            while left:
                data = file.read(min(left, _SLICE))
                if not data:
                    raise ValueError(f"{path.name} ends early, at {end + length - left} bytes")
                crc = zlib.crc32(data, crc)
                left -= len(data)
            if crc != expected:
                raise ValueError(f"{path.name} differs from its checksum at byte {offset}")
            end = offset + length
        if file.read(1) or end != record["size"]:
            raise ValueError(f"{path.name} is longer than the manifest says")


class Reader:
    """Reads values of one proven step.

    Args:
        folder: The directory of the step.

    Attributes:
        entries: What there is, by flat key, as stock metadata.
        paths: The path of each key in the nested state.
        rank_local: The names that were stored once per rank.
        world_size: How many ranks saved.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        manifest = read_manifest(folder)
        self.rank_local: list[str] = manifest["rank_local"]
        self.world_size: int = manifest["world_size"]
        data = (folder / METADATA).read_bytes()
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        self.entries: dict[str, Any] = metadata.state_dict_metadata
        self.paths: dict[str, tuple[str | int, ...]] = metadata.planner_data
        self._storage = {index.fqn: info for index, info in metadata.storage_data.items()}
        self._files: dict[str, mmap.mmap] = {}

    def is_tensor(self, key: str) -> bool:
        """Whether a key is stored as a tensor."""
        return hasattr(self.entries[key], "size")

    def describe(self, key: str) -> str:
        """Return dtype and shape of a tensor, or "value"."""
        if not self.is_tensor(key):
            return "value"
        entry: TensorStorageMetadata = self.entries[key]
        return f"{str(entry.properties.dtype).removeprefix('torch.')}{list(entry.size)}"

    def read(self, key: str) -> Any:
        """Return the value of a key: a CPU tensor of its own, or an object."""
        info = self._storage[key]
        file = self._files.get(info.relative_path)
        if file is None:
            with (self._folder / info.relative_path).open("rb") as opened:
                file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            self._files[info.relative_path] = file
        record = io.BytesIO(file[info.offset : info.offset + info.length])
        # Values are whatever the user's state held: pickle, as in any checkpoint of torch.
        return torch.load(record, map_location="cpu", weights_only=self.is_tensor(key))

    def close(self) -> None:
        """Unmap the files; safe to call twice."""
        while self._files:
            self._files.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _MetadataUnpickler(pickle.Unpickler):
    """Reads `.metadata`; knows torch's own classes only."""

    def find_class(self, module: str, name: str) -> Any:
        if module in _TRUSTED:
            return super().find_class(module, name)
        value = getattr(torch, name, None) if module == "torch" else None
        if value is torch.Size or isinstance(value, torch.dtype):
            return value
        if (module, name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module, name)
        if (module, name) in {("builtins", "getattr"), ("__builtin__", "getattr")}:
            return _member  # how Python 3.11.0 to 3.11.3 pickle a member of an enumeration
        raise pickle.UnpicklingError(f"{METADATA} names {module}.{name}, which no checkpoint needs")


def _member(kind: Any, name: str) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise pickle.UnpicklingError(f"{METADATA} takes {name} from {kind}, no enumeration")
    return kind[name]
