"""What the tests of checkpoints share: a reader that knows torch only, and a small training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

PROGRAMS = Path(__file__).parent / "programs"


class StockReader:
    """A process without trainpath that loads checkpoints by `dcp.load`."""

    def __init__(self, folder):
        self._out = folder / "stock.pt"
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "stock_reader.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def load(self, folder):
        """Return the values of a checkpoint by flat key."""
        self._process.stdin.write(f"{folder}\t{self._out}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer == "ok", answer
        return torch.load(self._out, weights_only=False)

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="session")
def stock(tmp_path_factory):
    """Load a checkpoint in a process where `import trainpath` fails."""
    reader = StockReader(tmp_path_factory.mktemp("stock"))
    yield reader.load
    reader.close()


class Training:
    """A model, an optimizer and batches that follow from a seed."""

    def __init__(self, make_optimizer=None, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)
        )
        make = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01))
        self.optimizer = make(self.model.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._batches = torch.Generator().manual_seed(seed)

    def step(self):
        """Do one step; return its loss."""
        x = torch.randn(8, 6, generator=self._batches)
        y = torch.randint(0, 3, (8,), generator=self._batches)
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def snapshot(self):
        """Return copies of all tensors, by name."""
        tensors = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        names = {param: name for name, param in self.model.named_parameters()}
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer.state.{names[param]}.{key}"] = value
        return {key: value.detach().clone() for key, value in tensors.items()}


@pytest.fixture
def training():
    """Make a `Training`."""
    return Training


@pytest.fixture
def assert_same():
    """Assert that two mappings hold equal tensors, to the bit, where both are tensors."""

    def check(found, expected):
        for key, value in expected.items():
            assert key in found, key
            assert found[key].dtype == value.dtype, key
            assert found[key].shape == value.shape, key
            assert torch.equal(found[key], value), key

    return check
