"""Starting workers from a fork server that never imports the user's main module.

A training script without `if __name__ == "__main__"` would otherwise run again in every
worker. Used only where nothing that is sent comes from the main module.
"""

from __future__ import annotations

import io
import os
from multiprocessing import context, forkserver, popen_forkserver, reduction, spawn, util
from typing import Any, Final

__all__ = ["ForkserverContext"]

_PRELOAD: Final = ["torch", "numpy", "trainpath.loader._worker"]


class _Popen(popen_forkserver.Popen):
    """`multiprocessing`'s own, less the paths of the main module."""

    _fds: list[int]

    def _launch(self, process_obj: Any) -> None:
        data = spawn.get_preparation_data(process_obj.name)
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
        stream = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(data, stream)
            reduction.dump(process_obj, stream)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, writer = forkserver.connect_to_new_process(self._fds)
        # A second descriptor of the write end: the child knows by it that we are there.
        kept = os.dup(writer)
        self.finalizer = util.Finalize(self, _close_all, (kept, self.sentinel))
        with open(writer, "wb", closefd=True) as pipe:  # noqa: PTH123  (a descriptor)
            pipe.write(stream.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802  (multiprocessing's name)
        return _Popen(process_obj)


class ForkserverContext(context.ForkServerContext):
    """A fork server with torch imported, so that a worker starts in tens of milliseconds."""

    Process = _Process

    def __init__(self) -> None:
        super().__init__()
        self.set_forkserver_preload(_PRELOAD)
