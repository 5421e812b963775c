"""`spawn`: real ranks, their results, and what is said of those that fail."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from trainpath.errors import ConfigError
from trainpath.testing import SpawnError, spawn


@dataclass
class Given:
    """A class of this test module, sent to the ranks and back."""

    value: int


def add_ranks(given):
    """Sum `given.value + rank` over all ranks."""
    tensor = torch.tensor([given.value + dist.get_rank()])
    dist.all_reduce(tensor)
    print("sum is", tensor.item())
    return Given(tensor.item()), dict(os.environ), os.getcwd(), torch.get_num_threads()


def test_ranks_communicate_and_return(monkeypatch, tmp_path, capsys):
    """Ranks run in one gloo group, as under torchrun; results come by rank, output is shown."""
    monkeypatch.setenv("SET_IN_PARENT", "yes")
    monkeypatch.chdir(tmp_path)

    first, second = spawn(add_ranks, 2, args=(Given(10),), env={"GIVEN": "also"})

    assert first[0] == second[0] == Given(21)
    assert [result[1]["RANK"] for result in (first, second)] == ["0", "1"]
    assert [result[1]["LOCAL_RANK"] for result in (first, second)] == ["0", "1"]
    assert first[1]["WORLD_SIZE"] == first[1]["LOCAL_WORLD_SIZE"] == "2"
    assert first[1]["SET_IN_PARENT"] == "yes"
    assert first[1]["GIVEN"] == "also"
    assert first[2] == str(tmp_path)
    assert first[3] == int(os.environ.get("OMP_NUM_THREADS", "1"))
    assert "[rank 1] sum is 21" in capsys.readouterr().out
