"""Train a small byte-level language model on tar shards, with everything that trainpath does.

    python examples/02_accelerate.py
    torchrun --nproc_per_node 2 examples/02_accelerate.py
    python examples/02_accelerate.py --folder /tmp/lm --steps 40            # keeps its files, then
    python examples/02_accelerate.py --folder /tmp/lm --steps 80 --resume   # continues at step 40

The text is the source code of Python's own standard library, packed into WebDataset shards.
`TRAINPATH_MODE=observe` makes the same script its own baseline.
"""

from __future__ import annotations

import argparse
import contextlib
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import webdataset
from torch import nn

import trainpath
from trainpath.loader import DataLoader, TarDataset

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT = 128


class LanguageModel(nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width: int = 128, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the logits of the byte after each byte of `text`."""
        embedded = self.bytes(text) + self.positions.weight  # (batch, CONTEXT, width)
        return self.head(self.layers(embedded, mask=self.mask, is_causal=True))


def pack_standard_library(folder: Path) -> None:
    """Write the sources of the standard library as WebDataset shards, one sample a window."""
    root = Path(sysconfig.get_path("stdlib"))
    size = CONTEXT + 1
    pattern = str(folder / "stdlib-%04d.tar")
    with webdataset.ShardWriter(pattern, maxcount=1000, verbose=0) as writer:
        for number, file in enumerate(sorted(root.glob("*.py"))):
            text = file.read_bytes()
            for start in range(0, len(text) - size, 4 * size):
                key = f"{number:04d}-{start:08d}"
                writer.write({"__key__": key, "txt": text[start : start + size]})


def decode(sample: dict[str, Any]) -> torch.Tensor:
    """Turn the bytes of one sample into a window of token numbers."""
    return torch.from_numpy(np.frombuffer(sample["txt"], dtype=np.uint8).astype(np.int64))


@contextlib.contextmanager
def shared_folder(given: Path | None) -> Iterator[Path]:
    """Yield one folder for all ranks: the given one, or a temporary one of rank 0."""
    with contextlib.ExitStack() as stack:
        names: list[str | None] = [None]
        if rank() == 0:
            names[0] = str(given or stack.enter_context(tempfile.TemporaryDirectory()))
        if dist.is_initialized():
            dist.broadcast_object_list(names)
        yield Path(str(names[0]))
        if dist.is_initialized():
            dist.barrier()  # nobody uses it any more


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(folder: Path, *, steps: int, save_every: int, resume: bool) -> None:
    torch.manual_seed(0)
    shards = sorted(str(path) for path in folder.glob("stdlib-*.tar"))
    loader = DataLoader(
        TarDataset(shards, decode=decode), batch_size=8, shuffle=True, num_workers=2, seed=0
    )
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    with trainpath.accelerate(
        model, optimizer, loader, checkpoint_dir=folder / "checkpoints", save_every=save_every
    ) as run:
        if resume and run.restore() and rank() == 0:
            print(f"resumed at step {run.step}")
        for text in run.loader:
            loss = nn.functional.cross_entropy(
                model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank() == 0 and (run.step % 10 == 0 or run.step == steps):
                print(f"step {run.step:4d}  loss {loss.item():.3f}")
            if run.step >= steps:
                break
        run.save()
        if rank() == 0:
            print(run.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where shards and checkpoints stay")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    args = parser.parse_args()

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    with shared_folder(args.folder) as folder:
        if rank() == 0 and not any(folder.glob("stdlib-*.tar")):
            folder.mkdir(parents=True, exist_ok=True)
            pack_standard_library(folder)
        if dist.is_initialized():
            dist.barrier()  # the shards are there
        train(folder, steps=args.steps, save_every=args.save_every, resume=args.resume)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
