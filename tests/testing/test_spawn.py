"""`spawn`: real ranks, their results, and what is said of those that fail."""

from __future__ import annotations

import atexit
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trainpath.errors import ConfigError, TrainpathError
from trainpath.testing import SpawnError, spawn


@dataclass
class Given:
    """A class of this test module, sent to the ranks and back."""

    value: int


def add_ranks(given):
    """Sum `given.value + rank` over all ranks; tell where this runs."""
    tensor = torch.tensor([given.value + dist.get_rank()])
    dist.all_reduce(tensor)
    sys.stdout.write(f"sum is {tensor.item()}\n")
    atexit.register(Path(f"exit-{dist.get_rank()}").touch)
    return Given(tensor.item()), dict(os.environ), str(Path.cwd()), torch.get_num_threads()


def test_ranks_communicate_and_return(monkeypatch, tmp_path, capsys):
    """Ranks run in one gloo group, as under torchrun; results come by rank, output is shown."""
    monkeypatch.setenv("SET_IN_PARENT", "yes")
    monkeypatch.chdir(tmp_path)

    first, second = spawn(add_ranks, 2, args=(Given(10),), env={"GIVEN": "also"})

    assert first[0] == second[0] == Given(21)
    assert [result[1]["RANK"] for result in (first, second)] == ["0", "1"]
    assert [result[1]["LOCAL_RANK"] for result in (first, second)] == ["0", "1"]
    assert first[1]["WORLD_SIZE"] == first[1]["LOCAL_WORLD_SIZE"] == "2"
    assert first[1]["SET_IN_PARENT"] == "yes"
    assert first[1]["GIVEN"] == "also"
    assert first[2] == str(tmp_path)
    assert first[3] == int(os.environ.get("OMP_NUM_THREADS", "1"))
    assert "[rank 1] sum is 21" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["exit-0", "exit-1"]


def init_by_env():
    """Initialise the default group as a training script does."""
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def test_a_function_may_initialise_its_own_group():
    """With no backend, `init_process_group` by env:// works as it does under torchrun."""
    assert spawn(init_by_env, 2, backend=None) == [2.0, 2.0]


def fail_on_one():
    """Raise on rank 1 while rank 0 waits for it in a collective."""
    if dist.get_rank() == 1:
        sys.stderr.write("about to fail\n")
        raise ValueError("the data is bad")
    dist.all_reduce(torch.ones(1))


def test_every_failing_rank_is_shown():
    """The error holds traceback and output of the rank that raised first, then of its victim."""
    with pytest.raises(SpawnError) as caught:
        spawn(fail_on_one, 2)

    error = caught.value
    assert isinstance(error, TrainpathError)
    assert isinstance(error, RuntimeError)
    assert list(error.failures) == [1, 0]
    assert error.failures[1].reason == "raised ValueError: the data is bad"
    assert "in fail_on_one" in error.failures[1].traceback
    assert "about to fail" in error.failures[1].output
    assert "all_reduce" in error.failures[0].traceback
    assert "2 of 2 ranks did not return" in str(error)
    assert "rank 1 raised ValueError: the data is bad" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def end_badly():
    """Return on rank 0; be killed, exit and return what cannot be pickled on the others."""
    rank = dist.get_rank()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        os._exit(3)
    return (lambda: None) if rank == 3 else "fine"


def test_each_way_to_end_without_a_result_is_named():
    """A signal, an exit and an unpicklable result are told apart; other results are kept."""
    with pytest.raises(SpawnError) as caught:
        spawn(end_badly, 4)

    failures = caught.value.failures
    assert failures[1].reason == "was killed by SIGKILL before it returned"
    assert failures[2].reason == "exited with code 3 before it returned"
    assert "end_badly.<locals>.<lambda>" in failures[3].reason
    assert caught.value.results == {0: "fine"}


def hang_on_one(pids):
    """Hang for ever on rank 1, together with a child process."""
    if dist.get_rank() == 1:
        child = subprocess.Popen(["sleep", "1000"])
        Path(pids).write_text(f"{os.getpid()} {child.pid}")
        threading.Event().wait()
    return "done"


