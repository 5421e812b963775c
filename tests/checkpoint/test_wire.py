"""Messages between trainer and writer: whole or not at all, on any descriptor."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import threading

import pytest

from trainpath.checkpoint.wire import is_readable, receive, send


@pytest.fixture
def ends():
    """Two connected sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_message_and_descriptor_arrive_together(ends):
    """What was sent comes out, with a descriptor for the same file."""
    reading, writing = os.pipe()
    send(ends[0], b"x" * 100_000, [writing])
    os.close(writing)
    data, fds = receive(ends[1])
    assert data == b"x" * 100_000
    os.write(fds[0], b"y")
    assert os.read(reading, 1) == b"y"
    os.close(fds[0])
    os.close(reading)


def test_message_in_parts_is_one_message(ends):
    """Once a part of a message is there, receiving waits for the rest of it."""
    ours, theirs = ends
    assert not is_readable(theirs, 0)
    ours.sendall(struct.pack("<Q", 4) + b"ab")
    assert is_readable(theirs, 0)
    later = threading.Timer(0.05, ours.sendall, [b"cd"])
    later.start()
    assert receive(theirs) == (b"abcd", [])
    later.join()


def test_end_in_the_middle_of_a_message_is_no_message(ends):
    """A peer that died half-way is an EOFError, and makes the channel readable."""
    ours, theirs = ends
    ours.sendall(struct.pack("<Q", 4) + b"ab")
    ours.close()
    assert is_readable(theirs, 0)
    with pytest.raises(EOFError):
        receive(theirs)


def test_descriptors_above_1023_are_waited_for(ends):
    """A process with thousands of open files can wait for its channel, too."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip("this process may not open 2048 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    try:
        with socket.socket(fileno=fcntl.fcntl(ends[1], fcntl.F_DUPFD, 1500)) as high:
            assert not is_readable(high, 0)
            send(ends[0], b"hello")
            assert is_readable(high, 1)
            assert receive(high) == (b"hello", [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
