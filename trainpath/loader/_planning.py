"""What comes next and where we are: the plan of each pass, and positions as states."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import data as torch_data

from trainpath.errors import ConfigError
from trainpath.loader._passes import StreamPosition
from trainpath.loader._samplers import IndexSource, draw_seed, pack_rng, unpack_rng
from trainpath.loader._state import GLOBAL_KINDS, STATE_VERSION, check_state, place
from trainpath.loader.order import Plan, ShardOrder, ShardPlan, ShardPosition, StreamPlan

if TYPE_CHECKING:
    from trainpath.loader._iterator import RunningPass
    from trainpath.loader.sources import ShardedSource

__all__ = ["PassPlan", "Planner"]


class PassPlan(NamedTuple):
    """What a pass is to make, from where on.

    Attributes:
        plan: Its batches.
        position: Where it begins.
        stream: For an iterable dataset, where each worker's copy begins.
    """

    plan: Plan
    position: Any
    stream: StreamPosition | None


class Planner:
    """Plans the passes of one loader: draws what torch would draw, in torch's order.

    Args:
        template: The torch loader with the samplers, generator and options.
        order: Order of the shards; None where torch's samplers say the order.
        rank: As given to the loader.
        world_size: Likewise.

    Attributes:
        epoch: The current one, or the next one between two.
        base_seed: Of the workers of the current epoch; None before the first.
        indices: The index stream of the samplers.
        source: The shards that are planned here, or None.
        is_stream: Whether the dataset is an iterable one.
    """

    def __init__(
        self, template: Any, order: ShardOrder | None, *, rank: int | None, world_size: int | None
    ) -> None:
        self._order = order
        self._batch_size: int | None = template.batch_size
        self._drop_last: bool = template.drop_last
        self._num_workers: int = template.num_workers
        self._keeps_seed: bool = template.persistent_workers
        self._generator: torch.Generator | None = template.generator
        self._given_rank = (rank, world_size)
        self.source: ShardedSource | None = template.dataset if order is not None else None
        self.is_stream = isinstance(template.dataset, torch_data.IterableDataset)
        self.indices = IndexSource(template.sampler, template.batch_sampler, template.generator)
        self.epoch = 0
        self.base_seed: int | None = None

    @property
    def kind(self) -> str:
        """What the position counts."""
        if self.source is not None:
            return "shards"
        return "stream" if self.is_stream else self.indices.kind

    def world(self) -> tuple[int, int]:
        """Return (rank, world size): the sampler's, as given, the process group's, or alone."""
        sampler = self.indices.distributed
        if sampler is not None:
            return sampler.rank, sampler.num_replicas
        return place(*self._given_rank)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also of the samplers."""
        self.epoch = epoch
        if self.source is None:
            self.indices.set_epoch(epoch)

    def begin(self, resume: dict[str, Any] | None) -> PassPlan:
        """Return the plan of a new pass, or of the rest of the one that a state is in."""
        if resume is not None and self._moved_on(resume):
            resume = None
        mid = resume is not None and "position" in resume
        kept = self._keeps_seed and self.base_seed is not None
        plan: Plan | None = None
        if not mid and self.source is None and not self.is_stream:
            plan = self.indices.begin(twice=self._num_workers > 0 and not kept)
        if resume is not None and (mid or self._keeps_seed):
            self.base_seed = self._resumed_seed(resume)
        if self.base_seed is None or not (mid or self._keeps_seed):
            self.base_seed = draw_seed(self._generator)
        if plan is not None:
            return PassPlan(plan, 0, None)
        return self._plan(resume or {})

    def _plan(self, resume: dict[str, Any]) -> PassPlan:
        position: Any = resume.get("position")
        if self.is_stream:
            stream = StreamPosition([0] * max(1, self._num_workers))
            if position is not None:
                counts, states = list(position["counts"]), list(position["states"])
                stream = StreamPosition(counts, position["turn"], states)
            return PassPlan(StreamPlan(self._batch_size), position, stream)
        if self.source is not None:
            start = ShardPosition(*(position or ()))
            return PassPlan(self._shard_plan(self.source, start), start, None)
        rank, world_size = self.world()
        plan = self.indices.resume(resume["sampler"], position, rank=rank, world_size=world_size)
        return PassPlan(plan, position, None)

    def _shard_plan(self, source: ShardedSource, start: ShardPosition) -> ShardPlan:
        if self._order is None:
            raise ConfigError("the dataset has no shards to plan")
        rank, world_size = self.world()
        return ShardPlan(
            self._order,
            self.epoch,
            batch_size=self._batch_size,
            drop_last=self._drop_last,
            rank=rank,
            world_size=world_size,
            start=start,
            ahead=source.ahead if self._num_workers else 0,
            count=source.known_count,
            name=type(source).__name__,
        )

    def _resumed_seed(self, resume: dict[str, Any]) -> int:
        """Return the workers' base seed without a draw: it was drawn before the state was taken.

        A state that is the same on all ranks has none: each rank makes up its own.
        """
        if "base_seed" in resume:
            return int(resume["base_seed"] or 0)
        return (torch.initial_seed() + 0x9E3779B97F4A7C15 * (self.world()[0] + 1)) % (1 << 62)

    def _moved_on(self, resume: dict[str, Any]) -> bool:
        """Whether the user set a later epoch than the one the state is in."""
        if self.epoch > resume["epoch"]:
            return True
        start = resume.get("sampler", {}).get("sampler_epoch")
        epoch = self.indices.epoch
        return start is not None and epoch is not None and epoch > start

    @property
    def _identity(self) -> dict[str, Any]:
        """What must be the same where a state is loaded."""
        if self._order is not None:
            return asdict(self._order)
        if self.is_stream:
            return {"num_workers": self._num_workers, "batch_size": self._batch_size}
        return {}

    @property
    def _shares_global_rng(self) -> bool:
        """Whether the next epochs' order will be drawn from this process's global generator.

        With several ranks that is the job's business: the state of one rank must not set
        the generator of another.
        """
        planned = self.source is not None or self.is_stream
        return not planned and self.indices.uses_global_rng and self.world()[1] == 1

    def state(self, running: RunningPass | None) -> dict[str, Any]:
        """Return where `running` is, or where the next pass begins."""
        state: dict[str, Any] = {
            "version": STATE_VERSION,
            "kind": self.kind,
            "epoch": self.epoch,
            "world_size": self.world()[1],
        }
        if self.kind not in GLOBAL_KINDS:
            state["base_seed"] = self.base_seed
        state |= self._identity
        if running is None:
            state["generators"] = self.indices.generators()
        elif running.stream is not None:
            stream = running.stream
            state["position"] = {
                "counts": list(stream.counts),
                "turn": stream.turn,
                "states": list(stream.states),
            }
        elif self.source is not None:
            state["position"] = list(running.position)
        else:
            state["position"] = running.position
            state["sampler"] = self.indices.state()
        if self._shares_global_rng:
            state["rng"] = pack_rng(torch.get_rng_state())
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Take over the epoch and the generators of a state; `begin` takes its position.

        Raises:
            StateMismatchError: It does not fit this loader.
        """
        check_state(state, kind=self.kind, identity=self._identity, world_size=self.world()[1])
        self.epoch = state["epoch"]
        sampler = state.get("sampler", {})
        self.indices.restore_generators(state.get("generators", sampler.get("generators", [])))
        if "sampler_epoch" in sampler:
            self.indices.set_loaded_epoch(sampler["sampler_epoch"])
        if "rng" in state and self._shares_global_rng:
            torch.set_rng_state(unpack_rng(state["rng"]))
