"""Each part of trainpath alone: loader, shard cache, gradient reducer, checkpoints.

    python examples/03_one_part_at_a_time.py
    torchrun --nproc_per_node 2 examples/03_one_part_at_a_time.py

None of them needs `accelerate()` or any of the others. The data are the source files of the
standard library's `json` and `email` packages, in two WebDataset shards.
"""

from __future__ import annotations

import argparse
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import webdataset
from torch import nn

from trainpath.cache import ShardCache
from trainpath.checkpoint import CheckpointManager
from trainpath.comm import GradientReducer
from trainpath.loader import DataLoader, TarDataset
from trainpath.testing import ObjectServer


# [start: parts]
def load(shards: list[str]) -> None:
    """Read tar shards in an exact order, stop in the middle, continue at the next sample."""
    loader = DataLoader(TarDataset(shards), batch_size=4, shuffle=True, num_workers=1, seed=0)
    batches = iter(loader)
    next(batches)
    position = loader.state_dict()
    expected = next(batches)["__key__"]
    loader.close()

    again = DataLoader(TarDataset(shards), batch_size=4, shuffle=True, num_workers=1, seed=0)
    again.load_state_dict(position)
    resumed = next(iter(again))["__key__"]
    again.close()
    say(f"loader: resumed at {resumed[0]}, as expected: {resumed == expected}")


def cache(shards: list[str], directory: Path) -> None:
    """Fetch each remote shard once for this node; open it from the local disk afterwards."""
    with ObjectServer(Path(shards[0]).parent) as server:
        with ShardCache(directory, max_bytes=64 << 20) as shard_cache:
            for _ in range(3):
                for shard in shards:
                    with shard_cache.open(server.url_for(Path(shard).name)) as file:
                        file.read()
        downloads = sum(server.gets(Path(shard).name) for shard in shards)
    say(f"cache: {3 * len(shards)} reads, {downloads} downloads")


def reduce(steps: int) -> None:
    """Average gradients over the ranks during backward, in place."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with GradientReducer(model) as reducer:
        reducer.guard(optimizer)  # a step on unreduced gradients is an error
        for _ in range(steps):
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    say(f"reducer: {steps} steps, keys as the model has them: {next(iter(model.state_dict()))}")


def checkpoint(steps: int, directory: Path) -> None:
    """Save behind the training, and read the newest checkpoint into fresh objects."""
    model, optimizer = small_model()
    with CheckpointManager(directory, keep=2) as checkpoints:
        checkpoints.attach(optimizer)  # the fence: staging ends before parameters change
        for step in range(1, steps + 1):
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 0:
                checkpoints.save(step, {"model": model, "optimizer": optimizer})
        checkpoints.wait_until_finished(timeout_s=30)

        fresh_model, fresh_optimizer = small_model()
        step = checkpoints.restore({"model": fresh_model, "optimizer": fresh_optimizer})
    say(f"checkpoint: steps kept {checkpoints.all_steps()}, restored {step}")


# [end: parts]


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)  # every rank has the same weights and sees the same data
    model = nn.Linear(64, 1)
    return model, torch.optim.AdamW(model.parameters())


def say(line: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line)


def pack(folder: Path) -> list[str]:
    """Write two shards of source files and return their paths."""
    root = Path(sysconfig.get_path("stdlib"))
    shards = []
    for package in ("json", "email"):
        shards.append(str(folder / f"{package}.tar"))
        with webdataset.TarWriter(shards[-1]) as writer:
            for file in sorted((root / package).glob("*.py")):
                writer.write({"__key__": f"{package}-{file.stem}", "py": file.read_bytes()})
    return shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as name:
        shared: list[Any] = [name, pack(Path(name))]
        if dist.is_initialized():
            dist.broadcast_object_list(shared)  # every rank uses the files of rank 0
        folder, shards = Path(shared[0]), shared[1]
        load(shards)
        cache(shards, folder / "cache")
        reduce(steps)
        checkpoint(steps, folder / "checkpoints")
        if dist.is_initialized():
            dist.barrier()  # nobody uses them any more
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
