"""The code in README and docs, run as it stands there."""

from __future__ import annotations

import re
import shlex
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, TensorDataset

import trainpath
from trainpath.cli import _parser
from trainpath.loader import DataLoader
from trainpath.testing import ObjectServer, spawn

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
NUM_SHARDS = 32
CODE_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLES = {
    "TRAINPATH_MODE",
    "TRAINPATH_METRICS_DIR",
    "TRAINPATH_CACHE_DIR",
    "TRAINPATH_CACHE_MAX_BYTES",
}
# What stands for a user's store and disk in the pages.
STORE = "https://store/"
DISK = "/local/ssd/shards"


def blocks(page, language):
    """Return the code blocks of a page in one language, in order."""
    text = (ROOT / page).read_text()
    return [code for found, code in CODE_BLOCK.findall(text) if found == language]


def pages_with(language):
    """Return the pages that have code in a language."""
    return [page for page in PAGES if blocks(page, language)]


def a_shard():
    """Return a WebDataset shard of two samples."""
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in (("0.txt", b"a"), ("0.cls", b"0"), ("1.txt", b"b"), ("1.cls", b"1")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, BytesIO(data))
    return file.getvalue()


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A working folder whose `shards` are served, and the environment that the pages set."""
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    for number in range(NUM_SHARDS):
        Path(f"shards/corpus-{number:04d}.tar").write_bytes(a_shard())
    monkeypatch.delenv("TRAINPATH_MODE", raising=False)
    monkeypatch.setenv("TRAINPATH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRAINPATH_CACHE_MAX_BYTES", "200e9")
    monkeypatch.setenv("TRAINPATH_CACHE_STARTED_NS", "")  # puts back what a cache sets
    with ObjectServer("shards") as server:
        yield server


def train(url):
    """Read a shard, as the training of a user would."""
    return len(trainpath.cache.open_url(url).read())


class Net(nn.Linear):
    """The user's model."""

    def __init__(self):
        super().__init__(4, 1)


def users_names():
    """Return what a page takes as given: a model to train, and a thousand batches."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(1000, 4), torch.randn(1000, 1))
    model = Net()
    return {
        "dataset": dataset,
        "device": "cpu",
        "loader": DataLoader(dataset),
        "loss_fn": nn.functional.mse_loss,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "scores": [],
        "torch": torch,
        "train": train,
        "trainpath": trainpath,
    }


# torch warns of more workers than cores (pages are written for larger machines than this one)
# and of a load outside of a job; webdataset leaves the closing of files to the interpreter.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_runs(page, store, tmp_path):
    """Each Python block of the page runs, with the names of those before it."""
    names = {}
    for number, block in enumerate(blocks(page, "python")):
        names |= users_names()
        code = block.replace(STORE, f"{store.url}/").replace(DISK, str(tmp_path / "cache"))
        exec(compile(code, f"<{page}, Python block {number}>", "exec"), names)
        for name in ("run", "loader"):
            if name in names:
                names[name].close()

    if page.endswith("cache.md"):
        assert {store.gets(path.name) for path in Path("shards").iterdir()} == {1}


def trained(side, diff):
    """Run one side of a diff on this rank and return the parameters that come of it."""
    lines = [line for line in diff.splitlines() if line[:1] in (" ", side)]
    names = users_names() | {
        "DataLoader": torch.utils.data.DataLoader,
        "DistributedDataParallel": DistributedDataParallel,
        "DistributedSampler": DistributedSampler,
        "Net": Net,
    }
    exec("\n".join(line[2:] for line in lines), names)
    if "run" in names:
        names["run"].close()
    return [parameter.tolist() for parameter in names["model"].parameters()]


def both_sides(diff):
    """Run a diff's two sides, one after the other."""
    return trained("-", diff), trained("+", diff)


@pytest.mark.parametrize("page", pages_with("diff"))
def test_diff_changes_no_bit(page, tmp_path, monkeypatch):
    """Both sides of the page's diff train the same parameters on two ranks, to the bit."""
    monkeypatch.chdir(tmp_path)
    (diff,) = blocks(page, "diff")

    ranks = spawn(both_sides, 2, args=(diff,), env={"OMP_NUM_THREADS": "1"})

    (before, after), other = ranks
    assert before == after
    assert other == (before, after)
    assert before != [parameter.tolist() for parameter in users_names()["model"].parameters()]


@pytest.mark.parametrize("page", pages_with("console"))
def test_commands_exist(page):
    """Each `trainpath` command line is understood, and each example that is named is there."""
    lines = [line[2:] for block in blocks(page, "console") for line in block.splitlines()]
    for line in lines:
        words = shlex.split(line)
        if words[0] == "trainpath":
            assert _parser().parse_args(words[1:]).command == words[1]
        for word in words:
            assert not word.startswith("examples/") or (ROOT / word).is_file(), line
            assert "TRAINPATH_" not in word or word.partition("=")[0] in VARIABLES, line
