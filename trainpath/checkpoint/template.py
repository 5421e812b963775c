"""Pickles with holes: made where torch is, filled in by the writer, which has no torch.

Pickles of protocol 2 without a memo can be cut and joined anywhere between two objects, so
that the `.metadata` of a checkpoint is put together from pieces made by torch's own classes.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Template", "fill", "hole", "make_template", "mapping", "piece"]

Template = list[bytes]
"""The bytes between the holes, in order."""

PREFIX: Final = b"\x80\x02"
END: Final = b"."


def hole(index: int) -> str:
    """Return the string that stands for the `index`-th hole."""
    return f"\0trainpath-hole-{index}"


def piece(value: Any) -> bytes:
    """Return the pickle of `value` without its frame, to be joined with others."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[len(PREFIX) : -len(END)]


def make_template(value: Any, num_holes: int) -> Template:
    """Pickle `value`, which contains each `hole(i)` once and in order, and cut it there."""
    rest = piece(value)
    parts = []
    for index in range(num_holes):
        before, _, rest = rest.partition(piece(hole(index)))
        parts.append(before)
    return [*parts, rest]


def fill(template: Template, *pieces: bytes) -> bytes:
    """Return the template with each hole replaced."""
    out = [template[0]]
    for filling, after in zip(pieces, template[1:], strict=True):
        out += (filling, after)
    return b"".join(out)


def mapping(items: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the piece of a dict from the pieces of its keys and values."""
    return b"}(" + b"".join(key + value for key, value in items) + b"u"
