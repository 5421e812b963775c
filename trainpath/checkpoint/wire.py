"""Messages between trainer and writer: a length, a pickle, descriptors beside it."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["receive", "send"]

_LENGTH: Final = struct.Struct("<Q")


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
