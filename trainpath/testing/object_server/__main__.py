"""The server as a process: `python -m trainpath.testing.object_server --root DIR`."""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys

from trainpath.errors import ConfigError
from trainpath.testing.object_server import ObjectServer

_PR_SET_PDEATHSIG = 1
_END = (signal.SIGTERM, signal.SIGINT)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; print one JSON line when ready."""
    parser = argparse.ArgumentParser(
        prog="python -m trainpath.testing.object_server",
        description="A real HTTP/1.1 object server on 127.0.0.1. It prints one JSON line "
        'with its "url" when ready. GET /-/stats, POST /-/reset, POST /-/settings control it.',
    )
    parser.add_argument("--root", help="directory with the objects (default: in memory)")
    parser.add_argument("--rate", type=float, help="bytes per second, shared (default: no limit)")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    parser.add_argument(
        "--exit-with-parent", action="store_true", help="end when the parent process ends"
    )
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, _END)  # before any thread starts
    if options.exit_with_parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        server = ObjectServer(
            options.root,
            rate_bytes_per_s=options.rate,
            latency_s=options.latency,
            port=options.port,
        )
    except (ConfigError, OSError) as error:
        parser.error(str(error))
    with server:
        # A parent that is gone already does not read this line: the write fails and we end.
        sys.stdout.write(json.dumps({"url": server.url}) + "\n")
        sys.stdout.flush()
        signal.sigwait(_END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
