"""`trainpath::` URLs for `webdataset.WebDataset`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainpath.cache.environment import shared_cache
from trainpath.cache.names import strip_protocol
from trainpath.errors import ConfigError

if TYPE_CHECKING:
    from typing import BinaryIO

__all__ = ["register_webdataset"]


def register_webdataset() -> None:
    """Let `wds.WebDataset("trainpath:http://host/{00..09}.tar")` read through the cache.

    One colon in a string with braces, because webdataset takes two for the end of a URL; in
    a list of URLs `trainpath::http://...` is right, too. The cache is the one of
    `TRAINPATH_CACHE_DIR`; without one, or with `TRAINPATH_MODE` set to `off` or `observe`,
    webdataset's own opener gets the URL. Call it again in worker processes that are not
    forked.
    """
    from webdataset.gopen import gopen_schemes  # noqa: PLC0415 - imports torch

    gopen_schemes["trainpath"] = _gopen


def _gopen(url: str, mode: str = "rb", bufsize: int = 8192, **options: Any) -> BinaryIO:
    from webdataset.gopen import gopen  # noqa: PLC0415 - imports torch

    if mode != "rb":
        raise ConfigError(f"trainpath:: URLs are read-only, {mode!r} is not possible")
    cache = shared_cache()
    if cache is not None:
        return cache.open(url)
    file: BinaryIO = gopen(strip_protocol(url), mode, bufsize, **options)
    return file
