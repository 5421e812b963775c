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
RESUMED_STEPS = 12
CASES = [(optimizer, accumulate) for optimizer in ("sgd", "adamw") for accumulate in (1, 2)]


class Numbers(Dataset):
    """Deterministic samples, with a random augmentation if asked for."""

    def __init__(self, augment):
        self.augment = augment

    def __len__(self):
        return 132

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        sample = torch.randn(12, generator=generator)
        noise = 0.01 * torch.rand(12) if self.augment else 0
        return sample + noise, sample.sum().reshape(1)


def build(name, *, augment=True, workers=2):
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
    dataset = Numbers(augment)
    sampler = DistributedSampler(dataset, shuffle=True, seed=3)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=sampler,
        num_workers=workers,
        persistent_workers=augment and workers > 0,  # fewer forks of a process with threads
    )
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


def ours(name, accumulate, mode=None):
    """Train with accelerate()."""
    model, optimizer, loader = build(name)
    with trainpath.accelerate(model, optimizer, loader, mode=mode) as run:
        iterator = steps_of(model, optimizer, run.loader, loader.sampler, accumulate, run.no_sync)
        return take(iterator, STEPS)


def compare_all():
    """Run every case both ways on this rank; return the failing ones."""
    failing = []
    for name, accumulate in CASES:
        expected = stock(name, accumulate)
        failing.extend(
            (name, accumulate, mode)
            for mode in ("on", "observe", "off")
            if ours(name, accumulate, mode) != expected
        )
    return failing


@pytest.mark.timeout(180)
def test_losses_equal_ddp_and_dataloader():
    """50 steps on two ranks: SGD and AdamW, accumulated or not, in every mode."""
    assert spawn(compare_all, 2, timeout_s=170) == [[], []]


def saved_and_restored(directory, restore_at):
    """Save at every step; then restore at some and train on; return what differs.

    What a data set draws in its workers is torch's only as long as the workers live, so the
    data set of these runs draws nothing.
    """
    failing = []
    for name, accumulate in CASES:
        folder = Path(directory) / f"{name}-{accumulate}"
        whole = from_checkpoint(name, accumulate, folder, None, STEPS)
        for step in restore_at:
            count = min(RESUMED_STEPS, STEPS - step)
            rest = from_checkpoint(name, accumulate, folder, step, count)
            if rest != whole[step : step + count]:
                failing.append((name, accumulate, step))
    return failing


def from_checkpoint(name, accumulate, folder, step, count):
    """Train `count` steps from the checkpoint of `step`, or save at each step of a new run."""
    model, optimizer, loader = build(name, augment=False, workers=2 if step is None else 0)
    run = trainpath.accelerate(
        model,
        optimizer,
        loader,
        checkpoint_dir=folder,
        save_every=1 if step is None else None,
        keep=STEPS,
    )
    with run:
        if step is not None:
            torch.manual_seed(step)  # what restore must undo
            assert run.restore(step=step) == step
        iterator = steps_of(
            model, optimizer, run.loader, loader.sampler, accumulate, run.no_sync, run.epoch
        )
        return take(iterator, count)


@pytest.mark.timeout(240)
def test_losses_after_restore_at_random_steps_equal_the_uninterrupted_run(tmp_path):
    """Restoring at any of ten random steps continues with the very same losses."""
    restore_at = sorted(random.Random(5).sample(range(1, STEPS - 1), 10))
    arguments = (str(tmp_path), restore_at)

    assert spawn(saved_and_restored, 2, args=arguments, timeout_s=230) == [[], []]
