"""The device prefetcher: untouched on CPU, same batches and exact state on CUDA."""

from __future__ import annotations

import pytest
import torch

from trainpath.errors import ConfigError
from trainpath.overlap import DevicePrefetcher


class Counting:
    """Five batches with a position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        while self.position < 5:
            self.position += 1
            yield {"x": torch.full((4,), self.position), "name": str(self.position)}

    def __len__(self):
        return 5

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state_dict):
        self.position = state_dict["position"]


def test_cpu_yields_the_very_same_batches():
    """On a CPU device nothing is copied: the objects of the source come out."""
    batches = [torch.arange(3), torch.arange(4)]
    prefetcher = DevicePrefetcher(batches, "cpu")

    assert all(got is batch for got, batch in zip(prefetcher, batches, strict=True))
    assert len(prefetcher) == 2


def test_state_follows_the_source():
    """state_dict() and load_state_dict() are those of the source on a CPU."""
    prefetcher = DevicePrefetcher(Counting(), "cpu")
    iterator = iter(prefetcher)
    next(iterator)
    next(iterator)
    assert prefetcher.state_dict() == {"position": 2}

    resumed = DevicePrefetcher(Counting(), "cpu")
    resumed.load_state_dict({"position": 2})
    assert [int(batch["name"]) for batch in resumed] == [3, 4, 5]


def test_stateless_source_and_bad_depth_are_named():
    """A source without state and a depth below one are configuration errors."""
    with pytest.raises(ConfigError, match="list"):
        DevicePrefetcher([], "cpu").state_dict()
    with pytest.raises(ConfigError, match="depth"):
        DevicePrefetcher([], "cpu", depth=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_delivers_every_batch_with_its_own_state():
    """Copied ahead on a side stream, the batches equal the source's, in order."""
    prefetcher = DevicePrefetcher(Counting(), "cuda", depth=2)
    for index, batch in enumerate(prefetcher, start=1):
        assert batch["x"].device.type == "cuda"
        assert batch["x"].tolist() == [index] * 4
        assert prefetcher.state_dict() == {"position": index}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_break_keeps_the_position():
    """A loop that breaks off leaves the state at the last batch it got, not the last copied."""
    prefetcher = DevicePrefetcher(Counting(), "cuda", depth=2)
    for _ in prefetcher:
        break
    assert prefetcher.state_dict() == {"position": 1}
