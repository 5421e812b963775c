"""Compare a checkpoint with live objects, then load it into them."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from trainpath.checkpoint.capture import Path, canonical, is_plain, nest, param_names, unwrap
from trainpath.checkpoint.reader import Reader
from trainpath.types import Stateful

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path as FilePath

__all__ = ["restore_into"]

_log = logging.getLogger("trainpath.checkpoint")

_MAX_ROWS: Final = 25
# What torch's schedulers add to the groups of an optimizer.
_OF_SCHEDULERS: Final = frozenset(
    ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
)


def restore_into(
    state: Mapping[str, Any],
    folder: FilePath,
    *,
    rank: int,
    world_size: int,
    agree: Callable[[str], None],
) -> None:
    """Load a proven step into the objects of `state`.

    Args:
        state: As for `save()`; may hold fewer names than were saved.
        folder: The directory of the step.
        rank: This rank.
        world_size: How many ranks restore.
        agree: Called once with the table of differences ("" if none), before anything is
            touched; raises on every rank if one of them has any.
    """
    with Reader(folder) as reader:
        loading = _Loading(state, reader, rank, world_size)
        loading.compare()
        agree(loading.report(folder))
        loading.load()


class _Loading:
    """One restore: the comparison and, if it came out well, the loading."""

    def __init__(
        self, state: Mapping[str, Any], reader: Reader, rank: int, world_size: int
    ) -> None:
        self._state = state
        self._reader = reader
        self._rank = rank
        self._world_size = world_size
        self._rows: list[tuple[str, str, str, str]] = []
        self._modules = {
            name: unwrap(obj) for name, obj in state.items() if isinstance(obj, nn.Module)
        }
        self._keys: dict[str, dict[Path, str]] = {}
        for key, path in reader.paths.items():
            self._keys.setdefault(str(path[0]), {})[tuple(path[1:])] = key

    def compare(self) -> None:
        """Note every difference between the checkpoint and the live objects."""
        for name, obj in self._state.items():
            saved = self._keys.get(name)
            if name in self._modules:
                self._compare_module(name, self._modules[name], saved or {})
            elif saved is None:
                self._note("missing", name, "-", type(obj).__name__)
            elif isinstance(obj, torch.optim.Optimizer):
                self._compare_optimizer(name, obj, saved)
            elif name in self._reader.rank_local and not self._fits_ranks(obj):
                live = f"{self._world_size} ranks"
                self._note("mismatched", name, f"{self._reader.world_size} ranks differ", live)
            elif is_plain(obj):
                self._compare_tensor(name, self._mine(name).get(()), obj)

    def _note(self, what: str, name: str, saved: str, live: str) -> None:
        self._rows.append((what, name, saved, live))

    def _compare_tensor(self, name: str, key: str | None, live: torch.Tensor) -> None:
        if key is None:
            self._note("missing", name, "-", _describe(live))
        elif self._reader.describe(key) != _describe(live):
            self._note("mismatched", name, self._reader.describe(key), _describe(live))

    def _fits_ranks(self, obj: Any) -> bool:
        same = self._reader.world_size == self._world_size
        return same or bool(getattr(obj, "rank_local", False))

    def _mine(self, name: str) -> dict[Path, str]:
        """Return the keys of a name, by path inside it, that are meant for this rank."""
        saved = self._keys.get(name, {})
        if name not in self._reader.rank_local:
            return saved
        mine = f"rank_{self._rank:05d}"
        return {path[1:]: key for path, key in saved.items() if path[0] == mine}

    def _compare_module(self, name: str, module: nn.Module, saved: dict[Path, str]) -> None:
        found = _by_name({".".join(map(str, path)): key for path, key in saved.items()})
        wanted = set()
        for raw, live in module.state_dict().items():
            key = _lookup(found, raw)
            wanted.add(key)
            if is_plain(live):
                self._compare_tensor(f"{name}.{canonical(raw)}", key, live)
            elif key is None:
                self._note("missing", f"{name}.{canonical(raw)}", "-", "value")
        for key in sorted(set(saved.values()) - wanted):
            self._note("unexpected", key, self._reader.describe(key), "-")

    def _compare_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, saved: dict[Path, str]
    ) -> None:
        names = param_names(optimizer, self._modules)
        live = {
            canonical(names[id(param)], leading=True): param
            for group in optimizer.param_groups
            for param in group["params"]
        }
        listed = {
            canonical(param, leading=True)
            for path, key in saved.items()
            if path[0] == "param_groups" and path[-1] == "params"
            for param in self._reader.read(key)
        }
        for param in sorted(live.keys() - listed):
            self._note("missing", f"{name}.state.{param}", "-", _describe(live[param]))
        for param in sorted(listed - live.keys()):
            self._note("unexpected", f"{name}.state.{param}", "value", "-")
        num_saved = len({path[1] for path in saved if path[0] == "param_groups"})
        num_live = len(optimizer.param_groups)
        if num_saved != num_live:
            texts = (f"{num_saved} groups", f"{num_live} groups")
            self._note("mismatched", f"{name}.param_groups", *texts)
        self._compare_options(name, optimizer, saved)
        for path, key in saved.items():
            owner = live.get(canonical(str(path[1]), leading=True))
            if path[0] == "state" and len(path) == 3 and owner is not None:
                held = optimizer.state.get(owner, {}).get(path[2])
                if is_plain(held) and self._reader.is_tensor(key):
                    self._compare_tensor(key, key, held)

    def _compare_options(
        self, name: str, optimizer: torch.optim.Optimizer, saved: dict[Path, str]
    ) -> None:
        """Note an optimizer of another class: each side has options that the other lacks.

        Options on one side only are those of a scheduler or of another version of torch.
        """
        there = {str(path[2]) for path in saved if path[0] == "param_groups" and len(path) > 2}
        here = {option for group in optimizer.param_groups for option in group}
        foreign, lacking = there - here - _OF_SCHEDULERS, optimizer.defaults.keys() - there
        if there and foreign and lacking:
            texts = (f"with {', '.join(sorted(foreign))}", f"with {', '.join(sorted(lacking))}")
            self._note("mismatched", f"{name}.param_groups", *texts)

    def report(self, folder: FilePath) -> str:
        """Return the differences as a table, or nothing."""
        if not self._rows:
            return ""
        head = [("", "name", "checkpoint", "live")]
        rows = head + self._rows[:_MAX_ROWS]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if len(self._rows) > _MAX_ROWS:
            lines.append(f"... and {len(self._rows) - _MAX_ROWS} more")
        table = "\n".join(f"  {line}" for line in lines)
        return (
            f"{folder} does not fit the objects to restore (nothing was changed):\n{table}\n"
            "Restore into the model and optimizer that were saved, or only the names that fit."
        )

    def load(self) -> None:
        """Load everything; generators of random numbers last, for loading may draw."""
        names = sorted(
            self._state, key=lambda name: bool(getattr(self._state[name], "rank_local", False))
        )
        for name in names:
            obj = self._state[name]
            if name in self._modules:
                self._load_module(self._modules[name], self._keys[name])
            elif isinstance(obj, torch.optim.Optimizer):
                self._load_optimizer(obj, self._keys[name])
            else:
                self._load_value(name, obj)

    def _load_module(self, module: nn.Module, saved: dict[Path, str]) -> None:
        found = _by_name({".".join(map(str, path)): key for path, key in saved.items()})
        own = {
            tensor.data_ptr()
            for tensor in (*module.parameters(), *module.buffers())
            if tensor.numel()
        }
        rest = {}
        for raw, live in module.state_dict().items():
            key = _lookup(found, raw)
            if key is None:
                continue
            value = self._reader.read(key)
            if is_plain(live) and live.data_ptr() in own:
                with torch.no_grad():
                    live.copy_(value)
            else:
                rest[raw] = value
        if rest:
            module.load_state_dict(rest, strict=False)

    def _load_optimizer(self, optimizer: torch.optim.Optimizer, saved: dict[Path, str]) -> None:
        read = nest({path: self._reader.read(key) for path, key in saved.items()})
        states = _by_name(read.get("state", {}))
        names = param_names(optimizer, self._modules)
        for group, saved_group in zip(optimizer.param_groups, read["param_groups"], strict=True):
            for param in group["params"]:
                _set_param_state(optimizer, group, param, _lookup(states, names[id(param)]) or {})
            for key, value in saved_group.items():
                if key != "params":
                    group[key] = _put(group.get(key), value, torch.device("cpu"))

    def _load_value(self, name: str, obj: Any) -> None:
        keys = self._mine(name)
        if not keys:
            _log.warning("%r was saved by fewer ranks; rank %d keeps its own", name, self._rank)
            return
        value = nest({path: self._reader.read(key) for path, key in keys.items()})
        if is_plain(obj):
            with torch.no_grad():
                obj.copy_(value)
        elif isinstance(obj, Stateful):
            obj.load_state_dict(value)
        elif isinstance(self._state, MutableMapping):
            self._state[name] = value


def _set_param_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], param: torch.Tensor, new: Any
) -> None:
    """Give a parameter its saved state, in the tensors it has where they fit."""
    if not new:
        optimizer.state.pop(param, None)
        return
    held = optimizer.state.get(param, {})
    on_device = group.get("capturable") or group.get("fused")
    cpu = torch.device("cpu")
    optimizer.state[param] = {
        # As torch does: step counters stay on the host unless the kernel reads them.
        key: _put(held.get(key), value, cpu if key == "step" and not on_device else param.device)
        for key, value in new.items()
    }


def _put(held: Any, value: Any, device: torch.device) -> Any:
    """Return `value` in the tensor that is there already, or on `device`."""
    if isinstance(value, list):
        return [_put(None, item, device) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if is_plain(held) and held.shape == value.shape and held.dtype == value.dtype:
        with torch.no_grad():
            return held.copy_(value)
    return value.to(held.device if isinstance(held, torch.Tensor) else device)


def _by_name(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return `saved` under its own names and under those without prefixes of wrappers."""
    table = {canonical(name, leading=True): value for name, value in saved.items()}
    return {**table, **saved}


def _lookup(table: Mapping[str, Any], raw: str) -> Any:
    """Return what was saved for a live name, whatever wraps it now or wrapped it then."""
    for name in (canonical(raw), canonical(raw, leading=True)):
        if name in table:
            return table[name]
    return None


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "value"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
