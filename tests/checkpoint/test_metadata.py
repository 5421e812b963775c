"""`.metadata` put together from pieces equals what torch's own classes pickle."""

from __future__ import annotations

import json
import pickle
import pickletools

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from trainpath.checkpoint import CheckpointManager
from trainpath.checkpoint.template import END, PREFIX, fill, hole, make_template, mapping, piece


def test_templates_fill_to_the_pickle_of_the_whole():
    """A filled template loads as the object with the values in the holes."""
    template = make_template({"a": hole(0), "b": [hole(1), 3]}, 2)
    data = PREFIX + fill(template, piece({"x": 1}), piece((1, 2.5, None))) + END
    assert pickle.loads(data) == {"a": {"x": 1}, "b": [(1, 2.5, None), 3]}
    many = {f"key {index}": index << 20 for index in range(3000)}
    data = PREFIX + mapping((piece(key), piece(value)) for key, value in many.items()) + END
    assert pickle.loads(data) == many


def test_metadata_holds_stock_classes_only(tmp_path):
    """Every class named in `.metadata` is torch's; tensors and values are described as stock."""
    model = torch.nn.Linear(3, 2)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": model, "epoch": 4}).durable.wait(30)
    data = (tmp_path / "step-00000001" / ".metadata").read_bytes()
    names = {argument for op, argument, _ in pickletools.genops(data) if op.name == "GLOBAL"}
    names.discard("__builtin__ getattr")  # how Python 3.11.0 to 3.11.3 pickle an enumeration
    assert names
    assert all(name.startswith("torch") for name in names)
    metadata = pickle.loads(data)
    assert isinstance(metadata, Metadata)
    entry = metadata.state_dict_metadata["model.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == torch.Size([2, 3])
    assert [(chunk.offsets, chunk.sizes) for chunk in entry.chunks] == [
        (torch.Size([0, 0]), torch.Size([2, 3]))
    ]
    assert isinstance(metadata.state_dict_metadata["epoch"], BytesStorageMetadata)
    assert metadata.planner_data["model.weight"] == ("model", "weight")
    info = metadata.storage_data[MetadataIndex("model.weight", torch.Size([0, 0]))]
    assert isinstance(info, _StorageInfo)
    assert info.relative_path == "__0_0.distcp"
    assert metadata.storage_data[MetadataIndex("epoch")].relative_path == "__0_1.distcp"


def test_the_manifest_names_step_ranks_and_torch(tmp_path):
    """The side file says what was saved, by how many ranks and by which torch."""
    with CheckpointManager(tmp_path) as manager:
        manager.save(12, {"epoch": 4}).durable.wait(30)
    manifest = json.loads((tmp_path / "step-00000012" / "trainpath.manifest.json").read_text())
    assert manifest["step"] == 12
    assert manifest["world_size"] == 1
    assert manifest["torch"] == str(torch.__version__)
