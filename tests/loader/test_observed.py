"""`observed`: beside equality (see test_torch_equality) its state and transparency."""

from __future__ import annotations

import pytest
import torch
from torch.utils import data as torch_data

from trainpath.errors import ConfigError, StateMismatchError
from trainpath.loader import DataLoader, observed


class Named(torch_data.Dataset):
    """A dataset with an attribute of its own, and workers that look at it."""

    name = "mine"

    def __len__(self):
        return 8

    def __getitem__(self, key):
        info = torch_data.get_worker_info()
        return key if info is None or isinstance(info.dataset, Named) else -1


def test_user_code_sees_its_own_dataset():
    """get_worker_info().dataset is the user's object, and torch's attributes are there."""
    original = torch_data.DataLoader(Named(), batch_size=2, num_workers=1)
    loader = observed(original)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert loader.dataset.name == "mine"
    assert loader.batch_size == 2
    assert len(loader) == 4
    assert type(original.dataset) is Named


def test_state_skips_what_was_delivered():
    """Resuming reads and drops the delivered batches, as stock scripts do."""
    loader = observed(torch_data.DataLoader(range(10), batch_size=2))
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    resumed = observed(torch_data.DataLoader(range(10), batch_size=2))
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert [batch.tolist() for batch in resumed] == [[4, 5], [6, 7], [8, 9]]
    assert resumed.state_dict() == {"kind": "observed", "epoch": 1, "batches": 0}


def test_refuses_what_it_cannot_observe():
    """Not a torch DataLoader, or the state of another loader: one clear error each."""
    with pytest.raises(ConfigError, match="torch DataLoader"):
        observed([1, 2])
    loader = observed(torch_data.DataLoader(range(4)))
    with pytest.raises(StateMismatchError, match="kind"):
        loader.load_state_dict(DataLoader(range(4)).state_dict())


def test_set_epoch_and_close():
    """set_epoch reaches the sampler; close ends persistent workers and may be called twice."""
    sampler = torch_data.DistributedSampler(range(6), 1, 0)
    stock = torch_data.DataLoader(range(6), sampler=sampler, num_workers=1, persistent_workers=True)
    loader = observed(stock)
    loader.set_epoch(2)
    assert sampler.epoch == 2
    assert sorted(int(batch) for batch in loader) == list(range(6))
    loader.close()
    loader.close()
    assert torch.utils.data.get_worker_info() is None
