"""The public names: what users may import, spelled out here so that a change is seen."""

from __future__ import annotations

import builtins
import importlib
import importlib.metadata
import inspect
import subprocess
import sys

import pytest

import trainpath
from trainpath.errors import TrainpathError

PUBLIC = {
    "trainpath": ["Report", "Run", "TrainpathError", "__version__", "accelerate", "observe"],
    "trainpath.cache": [
        "CacheStats",
        "EvictionPolicy",
        "FsspecStore",
        "HttpStore",
        "KeepUntilFull",
        "Resident",
        "ShardCache",
        "TrainpathFileSystem",
        "VerifyReport",
        "open_url",
        "register_webdataset",
        "shared_cache",
    ],
    "trainpath.checkpoint": [
        "CheckpointManager",
        "Milestone",
        "RandomState",
        "SaveHandle",
        "SaveStats",
    ],
    "trainpath.comm": ["GradientReducer", "comm_hook", "watch_backward"],
    "trainpath.loader": ["DataLoader", "TarDataset", "observed", "prefetch"],
    "trainpath.metrics": [
        "NULL_CLOCK",
        "SEGMENTS",
        "Comparison",
        "NullClock",
        "Recorder",
        "Report",
        "Span",
        "StepClock",
        "StepRecord",
        "compare",
    ],
    "trainpath.overlap": ["Background", "DevicePrefetcher"],
    "trainpath.testing": ["Fault", "FaultyStore", "ObjectServer", "SpawnError", "spawn"],
    "trainpath.types": ["Sink", "Stateful", "Store", "Tier"],
}


def in_order(names):
    """Sort as ruff does: constants, classes, the rest."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[0].isupper(), name))


@pytest.mark.parametrize("module", PUBLIC)
def test_exported_names(module):
    """Each package exports exactly the names listed here, sorted, and each can be imported."""
    package = importlib.import_module(module)

    assert package.__all__ == PUBLIC[module]
    assert in_order(package.__all__) == package.__all__
    assert [name for name in package.__all__ if getattr(package, name, None) is None] == []


@pytest.mark.parametrize("module", PUBLIC)
def test_exported_names_are_documented(module):
    """Every exported class and function has a docstring."""
    package = importlib.import_module(module)
    exported = {name: getattr(package, name) for name in package.__all__}
    objects = {n: o for n, o in exported.items() if inspect.isclass(o) or inspect.isfunction(o)}

    assert [name for name, obj in objects.items() if not inspect.getdoc(obj)] == []


def test_root_names_are_listed_before_they_are_loaded():
    """`dir(trainpath)` in a fresh interpreter names everything that `__all__` names."""
    check = "import trainpath; assert set(trainpath.__all__) <= set(dir(trainpath))"

    subprocess.run([sys.executable, "-c", check], check=True)


def test_unknown_root_name():
    """A name that does not exist is an AttributeError, as for any module."""
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trainpath.nothing


def test_version_is_the_distribution_version():
    """`trainpath.__version__` is what the package metadata says."""
    assert importlib.metadata.version("trainpath") == trainpath.__version__


def test_errors_form_one_tree():
    """Each error is a TrainpathError, drawn in the module's docstring, and also a builtin."""
    errors = importlib.import_module("trainpath.errors")
    builtin = {obj for obj in vars(builtins).values() if inspect.isclass(obj)}
    nearest = builtin - {Exception, BaseException, object}
    classes = [getattr(errors, name) for name in errors.__all__ if name != "TrainpathError"]

    assert sorted(errors.__all__) == errors.__all__
    assert [cls for cls in classes if not issubclass(cls, TrainpathError)] == []
    assert [cls for cls in classes if not nearest.intersection(cls.__mro__)] == []
    assert [cls for cls in classes if cls.__name__ not in errors.__doc__] == []
