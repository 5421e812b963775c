"""When a loader state fits, and which rank of how many this process is."""

from __future__ import annotations

from typing import Any, Final

from torch import distributed

from trainpath.errors import ConfigError, StateMismatchError

__all__ = ["GLOBAL_KINDS", "STATE_VERSION", "check_state", "place"]

STATE_VERSION: Final = 1
# Kinds whose position counts over all ranks: the same state everywhere.
GLOBAL_KINDS: Final = ("shards", "distributed")


def check_state(
    state: dict[str, Any], *, kind: str, identity: dict[str, Any], world_size: int
) -> None:
    """Check that a state can be continued by a loader.

    Args:
        state: The state.
        kind: What the loader's position counts.
        identity: What must be the same in both.
        world_size: How many ranks there are now.

    Raises:
        StateMismatchError: It cannot; the message says what differs.
    """
    if state.get("version") != STATE_VERSION:
        raise StateMismatchError(
            f"loader state of version {state.get('version')!r}; this is {STATE_VERSION}"
        )
    for name, value in {"kind": kind, **identity}.items():
        if state.get(name) != value:
            raise StateMismatchError(
                f"the loader state has {name}={state.get(name)!r}, this loader {value!r}; "
                "build the loader as it was, or start without the state"
            )
    if kind not in GLOBAL_KINDS and state["world_size"] != world_size:
        raise StateMismatchError(
            f"the loader state is of {state['world_size']} rank(s), this job has {world_size}; "
            f"the position of a {kind!r} loader is rank-local: use a TarDataset or a "
            "DistributedSampler to change the number of ranks"
        )


def place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return (rank, world size): as given, the process group's, or alone.

    Raises:
        ConfigError: The rank is not one of the ranks.
    """
    if rank is None and distributed.is_available() and distributed.is_initialized():
        rank = distributed.get_rank()
        world_size = world_size or distributed.get_world_size()
    rank, world_size = rank or 0, world_size or 1
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank {rank} is not one of {world_size} rank(s); give both")
    return rank, world_size
