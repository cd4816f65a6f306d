"""Attributes of a class read from its source: what `outrider ls` shows of twenty drafters without importing torch for them."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

ClassPath = tuple[str, str]  # module and name of a class
ENDS = ("ABC", "Generic", "Protocol", "object")  # bases without attributes of ours


def facts_in_source(path: str, names: Iterable[str]) -> dict[str, Any] | None:
    """The values of class attributes of "package.module:Class", inherited ones too; None where the source does not tell."""
    module, _, name = path.partition(":")
    found: dict[str, Any] = {}
    try:
        for class_path in reversed(_order(_defined(module, name))):
            found |= _literals(_class(class_path).body)
        return {wanted: found[wanted] for wanted in names}
    except (KeyError, ImportError, OSError, SyntaxError, StopIteration, ValueError):
        return None


def _order(class_path: ClassPath) -> list[ClassPath]:
    """A class and those it inherits from, in the order in which Python looks for attributes."""
    bases = [_defined(class_path[0], name) for base in _class(class_path).bases if (name := _name(base)) not in ENDS]
    lines = [*(_order(base) for base in bases), bases]
    merged = [class_path]
    while lines := [line for line in lines if line]:
        head = next(line[0] for line in lines if not any(line[0] in other[1:] for other in lines))
        merged.append(head)
        lines = [[one for one in line if one != head] for line in lines]
    return merged


def _name(base: ast.expr) -> str:
    """The name that a base class is written as. Raises KeyError for a base that is not written as a name."""
    word = base.value if isinstance(base, ast.Subscript) else base
    if not isinstance(word, ast.Name):
        raise KeyError(ast.unparse(base))
    return word.id


def _defined(module: str, name: str) -> ClassPath:
    """The module that defines what another one calls by a name. Raises KeyError where it is not found."""
    if any(isinstance(node, ast.ClassDef) and node.name == name for node in _tree(module).body):
        return module, name
    return _defined(*_imported(module)[name])


def _class(class_path: ClassPath) -> ast.ClassDef:
    return next(node for node in _tree(class_path[0]).body if isinstance(node, ast.ClassDef) and node.name == class_path[1])


def _literals(body: list[ast.stmt]) -> dict[str, Any]:
    """The attributes of a class body that are given as constants."""
    found: dict[str, Any] = {}
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target if isinstance(node, ast.AnnAssign) else None
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            found[target.id] = value.value
    return found


def _imported(module: str) -> dict[str, tuple[str, str]]:
    """Names that a module imports from others: (module, name there)."""
    nodes = [node for node in _tree(module).body if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {alias.asname or alias.name: (str(node.module), alias.name) for node in nodes for alias in node.names}


@cache
def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ImportError(module)
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
