"""The pieces of a stock `.metadata`, made by torch's own classes."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from trainpath.checkpoint.template import fill, hole, make_template, piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainpath.checkpoint.capture import Leaf
    from trainpath.checkpoint.layout import Plan

__all__ = ["describe_plan", "image_name", "index_piece", "tensor_piece", "values_name"]


def image_name(rank: int) -> str:
    """Return the name of the data file with the tensors that `rank` writes."""
    return f"__{rank}_0.distcp"


def values_name(rank: int) -> str:
    """Return the name of the data file with the small values of `rank`."""
    return f"__{rank}_1.distcp"


def tensor_piece(tensor: torch.Tensor) -> bytes:
    """Return the metadata of a tensor stored whole."""
    size = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    properties = TensorProperties(dtype=tensor.dtype)
    return piece(TensorStorageMetadata(properties=properties, size=size, chunks=[chunk]))


def index_piece(tensor: torch.Tensor | None) -> bytes:
    """Return the chunk offset in a `MetadataIndex` of a whole tensor (None: of an object)."""
    return piece(None if tensor is None else torch.Size([0] * tensor.dim()))


def describe_plan(plan: Plan, leaves: Sequence[Leaf]) -> bytes:
    """Return all that the writer needs to make `.metadata`, pickled once for all saves.

    Args:
        plan: Where every tensor goes.
        leaves: The tensors of the state, as the plan was made for.
    """
    index = MetadataIndex("")
    object.__setattr__(index, "fqn", hole(0))
    object.__setattr__(index, "offset", hole(1))
    # Attributes are pickled in the order of the instance's dict: name, index, offset.
    templates = {
        "root": make_template(_root(), 3),
        "index": make_template(index, 2),
        "storage": make_template(_storage(), 3),
    }
    entries, paths, storage = [], [], []
    for leaf, (rank, at) in zip(leaves, plan.homes, strict=True):
        slot = plan.slots[rank][at]
        key = piece(leaf.key)
        entries.append((key, tensor_piece(leaf.value)))
        paths.append((key, piece(leaf.path)))
        where = (piece(image_name(rank)), piece(slot.offset), piece(slot.frame.length))
        storage.append(
            (
                fill(templates["index"], key, index_piece(leaf.value)),
                fill(templates["storage"], *where),
            )
        )
    return pickle.dumps(
        {
            "templates": templates,
            "object": piece(BytesStorageMetadata()),
            "entries": entries,
            "paths": paths,
            "storage": storage,
        }
    )


def _root() -> Metadata:
    holes: list[Any] = [hole(0), hole(1), hole(2)]
    metadata = Metadata(state_dict_metadata=holes[0], planner_data=holes[1], storage_data=holes[2])
    metadata.storage_meta = StorageMeta()
    version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
    if version is not None and hasattr(metadata, "version"):
        metadata.version = version
    return copy.copy(metadata)


def _storage() -> Any:
    holes: list[Any] = [hole(0), hole(1), hole(2)]
    return filesystem._StorageInfo(*holes)  # noqa: SLF001 - the class that stock readers expect
