"""Workers that die, hang or are left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch.utils import data as torch_data

from trainpath.errors import ClosedError, DeadlineError, WorkerDiedError
from trainpath.loader import DataLoader, workers
from trainpath.loader._forkserver import ForkserverContext


class Slow(torch_data.Dataset):
    """Gives its key and its process after a moment."""

    def __len__(self):
        return 60

    def __getitem__(self, key):
        time.sleep(0.002)
        return key, torch.full((3000,), key), os.getpid()


class SlowStream(torch_data.IterableDataset):
    """An iterable dataset."""

    def __iter__(self):
        yield from range(1000)


class Fatal(torch_data.Dataset):
    """Kills its process at one key, as a crash in native code would."""

    def __len__(self):
        return 12

    def __getitem__(self, key):
        if key == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return key


class Stuck(torch_data.Dataset):
    """Never gives its second sample."""

    def __len__(self):
        return 2

    def __getitem__(self, key):
        if key:
            time.sleep(30)
        return key


def num_descriptors():
    """Return how many file descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def is_alive(pid):
    """Say whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=10.0):
    """Wait for a condition that another process makes true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_killed_worker_is_replaced_with_equal_bytes():
    """A kill -9 of a worker again and again changes no batch and loses none."""
    expected = [batch[1] for batch in torch_data.DataLoader(Slow(), batch_size=4)]
    with DataLoader(Slow(), batch_size=4, num_workers=2) as loader:
        batches = []
        for number, (_, data, _) in enumerate(loader):
            batches.append(data)
            if number in (2, 3, 8):
                os.kill(loader.worker_pids()[number % 2], signal.SIGKILL)
        stats = loader.stats()
    assert len(batches) == len(expected)
    assert all(map(torch.equal, batches, expected))
    assert 1 <= stats.num_respawned <= 3
    assert stats.num_batches == 15


def test_killed_worker_of_a_stream_is_an_error_that_names_it():
    """The position of an iterable dataset dies with its worker: one error, no hang."""
    with DataLoader(SlowStream(), batch_size=4, num_workers=2, rank=1, world_size=3) as loader:
        batches = iter(loader)
        next(batches)
        pid = loader.worker_pids()[1]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=rf"rank 1.*worker 1 \(pid {pid}\).*SIGKILL"):
            list(batches)


def test_sample_that_kills_every_worker_is_an_error_after_the_bound():
    """A sample that crashes its process is named after a bounded number of replacements."""
    with DataLoader(Fatal(), batch_size=2, num_workers=2, max_respawns=2) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(WorkerDiedError, match=r"SIGKILL.*batch 3 of epoch 0"):
            next(batches)
        assert loader.stats().num_respawned == 2


def test_timeout_is_honoured():
    """A batch that takes longer than `timeout` is a DeadlineError that names it."""
    with DataLoader(Stuck(), num_workers=1, timeout=1) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(DeadlineError, match="batch 1 from worker 0"):
            next(batches)
        for pid in loader.worker_pids():
            os.kill(pid, signal.SIGKILL)


class Unreadable:
    """A key that can be sent to a worker, but not be read there."""

    def __reduce__(self):
        return os.fspath, (None,)


def test_key_that_a_worker_cannot_read_is_an_error():
    """A message that cannot be unpickled ends the worker at once, instead of the wait for it."""
    keys = [0, Unreadable()]
    loader = DataLoader(Slow(), None, sampler=keys, num_workers=1, max_respawns=0)
    with loader, pytest.raises(WorkerDiedError, match="worker 0"):
        list(loader)


def test_close_ends_workers_that_are_stuck(monkeypatch):
    """Workers that do not leave by themselves are all ended by force."""
    monkeypatch.setattr(workers, "_JOIN_S", 0.2)
    loader = DataLoader(Stuck(), num_workers=2)
    next(iter(loader))
    pids = loader.worker_pids()
    loader.close()
    assert not any(map(is_alive, pids))


