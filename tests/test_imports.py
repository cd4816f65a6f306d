"""How much of the package comes along with one of its modules: the core can be taken out, and no
module needs one that needs it.

Read from the source with `ast`: a module imports what its top level imports, and the packages that
it lies in.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "*_pb2*.py"  # by `make proto`
# modules of ours that each may import, itself included
CORE = {"drafters.base": 30, "decode": 70, "drafters.lookup.ngram": 45}


def file_of(module: str) -> Path | None:
    """Where a module of ours lies; None for a name that is none."""
    path = ROOT / module.replace(".", "/")
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None
    )


def modules() -> list[str]:
    """All of ours."""
    files = [file for file in (ROOT / "outrider").rglob("*.py") if not file.match(GENERATED)]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return sorted(name.removesuffix(".__init__") for name in names)


def statements(body: list[ast.stmt], *, of_types: bool) -> Iterator[ast.stmt]:
    """The statements that run on import, those in blocks included; with `of_types` those that only
    type checkers read, too."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not of_types:
            yield from statements(node.orelse, of_types=of_types)
            continue
        for block in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, block, None) or [], of_types=of_types)


@cache
def imported(module: str, *, of_types: bool = False) -> frozenset[str]:
    """Our modules that a module names in its imports; its own packages are not among them."""
    file = file_of(module)
    assert file is not None
    names: set[str] = set()
    for node in statements(ast.parse(file.read_text(encoding="utf-8")).body, of_types=of_types):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {name for name in inside if name.startswith("outrider.") and file_of(name)}
            names |= submodules
            if len(submodules) < len(inside):
                names.add(node.module)
    return frozenset(
        name for name in names if name.partition(".")[0] == "outrider" and file_of(name)
    ) - {module}


def closure(module: str) -> set[str]:
    """Our modules that are in memory once a module is imported."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            package = name.rpartition(".")[0]
            waiting += [*imported(name), *([package] if package else [])]
    return found


@pytest.mark.parametrize("module", CORE)
def test_the_core_needs_few_modules(module: str) -> None:
    """It names types of what lies around it, never what makes them."""
    assert len(closure(f"outrider.{module}")) <= CORE[module]


def test_what_is_read_is_what_is_imported() -> None:
    """Of the smallest of them, in a process of its own."""
    code = "import sys, outrider.drafters.base; print(*[name for name in sys.modules if name.partition('.')[0] == 'outrider'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == closure("outrider.drafters.base")


def test_no_module_needs_one_that_needs_it() -> None:
    """For its types neither. Two modules that need each other are one module in two files."""
    waiting = {module: set(imported(module, of_types=True)) for module in modules()}
    while free := [module for module, needed in waiting.items() if not needed & waiting.keys()]:
        for module in free:
            del waiting[module]
    in_circles = {
        module
        for module, needed in waiting.items()
        if any(module in waiting.get(other, ()) for other in needed)
    }
    assert not waiting, f"circles of imports; among them {sorted(in_circles or waiting)[:4]}"
