"""Hiding one wait behind another: device prefetch and bounded background work."""

from __future__ import annotations

from trainpath.overlap.background import Background
from trainpath.overlap.device import DevicePrefetcher

__all__ = ["Background", "DevicePrefetcher"]
