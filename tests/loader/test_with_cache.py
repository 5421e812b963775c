"""Loader and cache together on two real ranks: each shard crosses the network once."""

from __future__ import annotations

import io

import torch.distributed
import webdataset

from trainpath.cache import ShardCache
from trainpath.loader import DataLoader, TarDataset
from trainpath.testing import ObjectServer, spawn

NUM_SHARDS = 5
PER_SHARD = 8


def read(url, directory):
    """Read two epochs with two workers; return what this rank got and a state."""
    dataset = TarDataset(url, cache=ShardCache(directory), fields=["cls"])
    epochs, state = [], None
    with DataLoader(
        dataset,
        batch_size=3,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="fork",
    ) as loader:
        for _ in range(2):
            epochs.append([])
            for number, (batch,) in enumerate(loader):
                epochs[-1].append(batch.tolist())
                if number == 2:
                    state = loader.state_dict()
            torch.distributed.barrier()
    return epochs, state


def test_each_shard_is_fetched_once_per_node(tmp_path):
    """2 ranks x 2 workers x 2 epochs: one GET per shard, every sample once an epoch."""
    with ObjectServer(None) as server:
        for shard in range(NUM_SHARDS):
            stream = io.BytesIO()
            with webdataset.TarWriter(stream) as writer:
                for number in range(PER_SHARD):
                    key = shard * PER_SHARD + number
                    writer.write({"__key__": f"{key:04d}", "cls": key})
            server.put(f"s-{shard}.tar", stream.getvalue())
        url = f"{server.url}/s-{{0..{NUM_SHARDS - 1}}}.tar"
        results = spawn(read, 2, args=(url, str(tmp_path / "cache")))
        assert [server.gets(f"s-{shard}.tar") for shard in range(NUM_SHARDS)] == [1] * NUM_SHARDS
    for epoch in range(2):
        parts = [epochs[epoch] for epochs, _ in results]
        assert len(parts[0]) == len(parts[1]) == 7
        seen = [key for part in parts for batch in part for key in batch]
        assert sorted(seen) == list(range(NUM_SHARDS * PER_SHARD))
    assert results[0][1] == results[1][1]
    assert results[0][1]["position"][0] == 18
