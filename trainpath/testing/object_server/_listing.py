"""Listings: an HTML index (what fsspec's http file system reads) and S3 ListObjectsV2."""

from __future__ import annotations

import html
from datetime import datetime, timezone
from typing import TYPE_CHECKING
from urllib.parse import quote
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["html_index", "s3_listing"]

Names = dict[str, tuple[int, float]]


def html_index(names: Names, directory: str) -> str | None:
    """Return links to what is directly below `directory` (`""` or `"a/b/"`), or None."""
    entries: set[str] = set()
    for name in names:
        if name.startswith(directory):
            head, slash, _ = name[len(directory) :].partition("/")
            entries.add(head + slash)
    if not entries and directory:
        return None
    links = (
        f'<li><a href="{quote(f"/{directory}{entry}")}">{html.escape(entry)}</a></li>'
        for entry in sorted(entries)
    )
    title = html.escape(f"Index of /{directory}")
    body = "\n".join(["<ul>", *links, "</ul>"])
    head = f"<!DOCTYPE html>\n<html><head><title>{title}</title></head>"
    return f"{head}<body>\n{body}\n</body></html>\n"


def s3_listing(names: Names, bucket: str, query: Mapping[str, str]) -> str:
    """Return one page of ListObjectsV2 of the objects below `bucket` (`""`: all)."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    limit = int(query.get("max-keys", "1000"))
    encode = quote if query.get("encoding-type") == "url" else escape
    base = f"{bucket}/" if bucket else ""
    entries: dict[str, str] = {}  # in order of key: one XML element per key or common prefix
    truncated = False
    last = ""
    for name, (size, modified_s) in names.items():
        key = name[len(base) :]
        if not name.startswith(base) or not key.startswith(prefix):
            continue
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        shown = key if cut < 0 else key[: cut + len(delimiter)]
        if shown <= after or shown in entries:
            continue
        if len(entries) >= limit:
            truncated = True
            break
        last = shown
        if cut < 0:
            time = datetime.fromtimestamp(modified_s, timezone.utc).strftime(
                "%Y-%m-%dT%H:%M:%S.000Z"
            )
            entries[shown] = (
                f"<Contents><Key>{encode(key)}</Key><LastModified>{time}</LastModified>"
                f"<Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
        else:
            entries[shown] = f"<CommonPrefixes><Prefix>{encode(shown)}</Prefix></CommonPrefixes>"
    token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if truncated else ""
    encoding = "<EncodingType>url</EncodingType>" if encode is quote else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket)}</Name><Prefix>{encode(prefix)}</Prefix>"
        f"<Delimiter>{encode(delimiter)}</Delimiter><MaxKeys>{limit}</MaxKeys>"
        f"<KeyCount>{len(entries)}</KeyCount>{encoding}"
        f"<IsTruncated>{str(truncated).lower()}</IsTruncated>{token}"
        f"{''.join(entries.values())}</ListBucketResult>\n"
    )
