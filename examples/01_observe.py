"""Measure a plain training script with two added lines; nothing about how it trains changes.

    python examples/01_observe.py
    torchrun --nproc_per_node 2 examples/01_observe.py

The task: predict the next byte of Python source from the 64 bytes before it, read from the
standard library's own files.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainpath

CONTEXT = 64


class SourceWindows(Dataset):
    """Four windows of each source file of the standard library."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        files = sorted(root.glob("*.py")) + sorted(root.glob("[a-z]*/*.py"))
        self.files = [file for file in files if file.stat().st_size > 4 * CONTEXT]

    def __len__(self) -> int:
        return 4 * len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = np.fromfile(self.files[index // 4], dtype=np.uint8)
        start = (index % 4) * ((len(text) - CONTEXT) // 4)
        window = torch.from_numpy(text[start : start + CONTEXT + 1].astype(np.int64))
        return window[:-1], window[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps

    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if distributed else 0
    torch.manual_seed(0)

    # [start: train]
    dataset = SourceWindows()
    sampler = DistributedSampler(dataset) if distributed else None
    loader = DataLoader(
        dataset, batch_size=32, sampler=sampler, shuffle=sampler is None, num_workers=2
    )
    model = nn.Sequential(
        nn.Embedding(256, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 512), nn.ReLU(),
        nn.Linear(512, 256),
    )  # fmt: skip
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    run = trainpath.observe(optimizer, loader, model=model)  # line one

    # `range` first: zip then stops without asking the loader for one batch too many.
    for step, (context, following) in zip(range(steps), run.loader, strict=False):
        loss = nn.functional.cross_entropy(model(context), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")

    if rank == 0:
        print(run.report())  # line two
    # [end: train]
    run.close()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