def test_close_joins_the_workers_and_leaves_no_descriptor():
    """After close, also in the middle of an epoch, no process and no descriptor is left."""
    gc.collect()
    before = num_descriptors()
    loader = DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    pids = loader.worker_pids()
    assert all(map(is_alive, pids))
    loader.close()
    loader.close()
    assert not any(map(is_alive, pids))
    with pytest.raises(ClosedError):
        iter(loader)
    del batches, loader
    gc.collect()
    assert num_descriptors() == before


def test_dropped_loader_ends_its_workers():
    """A loader that is neither exhausted nor closed ends its workers when it is dropped."""
    loader = DataLoader(Slow(), batch_size=4, num_workers=2)
    next(iter(loader))
    pids = loader.worker_pids()
    assert all(map(is_alive, pids))
    del loader
    gc.collect()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_persistent_workers_are_the_same_processes():
    """With persistent_workers the processes serve all epochs, else each has its own."""
    for persistent in (True, False):
        options = {"batch_size": 30, "num_workers": 2, "persistent_workers": persistent}
        with DataLoader(Slow(), **options) as loader:
            epochs = [{pid for batch in loader for pid in batch[2].tolist()} for _ in range(2)]
        assert (epochs[0] == epochs[1]) is persistent


def test_break_and_begin_again_with_persistent_workers():
    """An abandoned epoch leaves nothing in the next one."""
    with DataLoader(Slow(), batch_size=4, num_workers=2, persistent_workers=True) as loader:
        for _ in range(3):
            for batch in loader:
                assert batch[0].tolist() == [0, 1, 2, 3]
                break
        assert sum(len(batch[0]) for batch in loader) == 60


SCRIPT = """
import json, os, sys, time
from trainpath.loader import DataLoader
from torch.utils.data import Dataset

class Endless(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, key):
        time.sleep(30 if key > 5 and {hang} else 0.001)
        return key

loader = DataLoader(Endless(), num_workers=2, multiprocessing_context={context!r})
batches = iter(loader)
next(batches)
print(json.dumps(loader.worker_pids()), flush=True)
for _ in batches:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("hang", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_step_process_is_killed(sent, hang):
    """A kill -9 or Ctrl-C of the step process ends workers that idle, work or hang."""
    script = textwrap.dedent(SCRIPT).format(hang=hang, context="fork")
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    pids = json.loads(process.stdout.readline())
    assert len(pids) == 2
    process.send_signal(sent)
    _, errors = process.communicate(timeout=20)
    wait_until(lambda: not any(map(is_alive, pids)))
    if sent == signal.SIGINT:
        assert errors.count(b"Traceback") == 1, "workers keep quiet about Ctrl-C"


UNGUARDED = """
import sys
print("ran", flush=True)
import torch
from torch.utils.data import TensorDataset
from trainpath.loader import DataLoader
from trainpath.loader._forkserver import ForkserverContext

data = TensorDataset(torch.arange(12))
loader = DataLoader(data, batch_size=3, num_workers=2)
loader.multiprocessing_context = ForkserverContext()
print([batch[0].tolist() for batch in loader], flush=True)
loader.close()
"""


def test_fork_server_does_not_run_the_users_script_again(tmp_path):
    """Workers from the fork server need no main guard in the training script."""
    script = tmp_path / "train.py"
    script.write_text(UNGUARDED)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=50, check=True
    )
    lines = done.stdout.split("\n")
    assert lines[0] == "ran"
    assert lines[1] == str([[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]])
    assert done.stdout.count("ran") == 1


def test_start_method(monkeypatch):
    """Fork as torch does; from a CUDA process a fork server for what can be sent to it."""
    portable = DataLoader(torch_data.TensorDataset(torch.arange(3)), num_workers=1)._spec()
    local = DataLoader(Slow(), num_workers=1, worker_init_fn=lambda _: None)._spec()
    wanted = torch.multiprocessing.get_context("spawn")
    assert workers.start_context(portable, wanted) is wanted
    assert workers.start_context(portable, None).get_start_method() == "fork"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert isinstance(workers.start_context(portable, None), ForkserverContext)
    large = DataLoader(torch_data.TensorDataset(torch.empty(9_000_000)), num_workers=1)._spec()
    monkeypatch.setattr(workers, "_MAX_SENT_BYTES", 1 << 20)
    for spec in (local, large):
        assert workers.start_context(spec, None).get_start_method() == "fork"
