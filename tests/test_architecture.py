"""The building code (docs/architecture.md): imports point down the floors, files stay small,
signatures are written.

Read from the source with `ast`, so nothing has to be importable. Each exception is listed with its
reason.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "outrider"
MAX_LINES_OF_AUTO = 937  # 850 before mixtures of experts had costs of their own
MAX_CONSTANTS_OF_AUTO = 25
FLOORS = {
    "errors": 0, "extras": 0, "registry": 0, "types": 0, "stats": 0, "version": 0, "outputs": 0, "settings": 0, "wellformed": 0,
    "instructions": 0, "cache": 0, "collector": 0, "lazy": 0, "cpus": 0, "huge_pages": 0, "switches": 0, "templates": 0,
    "bounded_templates": 0,
    "foreign": 0,
    "machine": 1, "messages": 1, "prompts": 1,
    "sampling": 1, "stops": 1,
    "kv": 2, "models": 2, "runtime": 2, "draft_length": 2,
    "rows": 2, "step": 2, "text": 2, "thoughts": 2, "trees": 2, "grammar": 2,
    "drafters": 3, "verifiers": 3,
    "decode": 4, "run": 4, "parts": 4, "configuration": 4,
    "options": 4, "prefill": 4, "loader": 5, "engine": 5, "build": 5, "admission": 5, "settings_file": 5,
    "llm_base": 5, "llm": 5, "async_llm": 5,
    "train": 6, "lab": 6, "testing": 6,
    "report": 7, "serve": 7, "demo": 7, "integrations": 7,
    "remote": 8,
    "cli": 9, "__main__": 9,
}  # fmt: skip
STRANGERS = (3, 7)  # floors whose packages do not import one another
UPWARD = {
    (
        "build",
        "demo",
    ): "the name 'demo' becomes a folder here; outrider/demo/__init__.py holds paths and sees that the weights are there",
}
MAX_LINES = 550
MAX_LINES_OF = {"decode.py": 149}

GENERATED = "*_pb2*.py"  # by `make proto`
FILES = sorted(file for file in PACKAGE.rglob("*.py") if not file.match(GENERATED))


def name_of(file: Path) -> str:
    """Its path in the package."""
    return str(file.relative_to(PACKAGE))


def unit_of(file: Path) -> str:
    """The floor plan's name for a file: its package, or itself when it lies at the top."""
    relative = file.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(unit, line) of every import of our own modules below `tree`."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "outrider":
            names = [f"outrider.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "outrider" and len(parts) > 1:
                yield parts[1], node.lineno


def test_every_module_has_a_floor() -> None:
    """Guards against a new package that nobody placed."""
    assert {unit_of(file) for file in FILES} - {"__init__"} <= set(FLOORS)


def test_the_page_of_the_architecture_names_the_floors() -> None:
    """Whoever reads it looks for a module there."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|", page, re.MULTILINE)
    named = {unit: int(floor) for floor, units in rows for unit in re.findall(r"`(\w+)/?`", units)}
    assert named == {unit: floor for unit, floor in FLOORS.items() if unit != "__main__"}


def test_imports_are_absolute() -> None:
    """Relative imports would escape the floor test."""
    relative = [
        f"{f}:{n.lineno}"
        for f in FILES
        for n in ast.walk(parsed(f))
        if isinstance(n, ast.ImportFrom) and n.level
    ]
    assert not relative


def wrong_imports(file: Path) -> Iterator[str]:
    """Imports of a higher floor, and of strangers on the same floor."""
    here = unit_of(file)
    for there, line in imports(parsed(file)):
        if "__init__" in (here, there) or there == here or (here, there) in UPWARD:
            continue
        too_high = FLOORS[there] > FLOORS[here]
        stranger = FLOORS[there] == FLOORS[here] and FLOORS[here] in STRANGERS
        if too_high or stranger:
            yield f"{name_of(file)}:{line} imports {there} (floor {FLOORS[there]}) from floor {FLOORS[here]}"


def test_imports_point_down() -> None:
    """A lower floor that knows a higher one, or strangers of one floor that know each other."""
    assert not [wrong for file in FILES for wrong in wrong_imports(file)]


def test_no_import_cycles() -> None:
    """Within a floor, too, one of two packages must come first."""
    edges: dict[str, set[str]] = {}
    for file in FILES:
        here = unit_of(file)
        edges.setdefault(here, set()).update(
            there for there, _ in imports(parsed(file)) if there != here
        )
    placed: list[str] = []
    while rest := [unit for unit in edges if unit not in placed]:
        free = [unit for unit in rest if not (edges[unit] - set(placed)) & set(rest)]
        assert free, f"these import one another: {sorted(rest)}"
        placed += free


def test_every_exception_is_still_needed() -> None:
    """An exception that nobody uses any more is a hole."""
    used = {(unit_of(file), there) for file in FILES for there, _ in imports(parsed(file))}
    assert set(UPWARD) <= used


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function, however deep."""
    return (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def test_imports_stand_at_the_top() -> None:
    """An import inside a function hides a dependency; in the command line it keeps what takes long
    from `--help`."""
    hidden = [
        f"{name_of(file)}:{line} {there}"
        for file in FILES
        if name_of(file) != "__init__.py" and not name_of(file).startswith("cli/")
        for function in functions_of(parsed(file))
        for there, line in imports(function)
    ]
    assert not hidden


def test_files_are_small_and_introduced() -> None:
    """A file that grew past reading, or that does not say what it is for."""
    wrong = []
    for file in FILES:
        limit = MAX_LINES_OF.get(name_of(file), MAX_LINES)
        num_lines = len(file.read_text(encoding="utf-8").splitlines())
        if num_lines > limit:
            wrong.append(f"{name_of(file)}: {num_lines} lines, at most {limit}")
        if num_lines and not ast.get_docstring(parsed(file)):
            wrong.append(f"{name_of(file)}: no docstring")
    assert not wrong


def test_automatic_draft_lengths_stay_simple() -> None:
    """Every rule and every constant there was once tuned on a machine: a new one must take the
    place of another."""
    folder = PACKAGE / "draft_length"
    automatic = sorted(
        set(folder.glob("*.py"))
        - {folder / name for name in ("__init__.py", "fixed.py", "length.py")}
    )
    names = [
        name
        for file in automatic
        for statement in parsed(file).body
        for name in assigned(statement)
    ]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in automatic)
    assert lines <= MAX_LINES_OF_AUTO
    assert (
        0
        < len([name for name in names if name.isupper() and len(name) > 1])
        <= MAX_CONSTANTS_OF_AUTO
    )


def assigned(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module assigns."""
    targets = (
        statement.targets
        if isinstance(statement, ast.Assign)
        else [getattr(statement, "target", None)]
    )
    for target in targets:
        for node in ast.walk(target) if isinstance(target, ast.AST) else ():
            if isinstance(node, ast.Name):
                yield node.id


def public_functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of a module and methods of its classes that carry a public name."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        ):
            yield node


def is_bare(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether an argument's type or the result's must be guessed."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    named = [a for a in arguments if a.arg not in ("self", "cls") and a.annotation is None]
    return bool(named) or function.returns is None


# annotations mean something else in its language
IN_TRITON = ("runtime/gpu/kernels.py", "runtime/gpu/state_kernels.py")


def test_public_functions_are_annotated() -> None:
    """A signature one has to guess."""
    bare = [
        f"{name_of(file)}:{function.lineno} {function.name}"
        for file in FILES
        if name_of(file) not in IN_TRITON
        for function in public_functions(parsed(file).body)
        if is_bare(function)
    ]
    assert not bare


def test_a_docstring_says_what_comes_back_before_what_is_raised() -> None:
    """A function with a result whose docstring begins with its errors says nothing of what it is
    for."""
    silent = [
        f"{name_of(file)}:{function.lineno} {function.name}"
        for file in FILES
        for function in ast.walk(parsed(file))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and function.returns is not None
        and ast.unparse(function.returns) != "None"
        and (ast.get_docstring(function) or "").startswith("Raises")
    ]
    assert not silent


NEEDS_ITS_NEIGHBOURS = re.compile(
    r"^(See the module|Of|The same|Where|Who|Whose|Whom|Those|That of|Likewise|As)\b"
)
MAX_WORDS = 25
PLAIN_TESTS = (
    "contract", *(f"unit/{name}" for name in ("kv", "remote", "sampling", "serve", "train", "trees", "verifiers"))
)  # fmt: skip
TEST_FILES = sorted(
    file for folder in PLAIN_TESTS for file in (PACKAGE.parent / "tests" / folder).rglob("*.py")
)


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring in a file."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


def test_docstrings_stand_alone() -> None:
    """A first sentence that cannot be read without the name above it, or is too long to be read at
    once."""
    wrong = []
    for file in [*FILES, *TEST_FILES]:
        for line, text in docstrings(file):
            sentence = re.split(r"(?<=[.!?:])\s|\n\n", text, maxsplit=1)[0]
            if NEEDS_ITS_NEIGHBOURS.match(sentence) or len(sentence.split()) > MAX_WORDS:
                wrong.append(f"{file.relative_to(PACKAGE.parent)}:{line} {sentence[:60]}")
    assert not wrong
