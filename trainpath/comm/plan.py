"""The plan: which gradients travel in which bucket, alike on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trainpath.comm.buckets import assign
from trainpath.comm.pipeline import BucketPipeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainpath.comm.collectives import Peers

__all__ = ["Plan"]


class Plan:
    """Decides the buckets: first by the order of the parameters, then by what was seen.

    Args:
        parameters: All parameters of the model.
        names: Their names.
        first_cap_bytes: Size at which the first bucket closes.
        cap_bytes: Size at which the others close.
        overlap: Whether buckets may be launched during backward.
        peers: Who shares the gradients.

    Attributes:
        trained: Which parameters have gradients.
        num_plans: How many pipelines were built.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        names: Sequence[str],
        *,
        first_cap_bytes: int,
        cap_bytes: int,
        overlap: bool,
        peers: Peers,
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._first_cap_bytes = first_cap_bytes
        self._cap_bytes = cap_bytes
        self._overlap = overlap
        self._peers = peers
        self._order: list[int] | None = None
        self._expected: list[int] | None = None
        self.num_plans = 0
        self.trained: list[bool] = []
        self.start_anew()

    @property
    def is_learned(self) -> bool:
        """Whether the order of the gradients is known."""
        return self._order is not None

    def settings(self) -> str:
        """Return what must be equal on all ranks besides the model."""
        return f"caps {self._first_cap_bytes} and {self._cap_bytes}, overlap {self._overlap}"

    def is_current(self) -> bool:
        """Whether the same parameters are trained as when the plan was begun."""
        return self.trained == [parameter.requires_grad for parameter in self._parameters]

    def start_anew(self) -> None:
        """Forget what was learned; parameters were frozen or unfrozen."""
        self.trained = [parameter.requires_grad for parameter in self._parameters]
        self._order = None
        self._expected = None

    def _default_order(self) -> list[int]:
        if self._peers.world_size == 1:
            return []
        return [i for i in reversed(range(len(self._parameters))) if self.trained[i]]

    def build(self, used: bytearray) -> BucketPipeline:
        """Return a pipeline; pure, so alike on all ranks.

        Args:
            used: Flags that the pipeline shares with its owner.
        """
        order = self._default_order() if self._order is None else self._order
        self.num_plans += 1
        return BucketPipeline(
            assign(
                order,
                self._parameters,
                first_cap_bytes=self._first_cap_bytes,
                cap_bytes=self._cap_bytes,
            ),
            self._parameters,
            names=self._names,
            used=used,
            expected=self._expected if self._overlap else None,
            peers=self._peers,
        )

    def learn(self, pipeline: BucketPipeline, step: int) -> None:
        """Take the order in which rank 0 got its gradients; collective: one broadcast.

        Args:
            pipeline: What has just reduced all gradients for the first time.
            step: Number of that reduction.
        """
        latest_first = dict.fromkeys(reversed(pipeline.history))
        planned = self._default_order()
        holds = set(planned)
        order = [index for index in reversed(latest_first) if index in holds]
        order += [index for index in planned if index not in latest_first]
        shared = torch.tensor(order, dtype=torch.int64, device=self._parameters[0].device)
        self._peers.broadcast([shared], f"step {step}, order of the gradients")
        self._order = shared.tolist()
        self._expected = [max(1, fires) for fires in pipeline.fires]

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, by name."""
        order = None if self._order is None else [self._names[index] for index in self._order]
        return {"order": order, "fires": self._expected}

    def load_state_dict(self, state_dict: dict[str, Any]) -> bool:
        """Take over what another run learned; return whether it fits this model."""
        order, fires = state_dict["order"], state_dict["fires"]
        planned = sorted(self._names[index] for index in self._default_order())
        if order is None or sorted(order) != planned or len(fires) != len(self._names):
            return False
        index_of = {name: index for index, name in enumerate(self._names)}
        self._order = [index_of[name] for name in order]
        self._expected = list(fires)
        return True
