"""The random generators of this process, as a `Stateful`."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy as np
import torch

__all__ = ["RandomState"]


class RandomState:
    """Captures and restores the global generators of Python, NumPy and torch (CPU and CUDA).

    Attributes:
        rank_local: Tells the checkpoint to keep one copy per rank. When it is restored on
            more ranks, those without a copy keep the generators that they have.

    Cost:
        About 8 KB, copied inside `save()`.

    Guarantee:
        After `load_state_dict`, every global generator continues as after `state_dict`.
    """

    rank_local: ClassVar[bool] = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator; draws nothing."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - the global generator is the point
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set every generator that `state_dict` holds and this process has."""
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002 - see state_dict
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            for device, state in enumerate(state_dict["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(state, device)
