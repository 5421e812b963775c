"""The tar index against tarfile and webdataset, and what it refuses."""

from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from trainpath.errors import ShardCorruptError
from trainpath.loader.sources._index import index_tar

LONG = "very/" * 60 + "deep-" + "x" * 120


def tar_of(members, *, format=tarfile.GNU_FORMAT):  # noqa: A002
    """Return a tar of (name, content or attributes) pairs."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                info.type = content["type"]
                info.linkname = "a.txt"
                tar.addfile(info)
    return stream.getvalue()


def read(data):
    """Return the samples of a tar by its index."""
    return [
        (entry.key, {f.extension: data[f.offset : f.offset + f.size] for f in entry.fields})
        for entry in index_tar(data, "x.tar")
    ]


MEMBERS = [
    ("a.txt", b"one"),
    ("a.CLS", b"1"),
    ("dir.d", {"type": tarfile.DIRTYPE}),
    ("dir/b.seg.png", b"p" * 513),
    ("dir/b.json", b""),
    ("README", b"no extension"),
    ("__meta__/info.json", b"{}"),
    ("link.txt", {"type": tarfile.SYMTYPE}),
    (f"{LONG}.txt", b"long"),
    ("d\u00e9j\u00e0.txt", b"unicode"),
]


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_reads_what_tarfile_wrote(format):  # noqa: A002
    """Long and non-ASCII names, directories and links of both formats are understood."""
    assert read(tar_of(MEMBERS, format=format)) == [
        ("a", {"txt": b"one", "cls": b"1"}),
        ("dir/b", {"seg.png": b"p" * 513, "json": b""}),
        (LONG, {"txt": b"long"}),
        ("d\u00e9j\u00e0", {"txt": b"unicode"}),
    ]


def test_ustar_prefix():
    """A name split over prefix and name is joined."""
    name = "p" * 120 + "/" + "n" * 60 + ".txt"
    assert read(tar_of([(name, b"x")], format=tarfile.USTAR_FORMAT))[0][0] == name[:-4]


def test_base_256_size():
    """Sizes written in base 256, as for members over 8 GiB, are read."""
    data = bytearray(tar_of([("a.txt", b"hello")]))
    data[124:136] = b"\x80" + (5).to_bytes(11, "big")
    header = bytes(data[:148]) + b" " * 8 + bytes(data[156:512])
    data[148:156] = b"%06o\0 " % sum(header)
    assert read(bytes(data)) == [("a", {"txt": b"hello"})]


def test_pax_size_and_path_override_the_header():
    """The PAX size and path of a member win over those in its header."""
    info = tarfile.TarInfo("short.txt")
    info.size = 3
    info.pax_headers = {"path": "other.txt"}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(info, io.BytesIO(b"abc"))
    assert read(stream.getvalue()) == [("other", {"txt": b"abc"})]


def test_every_cut_is_an_error():
    """A tar cut at any byte before its end mark is refused, never read as shorter."""
    data = tar_of([("a.txt", b"x" * 700), ("b.txt", b"y")])
    end = 512 + 1024 + 512 + 512
    for cut in [0, 1, 511, 512, 513, 1023, 1535, 1536, 1537, 2047, 2048, 2049, end - 1, end]:
        with pytest.raises(ShardCorruptError, match=r"x\.tar"):
            index_tar(data[:cut], "x.tar")
    assert len(index_tar(data[: end + 512], "x.tar")) == 2


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"<html>not found</html>" * 100, "not a tar"),
        (gzip.compress(tar_of(MEMBERS)), "gzip"),
        (b"BZh9" + bytes(600), "bzip2"),
        (b"(\xb5/\xfd" + bytes(600), "zstd"),
        (tar_of([("README", b"x"), ("dir/LICENSE", b"y")]), "KEY.EXTENSION"),
        (tar_of([("a.txt", b"x"), ("a.TXT", b"y")]), "twice"),
        (tar_of([("a.txt", b"x")])[:1024] + b"garbage!" * 64 + bytes(1024), "damaged"),
    ],
)
def test_what_is_no_shard_is_refused(data, says):
    """Each thing that cannot be read gets one error that names the shard and the reason."""
    with pytest.raises(ShardCorruptError, match=says) as caught:
        index_tar(data, "s3://bucket/x.tar")
    assert "s3://bucket/x.tar" in str(caught.value)


@pytest.mark.parametrize("size", [b"-0000001000\0", b"9z000000000\0"])
def test_size_that_is_none_is_refused(size):
    """A damaged size is an error; a negative one must not lead back to the same header."""
    data = bytearray(tar_of([("a.txt", b"x"), ("b.txt", b"y")]))
    data[1024 + 124 : 1024 + 136] = size
    with pytest.raises(ShardCorruptError, match="byte 1024 has no valid size"):
        index_tar(bytes(data), "x.tar")


def pax_member(record):
    """Return a tar of one member after a PAX header that holds just `record`."""
    header = tarfile.TarInfo("pax")
    header.type = tarfile.XHDTYPE
    header.size = len(record)
    block = header.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0")
    return block + tar_of([("a.txt", b"x")])


@pytest.mark.parametrize(
    "record",
    [b"13 size=-512\n", b"13 size=five\n", b"-1 path=a.b\n", b"12 \xff\xff=abc\n"],
)
def test_damaged_pax_records_are_refused(record):
    """PAX records that make no sense are one clear error, whatever they hold."""
    with pytest.raises(ShardCorruptError, match="damaged"):
        index_tar(pax_member(record), "x.tar")


def test_members_after_the_end_mark_are_not_read():
    """Like tarfile and webdataset, reading stops at the end mark."""
    data = tar_of([("a.txt", b"x")]) + tar_of([("b.txt", b"y")])
    assert [key for key, _ in read(data)] == ["a"]


def test_empty_tar_has_no_samples():
    """A tar without members is valid and holds nothing."""
    assert read(tar_of([])) == []
