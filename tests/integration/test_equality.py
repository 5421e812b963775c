"""Losses with trainpath equal those of torch DDP and DataLoader to the bit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainpath
from trainpath.testing import spawn

STEPS = 50
CASES = [(optimizer, accumulate) for optimizer in ("sgd", "adamw") for accumulate in (1, 2)]


class Numbers(Dataset):
    """Deterministic samples, with a random augmentation as real data sets have."""

    def __len__(self):
        return 132

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        sample = torch.randn(12, generator=generator)
        return sample + 0.01 * torch.rand(12), sample.sum().reshape(1)


def build(name):
    """Return model, optimizer and loader of one rank, from a fixed seed."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1)
    )
    optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if name == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    dataset = Numbers()
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
    return model, optimizer, loader


def steps_of(model, optimizer, loader, sampler, accumulate, no_sync, first_epoch=0):
    """Train for ever; yield the loss of every optimizer step as hex."""
    epoch = first_epoch
    losses = []
    while True:
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % accumulate == 0
            if last:
                loss = F.mse_loss(model(x), y) / accumulate
                loss.backward()
            else:
                with no_sync():
                    loss = F.mse_loss(model(x), y) / accumulate
                    loss.backward()
            losses.append(float(loss.detach()).hex())
            if last:
                optimizer.step()
                optimizer.zero_grad()
                yield tuple(losses)
                losses = []
        epoch += 1


def take(iterator, count):
    """Return the next `count` items."""
    return [next(iterator) for _ in range(count)]


def stock(name, accumulate):
    """Train with torch's own parts."""
    model, optimizer, loader = build(name)
    replica = DistributedDataParallel(model)
    iterator = steps_of(replica, optimizer, loader, loader.sampler, accumulate, replica.no_sync)
    return take(iterator, STEPS)


def ours(name, accumulate, directory=None, mode=None, stop_at=STEPS):
    """Train with accelerate(); with a directory, save at every step and resume."""
    model, optimizer, loader = build(name)
    run = trainpath.accelerate(
        model,
        optimizer,
        loader,
        mode=mode,
        checkpoint_dir=directory,
        save_every=None if directory is None else 1,
        keep=100,
    )
    with run:
        start = run.restore() if directory is not None else 0
        iterator = steps_of(
            model, optimizer, run.loader, loader.sampler, accumulate, run.no_sync, run.epoch
        )
        losses = take(iterator, stop_at - start)
        iterator.close()
    return start, losses


def compare_all():
    """Run every case both ways on this rank; return the failing ones."""
    failing = []
    for name, accumulate in CASES:
        expected = stock(name, accumulate)
        failing.extend(
            (name, accumulate, mode)
            for mode in ("on", "observe", "off")
            if ours(name, accumulate, mode=mode)[1] != expected
        )
    return failing


@pytest.mark.timeout(180)
def test_losses_equal_ddp_and_dataloader():
    """50 steps on two ranks: SGD and AdamW, accumulated or not, in every mode."""
    assert spawn(compare_all, 2, timeout_s=170) == [[], []]


def save_every_step(directory):
    """Train 50 steps with a checkpoint at each."""
    torch.manual_seed(0)
    return [ours(name, acc, Path(directory) / f"{name}-{acc}")[1] for name, acc in CASES]


def resume_at(directory, step):
    """Drop the checkpoints after `step` and train on to the end."""
    import shutil

    import torch.distributed as dist

    results = []
    for name, accumulate in CASES:
        path = Path(directory) / f"{name}-{accumulate}"
        if dist.get_rank() == 0:
            for newer in path.glob("step-*"):
                if int(newer.name.split("-")[1]) > step:
                    shutil.rmtree(newer)
        dist.barrier()
        results.append(ours(name, accumulate, path))
    return results


@pytest.mark.timeout(300)
def test_losses_after_restore_at_random_steps_equal_the_uninterrupted_run(tmp_path):
    """Restoring at any of ten random steps continues with the very same losses."""
    whole = spawn(save_every_step, 2, args=(str(tmp_path),), timeout_s=200)
    for step in sorted(random.Random(5).sample(range(1, STEPS), 10), reverse=True):
        for rank, results in enumerate(
            spawn(resume_at, 2, args=(str(tmp_path), step), timeout_s=100)
        ):
            for case, (start, losses) in zip(CASES, results, strict=True):
                expected = whole[rank][CASES.index(case)]
                assert start == step, case
                assert losses == expected[step:], case
