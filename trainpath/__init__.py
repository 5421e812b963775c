"""Measure the data path of distributed PyTorch training, remove its waits, decide what is next.

    import trainpath

    run = trainpath.accelerate(model, optimizer, loader, checkpoint_dir="ckpt", save_every=1000)
    run.restore()
    for x, y in run.loader:
        ...
    print(run.report())

The names below are imported at their first use, so that neither `import trainpath` nor
`trainpath --help` pays for torch. The parts, each usable alone, are in `trainpath.loader`,
`trainpath.cache`, `trainpath.comm`, `trainpath.checkpoint`, `trainpath.overlap` and
`trainpath.metrics`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainpath._lazy import lazy_names
from trainpath.errors import TrainpathError

if TYPE_CHECKING:
    from trainpath.metrics import Report
    from trainpath.run import Run, accelerate, observe

__all__ = ["Report", "Run", "TrainpathError", "__version__", "accelerate", "observe"]

__version__: Final = "0.1.0"

_HOMES: Final = {
    "Report": "trainpath.metrics",
    "Run": "trainpath.run",
    "accelerate": "trainpath.run",
    "observe": "trainpath.run",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
