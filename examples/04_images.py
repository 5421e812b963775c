"""Train a small convolutional network on JPEG images in tar shards.

    python examples/04_images.py
    torchrun --nproc_per_node 2 examples/04_images.py

The images are drawn here: circles, squares and triangles on a noisy background. Decoding JPEG
is what makes image jobs wait for data; the report shows it as `data.decode`.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import webdataset
from PIL import Image, ImageDraw
from torch import nn

import trainpath
from trainpath.loader import DataLoader, TarDataset

SIZE = 64
SHAPES = ("circle", "square", "triangle")


def draw(shape: int, generator: np.random.Generator) -> bytes:
    """Return one JPEG of the given shape at a random place, in a random colour."""
    noise = generator.integers(0, 120, (SIZE, SIZE, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    radius = int(generator.integers(SIZE // 5, SIZE // 3))
    x, y = generator.integers(radius, SIZE - radius, 2).tolist()
    colour = tuple(generator.integers(120, 256, 3).tolist())
    pen = ImageDraw.Draw(image)
    if SHAPES[shape] == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    else:
        num_sides = 4 if SHAPES[shape] == "square" else 3
        pen.regular_polygon((x, y, radius), num_sides, fill=colour)
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=90)
    return jpeg.getvalue()


def pack_images(folder: Path, num_images: int) -> None:
    """Write the images and their classes as WebDataset shards."""
    generator = np.random.default_rng(0)
    pattern = str(folder / "shapes-%04d.tar")
    with webdataset.ShardWriter(pattern, maxcount=256, verbose=0) as writer:
        for index in range(num_images):
            shape = index % len(SHAPES)
            jpeg = draw(shape, generator)
            writer.write({"__key__": f"{index:06d}", "jpg": jpeg, "cls": shape})


def decode(sample: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Decode one sample into a (3, SIZE, SIZE) image and its class."""
    with Image.open(io.BytesIO(sample["jpg"])) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(pixels / 255.0 - 0.5).permute(2, 0, 1), int(sample["cls"])


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
    )


def train(folder: Path, steps: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    shards = sorted(str(path) for path in folder.glob("shapes-*.tar"))
    loader = DataLoader(
        TarDataset(shards, decode=decode), batch_size=32, shuffle=True, num_workers=2, seed=0
    )
    model = nn.Sequential(
        block(3, 16), block(16, 32), block(32, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(SHAPES)),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with trainpath.accelerate(model, optimizer, loader) as run:
        while run.step < steps:
            for images, classes in run.loader:
                logits = model(images)
                loss = nn.functional.cross_entropy(logits, classes)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if rank == 0 and (run.step % 10 == 0 or run.step == steps):
                    accuracy = (logits.argmax(1) == classes).float().mean().item()
                    print(f"step {run.step:4d}  loss {loss.item():.3f}  accuracy {accuracy:.2f}")
                if run.step >= steps:
                    break
        if rank == 0:
            print(run.report())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--images", type=int, default=1536)
    args = parser.parse_args()

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        if dist.is_initialized():
            dist.broadcast_object_list(folder)  # every rank uses the folder of rank 0
        if folder[0] == name:
            pack_images(Path(name), args.images)
        if dist.is_initialized():
            dist.barrier()  # the shards are there
        train(Path(folder[0]), args.steps)
        if dist.is_initialized():
            dist.barrier()  # nobody uses them any more
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
