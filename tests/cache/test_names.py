"""Names: what identifies an object, and what may be printed of its URL."""

from __future__ import annotations

import pytest

from trainpath.cache.names import (
    ObjectName,
    canonical_url,
    digest,
    local_path,
    redact,
    strip_protocol,
    tag_of,
)
from trainpath.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/data/a.tar", "/data/a.tar"),
        ("a b/../c.tar", "a b/../c.tar"),
        ("file:///data/a%20b.tar", "/data/a b.tar"),
        ("file:/data/a.tar", "/data/a.tar"),
        ("local:///data/a.tar", "/data/a.tar"),
        ("http://host/a.tar", None),
        ("s3://bucket/a.tar", None),
        ("zip://a.tar::http://host/a.zip", None),
    ],
)
def test_local_path(url, path):
    """Paths and file URLs are local, everything with another scheme is remote."""
    assert local_path(url) == path


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("http://user:secret@host/a.tar", "http://host/a.tar"),
        ("https://host:8443/a.tar?token=secret#x", "https://host:8443/a.tar?..."),
        ("http://us@er:secret@host/a@b.tar", "http://host/a@b.tar"),
        ("http://user:secret@host", "http://host"),
        ("zip://a::http://u:secret@host/a.zip?k=secret", "zip://a::http://host/a.zip?..."),
        ("/data/a?b.tar", "/data/a?b.tar"),
    ],
)
def test_redact(url, printed):
    """A URL in a message has neither credentials nor query."""
    assert redact(url) == printed


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://host/a.tar", "HTTP://HOST:80/a.tar"),
        ("http://host/a.tar", "http://user:secret@host/a.tar#part"),
        ("https://host/a b.tar", "https://host:443/a%20b.tar"),
        ("http://host", "http://host/"),
        (
            "https://b.s3/a?X-Amz-Signature=1&X-Amz-Date=2&versionId=7",
            "https://b.s3/a?versionId=7&X-Amz-Signature=3",
        ),
        (
            "https://b.s3/a?AWSAccessKeyId=i&Signature=1&Expires=2",
            "https://b.s3/a?AWSAccessKeyId=i&Signature=3&Expires=4",
        ),
        ("https://x.blob/a?sv=1&se=2&sig=3", "https://x.blob/a?sv=1&se=4&sig=5"),
    ],
)
def test_spellings_of_one_object(one, other):
    """Credentials, signatures, default ports and quoting do not make another object."""
    assert canonical_url(one) == canonical_url(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://host/train/000.tar", "http://host/val/000.tar"),
        ("http://host/a.tar?v=1", "http://host/a.tar?v=2"),
        ("http://host/a.tar?expires=1", "http://host/a.tar?expires=2"),
        ("http://host/a.tar", "https://host/a.tar"),
        ("http://host/a.tar", "http://host:81/a.tar"),
        ("http://host/../a.tar", "http://host/a.tar"),
        ("http://host/A.tar", "http://host/a.tar"),
        ("s3://b/a.tar?x=1", "s3://b/a.tar?x=2"),
    ],
)
def test_different_objects(one, other):
    """Another directory, query, scheme, port or letter case is another object."""
    assert canonical_url(one) != canonical_url(other)


def test_bad_port_is_a_config_error():
    """A URL that cannot be parsed is a clear error without its secrets."""
    with pytest.raises(ConfigError, match=r"http://host:port/a\?\.\.\. is not a URL"):
        canonical_url("http://user:secret@host:port/a?token=secret")


def test_object_name_round_trip():
    """Every field of an object's name is read back from its file name, nothing else parses."""
    name = ObjectName(digest("u"), tag_of('"e"'), 1 << 40, 0xFF, "0123abcd")

    assert ObjectName.parse(str(name)) == name
    assert ObjectName.parse(str(name) + "x") is None
    assert ObjectName.parse("../../etc/passwd") is None
    assert name.under("f" * 8).boot == "f" * 8


def test_tag_tells_no_version_from_an_empty_one():
    """An origin without versions never matches one with an empty version."""
    assert tag_of(None) != tag_of("")


@pytest.mark.parametrize("prefix", ["trainpath::", "trainpath://", "trainpath:", ""])
def test_strip_protocol(prefix):
    """The prefix of our fsspec protocol is not part of the URL."""
    assert strip_protocol(f"{prefix}http://host/a.tar") == "http://host/a.tar"
