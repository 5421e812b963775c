"""Buckets on their way: launched in one fixed order, collected in the same order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trainpath.comm.buckets import Bucket, Verdict
from trainpath.comm.flights import Flights
from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor

    from trainpath.comm.collectives import Peers

__all__ = ["BucketPipeline"]


class BucketPipeline:
    """Takes gradients as they become ready and returns them averaged over all ranks.

    A bucket is launched when it is full and all buckets before it are launched, so that
    every rank launches them in the same order whatever its own gradients' order. The last
    one waits for the end of backward, when it is known what this rank has not used.

    Args:
        members: Indices of parameters per bucket, alike on all ranks.
        parameters: All parameters.
        names: Their names.
        used: One flag per parameter: used since the last reduction. Written by the owner.
        expected: How often each gradient becomes ready in one backward; None while that is
            not known, and then nothing is launched before the end of backward.
        peers: Who shares the gradients.

    Attributes:
        flights: When its buckets left and came back.
        fires: How often each gradient has become ready in this backward.
        history: While `expected` is None: indices in the order in which they became ready.
        bytes_reduced: Bytes handed to the collectives so far.
    """

    def __init__(
        self,
        members: Sequence[Sequence[int]],
        parameters: Sequence[Tensor],
        *,
        names: Sequence[str],
        used: bytearray,
        expected: Sequence[int] | None,
        peers: Peers,
    ) -> None:
        self._parameters = parameters
        self._names = names
        self._used = used
        self._expected = expected
        self._peers = peers
        device = parameters[0].device if parameters else torch.device("cpu")
        self.buckets = [Bucket(indices, parameters, device=device) for indices in members]
        self._bucket_of = [-1] * len(parameters)
        for number, bucket in enumerate(self.buckets):
            for index in bucket.members:
                self._bucket_of[index] = number
        self._last = len(self.buckets) - 1
        self._scale = 1.0 / peers.world_size
        self.flights = Flights()
        self.bytes_reduced = 0
        self.reset()

    @property
    def num_launched(self) -> int:
        """Buckets launched in this backward."""
        return len(self._works)

    def reset(self) -> None:
        """Forget the backward pass; only when none of its collectives is in flight."""
        self.fires: list[int] = [0] * len(self._parameters)
        self.history: list[int] = []
        self._pending = [len(bucket.members) for bucket in self.buckets]
        self._works: list[dist.Work] = []
        self.flights.clear()

    def mark(self, index: int) -> None:
        """The gradient of parameter `index` is ready; launch what is full.

        Raises:
            ConfigError: Its bucket is on its way already.
        """
        fires = self.fires[index] + 1
        self.fires[index] = fires
        expected = self._expected
        if expected is None:
            self.history.append(index)
            return
        number = self._bucket_of[index]
        if fires != expected[index] or number < 0:
            if 0 <= number < len(self._works):
                self._refuse_late(index)
            return
        pending = self._pending
        pending[number] -= 1
        if not pending[number]:
            following = len(self._works)
            while following < self._last and not pending[following]:
                self._launch(following)
                following += 1

    def _refuse_late(self, index: int) -> None:
        raise ConfigError(
            f"rank {self._peers.rank}: the gradient of {self._names[index]!r} changed after its "
            "bucket was sent, because this backward produced it more often than the first one "
            "did (reentrant checkpointing in a graph that changes from step to step); use "
            "checkpoint(..., use_reentrant=False) or GradientReducer(..., overlap=False)"
        )

    def _launch(self, number: int, *, failed: bool = False) -> None:
        bucket = self.buckets[number]
        if failed:
            bucket.load_failure(self._peers.rank)
        else:
            bucket.load(self._parameters, self._names, self._used, scale=self._scale)
        started = self.flights.clock.now_ns()
        work = self._peers.all_reduce(bucket.flat)
        self._works.append(work)
        self.flights.launched(work, started)
        self.bytes_reduced += bucket.num_bytes

    def launch_rest(self, *, failed: bool = False) -> None:
        """Launch all buckets that are not; at the end of backward, or after it failed."""
        for number in range(len(self._works), len(self.buckets)):
            self._launch(number, failed=failed)

    def collect(self, step: int, *, discard: bool = False) -> None:
        """Wait for the buckets in the order of launch and write the gradients back.

        Args:
            step: Number of this reduction, for errors and the timeline.
            discard: Write nothing back: the pass failed here.

        Raises:
            PeerTimeoutError: A bucket did not come back in time.
            PeerError: A peer left.
        """
        self.flights.poll()
        for number, (bucket, work) in enumerate(zip(self.buckets, self._works, strict=True)):
            what = f"step {step}, gradient bucket {number} of {len(self.buckets)}"
            self._peers.wait(work, bucket.device, what)
            self.flights.poll()
            if not discard:
                bucket.store(self._parameters, self._used)
        self.flights.land(step)

    def verdict(self) -> Verdict:
        """Return whether the reduction just collected is complete."""
        return self.buckets[-1].verdict()
