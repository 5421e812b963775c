"""Take a training state apart into named leaves, as a stock checkpoint names them."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trainpath.errors import ConfigError
from trainpath.types import Stateful

__all__ = ["Leaf", "Part", "Path", "canonical", "digest", "nest", "param_names", "take_apart"]

Path = tuple["str | int", ...]

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


@dataclass(slots=True)
class Leaf:
    """One value of the state.

    Attributes:
        path: Where it sits in the nested state; its key is the path joined by dots.
        value: A plain tensor (not yet copied) or any other object.
        balanced: A replicated tensor that any rank may write.
        late: Cannot change before the next fenced `optimizer.step()`.
        is_tensor: Whether the value is stored as raw tensor bytes.
    """

    path: Path
    value: Any
    balanced: bool = False
    late: bool = False
    is_tensor: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_tensor = is_plain(self.value)

    @property
    def key(self) -> str:
        """The flat name, as in a stock checkpoint."""
        return ".".join(map(str, self.path))


@dataclass(slots=True)
class Part:
    """One entry of the mapping handed to `save()`.

    Attributes:
        name: Its name there.
        kind: How it is taken apart and loaded.
        leaves: Its values.
        rank_local: Always stored once per rank.
    """

    name: str
    kind: str  # "module", "optimizer" or "value"
    leaves: list[Leaf]
    rank_local: bool = False


def take_apart(state: Mapping[str, Any], fenced: set[int]) -> list[Part]:
    """Return the parts of `state`, holding references to its live tensors.

    Args:
        state: What the user handed in.
        fenced: `id()` of the parameters that change only in fenced optimizers.
    """
    modules = {name: unwrap(obj) for name, obj in state.items() if isinstance(obj, nn.Module)}
    parts = []
    for name, obj in state.items():
        if name in modules:
            part = _module_part(name, modules[name], fenced)
        elif isinstance(obj, torch.optim.Optimizer):
            part = _optimizer_part(name, obj, param_names(obj, modules), fenced)
        elif isinstance(obj, Stateful) and not isinstance(obj, torch.Tensor):
            leaves = _flatten((name,), obj.state_dict())
            part = Part(name, "value", leaves, bool(getattr(obj, "rank_local", False)))
        else:
            part = Part(name, "value", _flatten((name,), obj))
        parts.append(part)
    _refuse_duplicates(parts)
    return parts


def _refuse_duplicates(parts: list[Part]) -> None:
    seen: set[str] = set()
    for part in parts:
        for leaf in part.leaves:
            if leaf.key in seen:
                raise ConfigError(
                    f"two values of the state are both called {leaf.key!r}; rename one of them"
                )
            seen.add(leaf.key)


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), nn.Module):
            module = module._orig_mod  # type: ignore[assignment]  # noqa: SLF001
        else:
            return module


def canonical(name: str, *, leading: bool = False) -> str:
    """Return a parameter name without the prefixes that wrappers add.

    Args:
        name: The name.
        leading: Also drop a leading `module.`, as saved from a wrapped DDP model.
    """
    segments = [segment for segment in name.split(".") if segment not in _WRAPPERS]
    while leading and len(segments) > 1 and segments[0] == "module":
        segments.pop(0)
    return ".".join(segments)


def is_plain(value: Any) -> bool:
    """Whether `value` can be stored as raw bytes of a dense tensor.

    Raises:
        ConfigError: It is a shard of a tensor that lives on several ranks.
    """
    if not isinstance(value, torch.Tensor):
        return False
    if type(value).__name__ in {"DTensor", "ShardedTensor"}:
        raise ConfigError(
            "the state holds sharded tensors (DTensor); CheckpointManager saves replicated state "
            "only, use torch.distributed.checkpoint.save for this model"
        )
    if type(value) not in {torch.Tensor, nn.Parameter}:
        return False
    return value.layout == torch.strided and not value.is_quantized and value.device.type != "meta"


def _module_part(name: str, module: nn.Module, fenced: set[int]) -> Part:
    params = {
        canonical(param_name): param
        for param_name, param in module.named_parameters(remove_duplicate=False)
    }
    leaves = []
    # The parameters themselves: detaching thousands of them here would cost more than the rest.
    for raw, value in module.state_dict(keep_vars=True).items():
        key = canonical(raw)
        leaf = Leaf((name, key), value)
        if leaf.is_tensor and params.get(key) is value:
            leaf.balanced = True
            leaf.late = id(value) in fenced
        leaves.append(leaf)
    return Part(name, "module", leaves)


def param_names(
    optimizer: torch.optim.Optimizer, modules: Mapping[str, nn.Module]
) -> dict[int, str]:
    """Return `id(parameter)` -> name for every parameter of `optimizer`.

    The name is the fully qualified one in the module that holds them all; over several
    modules, it begins with the name of the module; without any, it is the index.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    tables = {}
    for name, module in modules.items():
        table: dict[int, str] = {}
        for param_name, param in module.named_parameters(remove_duplicate=False):
            table.setdefault(id(param), canonical(param_name))
        tables[name] = table
        if params and all(id(param) in table for param in params):
            return {id(param): table[id(param)] for param in params}
    names = {}
    for index, param in enumerate(params):
        owners = [name for name, table in tables.items() if id(param) in table]
        names[id(param)] = f"{owners[0]}.{tables[owners[0]][id(param)]}" if owners else str(index)
    return names


