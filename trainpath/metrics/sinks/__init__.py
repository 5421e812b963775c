"""Where metrics go: JSON lines and Chrome/Perfetto traces."""

from __future__ import annotations

from trainpath.metrics.sinks.chrome import ChromeTrace
from trainpath.metrics.sinks.jsonl import JsonLines

__all__ = ["ChromeTrace", "JsonLines"]
