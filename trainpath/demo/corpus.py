"""The demo's data set: the Python standard library's own sources, as WebDataset shards."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

import webdataset as wds

from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["pack"]

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "idlelib", "lib2to3", "turtledemo"}


def pack(
    directory: Path,
    *,
    num_shards: int,
    samples_per_shard: int,
    passage_bytes: int,
    seed: int = 0,
) -> list[str]:
    """Write passages of source text to `directory/corpus-000000.tar` and so on.

    Each sample has a key and one member, `.txt`, of exactly `passage_bytes` bytes. The
    passages are drawn without replacement in an order that depends on `seed` only.

    Returns:
        The shards' names, in order.

    Raises:
        ConfigError: This Python has too little source text installed.
    """
    wanted = num_shards * samples_per_shard
    passages = list(_passages(passage_bytes))
    if len(passages) < wanted:
        raise ConfigError(
            f"the standard library of this Python gives {len(passages)} passages of "
            f"{passage_bytes} bytes, {wanted} are needed; install its sources"
        )
    random.Random(seed).shuffle(passages)
    directory.mkdir(parents=True, exist_ok=True)
    pattern = str(directory / "corpus-%06d.tar")
    with wds.ShardWriter(pattern, maxcount=samples_per_shard, verbose=0, mtime=0) as writer:
        for index, (name, text) in enumerate(passages[:wanted]):
            key = f"{index:06d}-{name.replace('.', '_')}"
            writer.write({"__key__": key, "txt": text})
    return sorted(path.name for path in directory.glob("corpus-*.tar"))


def _passages(size: int) -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_bytes()
        except OSError:
            continue
        for start in range(0, len(text) - size + 1, size):
            yield path.stem, text[start : start + size]