def _optimizer_part(
    name: str, optimizer: torch.optim.Optimizer, names: dict[int, str], fenced: set[int]
) -> Part:
    leaves: list[Leaf] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            late = id(param) in fenced
            prefix = (name, "state", names[id(param)])
            for key, value in optimizer.state.get(param, {}).items():
                for leaf in _flatten((*prefix, str(key)), value):
                    leaf.balanced = leaf.is_tensor
                    leaf.late = late and leaf.is_tensor
                    leaves.append(leaf)
    groups = [
        {**group, "params": [names[id(param)] for param in group["params"]]}
        for group in optimizer.param_groups
    ]
    for group in groups:
        group.pop("param_names", None)
    leaves += _flatten((name, "param_groups"), groups)
    return Part(name, "optimizer", leaves)


def _flatten(path: Path, value: Any) -> list[Leaf]:
    """Walk like stock DCP: into mappings, and into lists that hold tensors or mappings."""
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        return [leaf for key, inner in value.items() for leaf in _flatten((*path, key), inner)]
    if isinstance(value, list) and any(_is_inner(item) for item in value):
        return [leaf for index, item in enumerate(value) for leaf in _flatten((*path, index), item)]
    return [Leaf(path, value)]


def _is_inner(item: Any) -> bool:
    if isinstance(item, list):
        return any(_is_inner(inner) for inner in item)
    return isinstance(item, (Mapping, torch.Tensor))


def nest(values: Mapping[Path, Any]) -> Any:
    """Rebuild the nested state from values by path (the reverse of taking apart)."""
    if list(values) == [()]:
        return values[()]
    inner: dict[str | int, dict[Path, Any]] = {}
    for path, value in values.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    if inner and all(isinstance(key, int) for key in inner):
        return [nest(inner[index]) for index in sorted(inner)]
    return {key: nest(below) for key, below in inner.items()}


def digest(value: Any) -> bytes:
    """Return a hash that is equal for equal values, whatever objects they share."""
    state = hashlib.sha256()
    _feed(state, value)
    return state.digest()


def _feed(state: Any, value: Any) -> None:
    state.update(type(value).__name__.encode())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        state.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _feed(state, key)
            _feed(state, inner)
    elif isinstance(value, (list, tuple)):
        state.update(str(len(value)).encode())
        for inner in value:
            _feed(state, inner)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        state.update(f"{value.dtype}{value.shape}".encode())
        state.update(value.tobytes())
    elif is_plain(value):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(flat.numpy().tobytes())
    else:
        state.update(pickle.dumps(value))
