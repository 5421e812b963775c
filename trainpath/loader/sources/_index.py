"""Where the samples of a tar lie: headers parsed over a memory map, without `tarfile`.

Understands what webdataset's and the usual tools write: ustar with prefixes, GNU long
names, PAX headers, base-256 sizes. Groups members to samples by webdataset's rules (base
name up to the first dot, lower-case extensions).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from trainpath.errors import ShardCorruptError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator

__all__ = ["Field", "SampleEntry", "index_tar"]

_BLOCK: Final = 512
_ZEROS: Final = bytes(_BLOCK)
_KEY: Final = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META: Final = re.compile(r"__[^/]*__($|/)")
_COMPRESSED: Final = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"(\xb5/\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}
_REGULAR: Final = b"0\x007"


class Field(NamedTuple):
    """One member: its extension and where its bytes are."""

    extension: str
    offset: int
    size: int


class SampleEntry(NamedTuple):
    """One sample: its key and its members."""

    key: str
    fields: tuple[Field, ...]


class _Member(NamedTuple):
    name: str
    offset: int
    size: int


def index_tar(data: mmap.mmap | bytes, url: str) -> list[SampleEntry]:
    """Return the samples of a tar in the order they are stored.

    Raises:
        ShardCorruptError: Not a tar, compressed, cut short, a member given twice, or
            members of which none can be part of a sample.
    """
    entries: list[SampleEntry] = []
    key: str | None = None
    fields: dict[str, Field] = {}
    num_members = 0
    for member in _members(data, url):
        num_members += 1
        name = member.name
        match = None if _META.match(name) else _KEY.match(name)
        if match is None:
            continue
        prefix, extension = match.group(1), match.group(2).lower()
        if prefix != key:
            if key is not None:
                entries.append(SampleEntry(key, tuple(fields.values())))
            key = prefix
            fields = {}
        if extension in fields:
            raise ShardCorruptError(
                f"shard {url} holds member {name!r} twice in one sample; write each key once"
            )
        fields[extension] = Field(extension, member.offset, member.size)
    if key is not None:
        entries.append(SampleEntry(key, tuple(fields.values())))
    if num_members and not entries:
        raise ShardCorruptError(
            f"shard {url} has {num_members} member(s), but none can be part of a sample: names "
            "must be KEY.EXTENSION (for example 000017.jpg)"
        )
    return entries


def _members(data: mmap.mmap | bytes, url: str) -> Iterator[_Member]:
    """Yield the regular files of a tar."""
    length = len(data)
    _refuse_foreign(data[:_BLOCK], length, url)
    position = 0
    long_name: str | None = None
    records: dict[str, str] = {}
    while True:
        header = data[position : position + _BLOCK]
        if len(header) < _BLOCK:
            raise ShardCorruptError(
                f"shard {url} is cut: it ends at byte {length} without the end mark of a tar; "
                "fetch or write it again"
            )
        if header == _ZEROS:
            return
        kind = header[156:157]
        _check(header, position, url)
        size = _size(header[124:136], records, position, url)
        start = position + _BLOCK
        position = start + size + -size % _BLOCK
        if start + size > length:
            raise ShardCorruptError(
                f"shard {url} is cut: a member of {size} bytes at byte {start} ends after the "
                f"file's {length} bytes; fetch or write it again"
            )
        if kind in b"LK":
            if kind == b"L":
                long_name = _text(data[start : start + size])
        elif kind == b"x":
            records = _pax(data[start : start + size], url)
        elif kind in _REGULAR:
            name = long_name or records.get("path") or _name(header)
            if any(record.startswith("GNU.sparse") for record in records):
                raise ShardCorruptError(f"shard {url}: member {name!r} is sparse; write it plain")
            long_name, records = None, {}
            if not name.endswith("/"):
                yield _Member(name, start, size)
        elif kind == b"S":
            raise ShardCorruptError(f"shard {url}: {_name(header)!r} is sparse; write it plain")
        elif kind != b"g":
            long_name, records = None, {}


def _refuse_foreign(head: bytes, length: int, url: str) -> None:
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ShardCorruptError(
                f"shard {url} is {name} compressed; only plain tars can be mapped and indexed: "
                "decompress it (compress the members' content instead, as JPEG or PNG do)"
            )
    if length == 0:
        raise ShardCorruptError(f"shard {url} is empty (0 bytes); fetch or write it again")
    if length < _BLOCK:
        raise ShardCorruptError(f"shard {url} is not a tar: it has only {length} bytes")


def _check(header: bytes, position: int, url: str) -> None:
    """Check the magic of a header, or its sum where the magic is missing or first."""
    if position and header[257:262] == b"ustar":
        return
    try:
        expected = int(header[148:156].strip(b" \0") or b"x", 8)
    except ValueError:
        expected = -1
    actual = sum(header) - sum(header[148:156]) + 8 * 32
    if expected != actual:
        what = "is not a tar" if position == 0 else "is damaged"
        raise ShardCorruptError(
            f"shard {url} {what}: no member header at byte {position}; fetch or write it again"
        )


def _size(field: bytes, records: dict[str, str], position: int, url: str) -> int:
    """Return the size of a member: of its PAX record, else of its header."""
    try:
        if "size" in records:
            size = int(records["size"])
        elif field[0] & 0x80:  # GNU base-256, for sizes from 8 GiB on
            size = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        else:
            size = int(field.split(b"\0", 1)[0].strip() or b"0", 8)
    except ValueError:
        size = -1
    if size < 0:  # going on from there could come by here again, for ever
        raise ShardCorruptError(
            f"shard {url} is damaged: the member at byte {position} has no valid size; "
            "fetch or write it again"
        )
    return size


def _text(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    if header[257:263] == b"ustar\0" and header[345]:
        return f"{_text(header[345:500])}/{name}"
    return name


def _pax(raw: bytes, url: str) -> dict[str, str]:
    """Parse the records of a PAX header: length, space, key, "=", value, newline."""
    records: dict[str, str] = {}
    position = 0
    while position < len(raw) and raw[position]:
        try:
            space = raw.index(b" ", position)
            end = position + int(raw[position:space])
            key, _, value = raw[space + 1 : end - 1].partition(b"=")
            name = key.decode("utf-8")
        except ValueError as error:
            raise ShardCorruptError(f"shard {url} is damaged: a PAX record is invalid") from error
        if end <= space:
            raise ShardCorruptError(f"shard {url} is damaged: a PAX record is invalid")
        records[name] = value.decode("utf-8", "surrogateescape")
        position = end
    return records
