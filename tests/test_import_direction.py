"""The direction of imports inside the package: each layer knows only the layers below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trainpath

ROOT = Path(trainpath.__file__).parent

_CORE = {"errors", "types", "_core"}
_METRICS = _CORE | {"metrics"}
_OVERLAP = _METRICS | {"overlap"}
_PARTS = _OVERLAP | {"cache", "comm", "checkpoint", "loader"}
_RUN = _PARTS | {"config", "run"}

# Layer: the layers that its modules may import, besides itself.
ALLOWED = {
    "errors": set(),
    "types": set(),
    "_core": {"errors", "types"},
    "metrics": _CORE,
    "overlap": _METRICS,
    "cache": _OVERLAP,
    "comm": _OVERLAP,
    "checkpoint": _OVERLAP,
    "loader": _OVERLAP | {"cache"},
    "config": _CORE,
    "run": _PARTS | {"config"},
    "": _RUN,  # trainpath/__init__.py: the lazy names
    "integrations": _RUN | {""},
    "testing": _RUN | {""},
    "demo": _RUN | {"", "testing"},
    "cli": _RUN | {"", "demo", "testing"},
    "__main__": {"cli"},
}

# Private modules beside the packages: the layer that each is a piece of.
PRIVATE = {
    "_arguments": "run",
    "_inert_hook": "_core",
    "_job": "run",
    "_lazy": "_core",
    "_parts": "run",
    "_run_loader": "run",
}


def module_name(path: Path) -> str:
    """Return the dotted name of the module in `path`."""
    parts = ("trainpath", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def layer_of(module: str) -> str:
    """Return the first component below `trainpath` (empty for the package itself).

    A private module beside the packages belongs to the layer named in `PRIVATE`.
    """
    layer = module.partition(".")[2].partition(".")[0]
    return PRIVATE.get(layer, layer)


def is_type_checking(node: ast.stmt) -> bool:
    """Tell whether `node` is an `if TYPE_CHECKING:` block."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def statements(body: list[ast.stmt], *, inside_functions: bool) -> list[ast.stmt]:
    """Return every statement under `body` that runs on import, or at any time at all."""
    found: list[ast.stmt] = []
    for node in body:
        found.append(node)
        if is_type_checking(node):
            found += statements(node.orelse, inside_functions=inside_functions)
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        for child in ast.iter_child_nodes(node):
            blocks = [child] if isinstance(child, ast.stmt) else getattr(child, "body", [])
            if isinstance(blocks, list):
                found += statements(
                    [block for block in blocks if isinstance(block, ast.stmt)],
                    inside_functions=inside_functions,
                )
    return found


def imported(module: str, tree: ast.Module, *, inside_functions: bool) -> set[str]:
    """Return the modules of ours that `module` imports, submodules resolved."""
    is_package = MODULES.get(module, Path()).name == "__init__.py"
    targets: set[str] = set()
    for node in statements(tree.body, inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")
                parent = parent[: len(parent) - node.level + is_package]
                base = ".".join([*parent, *([base] if base else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            targets |= {name if name in MODULES else base for name in names}
    return {name for name in targets if name.split(".")[0] == "trainpath"} - {module}


def parse(module: str) -> ast.Module:
    """Return the syntax tree of `module`."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_every_import_goes_down(module):
    """A module imports, at any time, only its own layer and the layers drawn below it."""
    layer = layer_of(module)

    used = {layer_of(name) for name in imported(module, parse(module), inside_functions=True)}

    assert layer in ALLOWED, f"{module} is in no known layer; draw it in ALLOWED"
    assert used - {layer} <= ALLOWED[layer]


def test_imports_at_module_level_have_no_cycle():
    """No module needs itself, by any chain of imports, in order to be imported."""
    graph = {
        module: imported(module, parse(module), inside_functions=False) & MODULES.keys()
        for module in MODULES
    }

    while leaves := [module for module, needs in graph.items() if not needs]:
        for module in leaves:
            del graph[module]
        for needs in graph.values():
            needs.difference_update(leaves)

    assert graph == {}


def test_the_walk_finds_each_way_of_importing():
    """Plain, aliased, relative and function-level imports count; TYPE_CHECKING ones do not."""
    source = """
if TYPE_CHECKING:
    import trainpath.run
else:
    import trainpath.types
from trainpath.metrics import clock as c, StepClock
from ..comm import x
try:
    import trainpath.errors
except ImportError:
    with a:
        import trainpath.config
def f():
    class C:
        from trainpath import cache
"""
    tree = ast.parse(source)

    at_import = imported("trainpath.loader.order", tree, inside_functions=False)
    ever = imported("trainpath.loader.order", tree, inside_functions=True)

    assert at_import == {
        "trainpath.comm",
        "trainpath.config",
        "trainpath.errors",
        "trainpath.metrics",
        "trainpath.metrics.clock",
        "trainpath.types",
    }
    assert ever == at_import | {"trainpath.cache"}


@pytest.mark.parametrize(
    "statement",
    [
        "import trainpath; trainpath.__version__; dir(trainpath); trainpath.TrainpathError",
        "import trainpath.errors, trainpath.types",
        "import trainpath.cli",
    ],
)
def test_the_light_modules_do_not_import_torch(statement):
    """Importing the package, its errors or its command line does not pay for torch."""
    check = f"import sys; {statement}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
