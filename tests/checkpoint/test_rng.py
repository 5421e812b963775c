"""RandomState captures every global generator and draws from none."""

from __future__ import annotations

import random

import numpy as np
import torch

from trainpath.checkpoint import RandomState
from trainpath.types import Stateful

GLOBAL_NUMPY = np.random.rand


def _draw():
    return random.random(), GLOBAL_NUMPY(3).tolist(), torch.rand(3).tolist()


def test_generators_continue_where_they_were():
    """Draws after load_state_dict equal those after state_dict, which draws nothing."""
    generators = RandomState()
    assert isinstance(generators, Stateful)
    state = generators.state_dict()
    first = _draw()
    second = _draw()
    generators.load_state_dict(state)
    generators.state_dict()
    assert (_draw(), _draw()) == (first, second)
