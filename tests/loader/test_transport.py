"""Messages between processes: same values, same types, nothing kept."""

from __future__ import annotations

import errno
import os
import resource
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from trainpath.loader import transport

CASES = {
    "small": torch.arange(6).view(2, 3),
    "large": torch.rand(200, 300),
    "bfloat16": torch.rand(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4, dtype=torch.int16),
    "complex": torch.view_as_complex(torch.rand(3, 2)),
    "channels_last": torch.rand(2, 3, 64, 64).to(memory_format=torch.channels_last),
    "slice": torch.arange(100).view(10, 10)[:, 3],
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.rand(3)),
    "array": np.arange(12.0).reshape(3, 4),
    "large_array": np.arange(50_000),
    "large_text": "x" * 100_000,
    "nested": {"a": [torch.ones(2), ("b", 3)], "c": None},
}


def num_descriptors():
    """Return how many file descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def channels():
    """Give two connected channels."""
    left, right = transport.channel_pair()
    yield left, right
    left.close()
    right.close()


def equal(a, b):
    """Say whether two values are equal in type and content."""
    if isinstance(a, torch.Tensor):
        a_dense, b_dense = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
        return type(a) is type(b) and a.dtype == b.dtype and torch.equal(a_dense, b_dense)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("case", CASES)
def test_round_trip(channels, case):
    """Every kind of value arrives equal, in the same type and memory format."""
    left, right = channels
    left.send(CASES[case])
    received = right.recv()
    assert equal(CASES[case], received)
    if isinstance(received, torch.Tensor) and received.layout == torch.strided:
        if case != "slice":
            assert received.stride() == CASES[case].stride()
        if received.numel() and not received.requires_grad:
            received.zero_()  # what was received may be written to


def test_many_kept_batches_do_not_exhaust_descriptors(channels):
    """Kept batches never change, and beyond a bound they hold no file descriptor."""
    left, right = channels
    before = num_descriptors()
    kept = []
    for number in range(100):
        left.send(torch.full((20_000,), number))
        kept.append(right.recv())
    assert num_descriptors() - before <= 64
    assert right.num_copied == 36
    assert [batch[-1].item() for batch in kept] == list(range(100))
    kept.clear()
    assert num_descriptors() == before


def test_too_many_open_files_are_named(channels):
    """A process that may open no more files gets an error that says so, not a wrong message."""
    left, right = channels
    left.send(torch.ones(20_000))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(OSError, match="too many open files") as caught:
            right.recv()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.errno == errno.EMFILE
    left.send("next")
    assert right.recv() == "next"


def test_end_of_the_other_side_is_eof():
    """What was sent before the end is received, then EOFError."""
    left, right = transport.channel_pair()
    left.send("last")
    left.close()
    assert right.recv() == "last"
    with pytest.raises(EOFError):
        right.recv()
    right.close()


def test_sending_to_a_closed_side_is_a_broken_pipe():
    """A send to nobody raises at once."""
    left, right = transport.channel_pair()
    right.close()
    with pytest.raises(BrokenPipeError):
        left.send("x")
    left.close()


def test_inline_messages_fit_the_socket():
    """The largest inline message is below what the kernel takes in one packet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        limit = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert limit > 2 * transport.INLINE_BYTES


def test_shared_buffers_are_passed_on_without_a_copy(channels):
    """A tensor in a shared buffer arrives as the same memory; a part of one is copied."""
    left, right = channels
    memory = torch.frombuffer(left.shared.allocate(80_000), dtype=torch.float32)
    memory.fill_(3)
    left.send({"whole": memory, "part": memory[: memory.numel() - 1], "more": "text"})
    received = right.recv()
    assert received["whole"].sum() == 3 * 20_000
    memory.fill_(4)
    assert received["whole"].sum() == 4 * 20_000
    assert received["part"].sum() == 3 * 19_999
    before = num_descriptors()
    left.shared.clear()
    assert num_descriptors() == before - 1
    left.send(memory)
    again = right.recv()
    memory.fill_(5)
    assert again.sum() == 4 * 20_000


def test_more_shared_buffers_than_fit_one_message(channels):
    """Beyond the bound of descriptors per message the rest is copied."""
    left, right = channels
    tensors = []
    for number in range(20):
        memory = torch.frombuffer(left.shared.allocate(40_000), dtype=torch.int64)
        tensors.append(memory.fill_(number))
    left.send(tensors)
    assert [tensor[-1].item() for tensor in right.recv()] == list(range(20))
    left.shared.clear()
