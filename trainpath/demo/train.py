"""The demo's training script, run under torchrun: `python -m torch.distributed.run -m ...`.

`--arm stock` is what a careful user writes today: DataLoader with workers over webdataset,
DistributedDataParallel, torch.save; the two `observe` lines only measure it. `--arm
trainpath` is the same script with `accelerate`. Several arms are run one after another in
the same processes, each from the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import fsspec
import torch
import torch.distributed as dist
import webdataset as wds
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from webdataset.gopen import gopen_schemes

import trainpath
from trainpath.demo.model import ByteLM
from trainpath.demo.steplog import StepLog
from trainpath.metrics import lineage
from trainpath.metrics import segments as S

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from trainpath.run import Run

CONTEXT = 128
BATCH_SIZE = 8
NUM_WORKERS = 2
SAVE_EVERY = 8


def crop(sample: dict[str, Any]) -> tuple[Tensor, int]:
    """Return the training window (context + 1 bytes) of a passage, and the passage's number."""
    text, key = sample["txt"], sample["__key__"]
    start = zlib.crc32(key.encode()) % (len(text) - CONTEXT)
    window = torch.frombuffer(bytearray(text[start : start + CONTEXT + 1]), dtype=torch.uint8)
    return window.long(), int(key.split("-")[0])


def open_http(url: str, mode: str = "rb", bufsize: int = 8192) -> Any:
    """Open a URL for webdataset by fsspec, so that the demo does not need curl."""
    del bufsize
    with lineage.stage(S.DATA_STORAGE):
        return _Measured(fsspec.open(url, mode).open())


class _Measured:
    """A stock file whose reads are told from decoding; bytes and timing stay as they are."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        with lineage.stage(S.DATA_NETWORK):
            data: bytes = self._file.read(size)
        return data

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()


def build_loader(urls: list[str]) -> DataLoader[Any]:
    """Return the loader of one rank: webdataset's shards split over ranks and workers."""
    dataset = wds.WebDataset(
        urls, shardshuffle=False, nodesplitter=wds.split_by_node, empty_check=False
    ).map(crop)
    return DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        num_workers=NUM_WORKERS,
        persistent_workers=True,
        drop_last=True,
    )


def build_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and optimizer, the same on every rank and in every arm."""
    torch.manual_seed(0)
    model = ByteLM(context=CONTEXT)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    log: StepLog,
    first_step: int,
) -> int:
    """Train over `batches` once; return the number of the last step."""
    step = first_step
    for windows, numbers in batches:
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 256), windows[:, 1:].reshape(-1))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        log.write(step, float(loss.detach()), numbers.tolist())
    return step


def stock_arm(options: argparse.Namespace, work: Path) -> Run:
    """Train the stock way, measured by `observe`."""
    gopen_schemes["http"] = open_http
    model, optimizer = build_model()
    replica = DistributedDataParallel(model)
    run = trainpath.observe(
        optimizer, build_loader(options.urls), model=replica, metrics_dir=work / "metrics"
    )
    log = StepLog(work, dist.get_rank())
    step = 0
    for _ in range(options.epochs):
        step = train(replica, optimizer, _saving(run, replica, optimizer, work), log, step)
    log.close()
    return run


def _saving(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, work: Path
) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield the batches of `run.loader`; rank 0 saves every few steps, as scripts do."""
    for batch in run.loader:
        if run.step and run.step % SAVE_EVERY == 0 and dist.get_rank() == 0:
            with run.measure("ckpt.backpressure"):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, work / "checkpoint.pt")
        yield batch


def trainpath_arm(options: argparse.Namespace, work: Path) -> Run:
    """Train with trainpath: the loader, the gradients and the checkpoints accelerated."""
    model, optimizer = build_model()
    run = trainpath.accelerate(
        model,
        optimizer,
        build_loader([f"trainpath::{url}" for url in options.urls]),
        checkpoint_dir=work / "checkpoints",
        save_every=SAVE_EVERY,
        cache_dir=work / "cache",
        metrics_dir=work / "metrics",
    )
    step = run.restore()
    log = StepLog(work, dist.get_rank())
    while run.epoch < options.epochs:
        step = train(model, optimizer, run.loader, log, step)
    log.close()
    return run


def bytes_sent(url: str) -> int:
    """Return how many bytes of shards the object server of `url` has sent so far."""
    base = url.rsplit("/", 1)[0]
    with urlopen(f"{base}/-/stats", timeout=10) as reply:  # noqa: S310 - our own, on loopback
        return int(json.load(reply)["bytes_sent"])


def main() -> None:
    """Run the arms named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arms", nargs="+", help="names like stock-0 or trainpath-1")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--urls", type=Path, required=True, help="file with one URL a line")
    parser.add_argument("--epochs", type=int, required=True)
    options = parser.parse_args()
    options.urls = options.urls.read_text().split()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for arm in options.arms:
        work = options.work / arm
        before = bytes_sent(options.urls[0]) if dist.get_rank() == 0 else 0
        run = (stock_arm if arm.startswith("stock") else trainpath_arm)(options, work)
        run.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(work / "cache", ignore_errors=True)
            (work / "bytes_sent").write_text(str(bytes_sent(options.urls[0]) - before))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
