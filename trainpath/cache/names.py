"""Names: URLs without secrets, local paths, and the file names of cached objects."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, quote, unquote, urlsplit

from trainpath.errors import ConfigError

__all__ = [
    "ObjectName",
    "boot_tag",
    "canonical_url",
    "digest",
    "local_path",
    "redact",
    "strip_protocol",
    "tag_of",
]

_HEX: Final = 32  # 128 bits of the URL in hexadecimal digits
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_SIGNATURES: Final = {"awsaccesskeyid", "googleaccessid", "key-pair-id", "signature"}
_SIGNED_WITH: Final = {"expires", "policy", "x-amz-security-token"}
_AZURE: Final = {"se", "sig", "sip", "ske", "skoid", "sks", "skt", "sktid", "skv", "sp", "spr"} | {
    "sr",
    "st",
    "sv",
}
_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})-(\d{1,19})-([0-9a-f]{8})-([0-9a-f]{8})")


def local_path(url: str) -> str | None:
    """Return the path of a local file, or None if `url` is remote."""
    if url.startswith("file:"):
        parts = urlsplit(url)
        return unquote(parts.path if not parts.netloc else f"/{parts.netloc}{parts.path}")
    if url.startswith("local://"):
        return url[len("local://") :]
    return None if "://" in url or "::" in url else url


def redact(url: str) -> str:
    """Return `url` as it may be printed: without user, password and query."""
    head, chain, tail = url.partition("::")
    if chain:
        return f"{redact(head)}::{redact(tail)}"
    if "://" not in url:
        return url
    scheme, _, rest = url.partition("://")
    rest = rest.partition("#")[0]
    rest, question, _ = rest.partition("?")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}" + ("?..." if question else "")


def canonical_url(url: str) -> str:
    """Return what identifies the object: no credentials, no signature, no default port.

    Two spellings of one HTTP URL, or two signatures of one object, are one object; any other
    difference in the query makes another one.
    """
    if not url.startswith(("http://", "https://", "HTTP://", "HTTPS://")):
        return url
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{redact(url)} is not a URL: {error}") from None
    host = (parts.hostname or "").lower()
    if ":" in host:
        host = f"[{host}]"
    if port not in {None, _DEFAULT_PORTS[parts.scheme]}:
        host = f"{host}:{port}"
    query = _unsigned(parts.query)
    path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    return SplitResult(parts.scheme, host, path, query, "").geturl()


def _unsigned(query: str) -> str:
    fields = query.split("&") if query else []
    names = {field.partition("=")[0].lower() for field in fields}
    drop = {name for name in names if name.startswith(("x-amz-", "x-goog-"))}
    if names & _SIGNATURES:
        drop |= names & (_SIGNATURES | _SIGNED_WITH)
    if "sig" in names:
        drop |= names & _AZURE
    return "&".join(field for field in fields if field.partition("=")[0].lower() not in drop)


def digest(text: str, *, num_hex: int = _HEX) -> str:
    """Return `num_hex` hexadecimal digits of the BLAKE2b digest of `text`."""
    raw = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(raw, digest_size=num_hex // 2).hexdigest()


def tag_of(version: str | None) -> str:
    """Return the digits that stand for a version (ETag) in a file name."""
    return digest("" if version is None else f"v{version}", num_hex=16)


def boot_tag() -> str:
    """Return digits that change with every boot of this machine."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:  # not Linux: files are taken as published under this boot
        return "0" * 8
    return digest(boot_id.strip(), num_hex=8)


@dataclass(frozen=True, slots=True)
class ObjectName:
    """All that is known of a cached object, kept in its file name.

    The name is the index: one rename publishes an object and its metadata at once, and no
    crash can leave one without the other.

    Attributes:
        key: Digest of the canonical URL.
        tag: Digest of the version (ETag).
        num_bytes: Length.
        crc: CRC-32 of the bytes as they arrived.
        boot: Tag of the boot under which the bytes were last known to be right.
    """

    key: str
    tag: str
    num_bytes: int
    crc: int
    boot: str

    def __str__(self) -> str:
        return f"{self.key}-{self.tag}-{self.num_bytes}-{self.crc:08x}-{self.boot}"

    @classmethod
    def parse(cls, name: str) -> ObjectName | None:
        """Read a file name; None if it is not one of ours."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        key, tag, num_bytes, crc, boot = match.groups()
        return cls(key, tag, int(num_bytes), int(crc, 16), boot)

    def under(self, boot: str) -> ObjectName:
        """Return the name of the same object, proven under `boot`."""
        return replace(self, boot=boot)


def strip_protocol(url: str | os.PathLike[str]) -> str:
    """Return `url` without a leading `trainpath::`, `trainpath://` or `trainpath:`."""
    text = os.fspath(url)
    for prefix in ("trainpath::", "trainpath://", "trainpath:"):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return text
