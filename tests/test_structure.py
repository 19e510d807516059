"""How the package is built: floors import downwards only, and no modules import each other."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import bwdtune

ROOT = Path(bwdtune.__file__).resolve().parent
FLOORS = ("gen", "db", "runtime", "tuner")
MODULES = {
    path.relative_to(ROOT).with_suffix("").parts: path
    for floor in FLOORS
    for path in sorted((ROOT / floor).rglob("*.py"))
}
"""Path of each module, by the parts of its name without `bwdtune`; a package's is that of its `__init__`."""


def imported(module: tuple[str, ...], *, at_import: bool) -> Iterator[tuple[str, ...]]:
    """The package's own modules that a module imports.

    Args:
        module: Its name.
        at_import: Leave out what it imports only for a type checker, or when a function is called.
    """
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in _statements(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            assert not [name for name in names if name.split(".")[0] == "bwdtune"], f"{module}: imports are relative"
        elif isinstance(node, ast.ImportFrom):
            assert node.level or (node.module or "").split(".")[0] != "bwdtune", f"{module}: imports are relative"
            if node.level:
                package = module[: -node.level] + tuple((node.module or "").split(".") if node.module else ())
                for alias in node.names:
                    # What is imported is a module, or a name in one.
                    yield from {_file((*package, alias.name)) or _file(package)} - {None, module}  # type: ignore[misc]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _statements(child)


def _file(name: tuple[str, ...]) -> tuple[str, ...] | None:
    return next((found for found in (name, (*name, "__init__")) if found in MODULES), None)


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_none_above_it(floor: str) -> None:
    above = FLOORS[FLOORS.index(floor) + 1 :]
    upwards = [
        f"{'.'.join(module)} imports {'.'.join(other)}"
        for module in MODULES
        if module[0] == floor
        for other in imported(module, at_import=False)
        if other[0] in above
    ]
    assert not upwards


def test_no_modules_import_each_other() -> None:
    graph = {module: set(imported(module, at_import=True)) for module in MODULES}
    assert ("gen", "problem") in graph["gen", "space"], "the test looks at the right place"
    graphlib.TopologicalSorter(graph).prepare()  # raises a CycleError that names them
