"""Load checkpoints with nothing but torch: one directory a line in, one pickle file out.

Importing trainpath fails here, as it does for whoever has uninstalled it.
"""

from __future__ import annotations

import io
import sys
import warnings
import zipfile
from pathlib import Path

sys.modules["trainpath"] = None  # makes `import trainpath` raise ImportError

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402


def load(folder):
    """Return every value of the checkpoint by flat key, as `dcp.load` reads it."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    state = {}
    for key, entry in metadata.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[key] = torch.zeros(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    dcp.load(state, checkpoint_id=folder)
    assert state.keys() == metadata.planner_data.keys()
    for info in metadata.storage_data.values():
        record = (Path(folder) / info.relative_path).read_bytes()[info.offset :][: info.length]
        assert zipfile.ZipFile(io.BytesIO(record)).testzip() is None
    return state


def main():
    """Serve until the input ends."""
    warnings.simplefilter("ignore")
    try:
        import trainpath  # noqa: F401
    except ImportError:
        pass
    else:
        raise SystemExit("trainpath can be imported; this would prove nothing")
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, out = line.rstrip("\n").split("\t")
        try:
            torch.save(load(folder), out)
            answer = "ok"
        except Exception as error:
            answer = repr(error)
        sys.stdout.write(answer.replace("\n", " ") + "\n")
        sys.stdout.flush()


main()
