"""A test is where a reader looks for it: folders of `tests/unit` mirror the code (tests/README.md)."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parent
UNIT = TESTS / "unit"
REPOSITORY = TESTS.parent
PACKAGE = REPOSITORY / "outrider"
FILES = sorted(UNIT.rglob("test_*.py"))


def is_code(place: Path) -> bool:
    """Whether a path relative to `tests/unit` is a folder or a module of the code."""
    return any(
        (root / place).is_dir() or (root / place).with_suffix(".py").is_file()
        for root in (PACKAGE, REPOSITORY)
    )


def test_every_folder_mirrors_a_folder_or_a_module() -> None:
    """Nobody looks for a test of `serve/api` anywhere but in `tests/unit/serve/api`."""
    folders = {file.parent.relative_to(UNIT) for file in FILES}
    assert not [str(folder) for folder in sorted(folders) if not is_code(folder)]


def test_a_test_with_the_name_of_a_module_lies_at_its_path() -> None:
    """`serve/test_logs.py` would hide the test of `serve/observability/logs.py`."""
    misplaced = []
    for file in FILES:
        folder = file.parent.relative_to(UNIT)
        name = file.stem.removeprefix("test_")
        deeper = sorted((PACKAGE / folder).rglob(f"{name}.py"))
        if folder.parts and deeper and not is_code(folder / name):
            misplaced.append(f"{file.relative_to(TESTS)}: {deeper[0].relative_to(REPOSITORY)}")
    assert not misplaced


def test_the_page_names_every_folder_and_every_helper() -> None:
    """A list that lacks one is no help in finding it."""
    page = (TESTS / "README.md").read_text(encoding="utf-8")
    helpers = {file.name for file in TESTS.glob("*.py") if not file.name.startswith("test_")}
    folders = {f"{folder.name}/" for folder in TESTS.iterdir() if any(folder.glob("**/*.py"))}
    assert not [name for name in sorted(helpers | folders) if f"`{name}`" not in page]


def test_no_conftest_patches_the_code_for_every_test() -> None:
    """A test that does not ask for a change would run other code than users do."""
    patching = [
        f"{file.relative_to(TESTS)}: {function.name}"
        for file in sorted(TESTS.rglob("conftest.py"))
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef)
        and any("autouse=True" in ast.unparse(mark) for mark in function.decorator_list)
        and "monkeypatch" in ast.unparse(function).lower()
    ]
    assert not patching
