"""Messages between trainer and writer: a length, a pickle, descriptors beside it."""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["is_readable", "receive", "send"]

_LENGTH: Final = struct.Struct("<Q")


def is_readable(channel: socket.socket, timeout_s: float) -> bool:
    """Wait until a message, or the end, is there to be received; say whether it is."""
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


def send(channel: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send one message."""
    socket.send_fds(channel, [_LENGTH.pack(len(data))], list(fds))
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message and the descriptors that came with it.

    Raises:
        EOFError: The other end is gone.
    """
    fds: list[int] = []
    try:
        head, fds, _, _ = socket.recv_fds(channel, _LENGTH.size, 4)
        while len(head) < _LENGTH.size:
            head += _some(channel, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        data = bytearray()
        while len(data) < length:
            data += _some(channel, min(1 << 20, length - len(data)))
    except (OSError, EOFError) as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):
            raise
        raise EOFError("the other end is gone") from error
    return bytes(data), fds


def _some(channel: socket.socket, length: int) -> bytes:
    data = channel.recv(length)
    if not data:
        raise EOFError
    return data