def gone(pid):
    """Tell whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def all_gone_soon(pids):
    """Wait for the processes to end."""
    deadline = time.monotonic() + 10
    while not all(gone(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return all(gone(pid) for pid in pids)


def test_the_deadline_ends_all_and_shows_where_they_hang(tmp_path):
    """At the deadline a rank is ended with its children; the error shows its stack."""
    pids = tmp_path / "pids"

    with pytest.raises(SpawnError) as caught:
        spawn(hang_on_one, 2, args=(str(pids),), timeout_s=6)

    assert list(caught.value.failures) == [1]
    failure = caught.value.failures[1]
    assert failure.reason == "still ran at the deadline of 6 s"
    assert "in hang_on_one" in failure.output
    assert caught.value.results == {0: "done"}
    assert all_gone_soon([int(pid) for pid in pids.read_text().split()])


def fail_or_hang():
    """Raise on rank 0; hang on rank 1."""
    if os.environ["RANK"] == "0":
        raise KeyError("x")
    threading.Event().wait()


def test_others_are_ended_soon_after_a_failure():
    """Once a rank has failed, the others get `grace_s`, not the whole time."""
    with pytest.raises(SpawnError) as caught:
        spawn(fail_or_hang, 2, timeout_s=50, grace_s=0.2, backend=None)

    assert caught.value.failures[0].reason == "raised KeyError: 'x'"
    assert caught.value.failures[1].reason == "still ran 0.2 s after another rank had failed"


def leave_a_thread():
    """Return, but leave a thread that keeps the process alive."""
    threading.Thread(target=threading.Event().wait, name="left-over").start()
    return 1


def test_a_process_that_does_not_end_is_a_failure():
    """A rank that returned but whose threads keep it alive has failed, with their stacks."""
    with pytest.raises(SpawnError) as caught:
        spawn(leave_a_thread, 1, timeout_s=5, backend=None)

    reason = caught.value.failures[0].reason
    assert reason == "had returned but its process still ran at the deadline of 5 s"
    assert "in wait" in caught.value.failures[0].output


def double(value):
    """Return `value` twice."""
    return [value, value]


def test_nothing_is_left_behind():
    """A second call leaves as many descriptors, threads and children as the first did."""

    def state():
        places = ("/proc/self/fd", "/proc/self/task", "/dev/shm")
        return [len(list(Path(place).iterdir())) for place in places]

    big = torch.arange(300_000)
    assert all(torch.equal(part, big) for part in spawn(double, 1, args=(big,), backend=None)[0])
    before = state()
    with pytest.raises(SpawnError):
        spawn(double, 2, backend=None)

    assert state() == before


def test_functions_of_modules_that_cannot_be_imported(tmp_path, monkeypatch):
    """The ranks find a module by its file when its name alone would not do."""
    file = tmp_path / "some.file.py"
    file.write_text("class Thing:\n    pass\ndef make(thing):\n    return type(thing)()\n")
    spec = importlib.util.spec_from_file_location("no_such_package.some_module", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "no_such_package", types.ModuleType("no_such_package"))
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)

    results = spawn(module.make, 2, args=(module.Thing(),), backend=None)

    assert [type(result) for result in results] == [module.Thing, module.Thing]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spawn(lambda: 1, 2), "top level of a module"),
        (lambda: spawn(double, 1, args=(threading.Lock(),)), "must be picklable"),
        (lambda: spawn(double, 0), "world_size must be a positive int"),
        (lambda: spawn(double, 2.0), "world_size must be a positive int"),
        (lambda: spawn(double, 1, timeout_s=0), "timeout_s must be a positive number"),
        (lambda: spawn(double, 1, env={"A": 1}), "env must map"),
    ],
)
def test_bad_arguments(call, message):
    """What cannot work is refused before any process starts."""
    with pytest.raises(ConfigError, match=message):
        call()


SCRIPT = """
import os, sys, threading
from pathlib import Path
from trainpath.testing import spawn

def hang():
    Path(f"rank-{os.environ['RANK']}").write_text(str(os.getpid()))
    threading.Event().wait()

if __name__ == "__main__":
    spawn(hang, 2, backend=None)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_parent(tmp_path, number):
    """When the process that called spawn is killed or interrupted, no rank survives."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as process:
        files = [tmp_path / "rank-0", tmp_path / "rank-1"]
        deadline = time.monotonic() + 40
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        process.wait(20)

    assert all_gone_soon([int(file.read_text()) for file in files])
