"""The public names as type checkers and editors see them: a client's program passes, and its
mistakes are found."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import outrider

HERE = Path(__file__).parent
EXAMPLES = HERE.parent.parent / "examples"
PACKAGE = EXAMPLES / "outrider-phrases" / "src"
MISTAKE = re.compile(r"# ([a-z-]+)$")
FOUND = re.compile(r"mistakes\.py:(\d+): error: .*\[([a-z-]+)\]$")
# Outrider's sources are read as those of an installed package, for their types and not for errors;
# transformers takes a minute
CONFIGURATION = """
[mypy]
strict = True
follow_imports = silent
[mypy-transformers.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of mypy for both files and the examples."""
    folder = tmp_path_factory.mktemp("mypy")
    (folder / "mypy.ini").write_text(CONFIGURATION)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        folder / "mypy.ini",
        "--cache-dir",
        folder / "cache",
    ]
    files = [HERE / "client.py", HERE / "mistakes.py", EXAMPLES]
    return subprocess.run(
        [*command, *files],
        cwd=HERE.parent.parent,
        env={**os.environ, "MYPYPATH": str(PACKAGE)},
        capture_output=True,
        text=True,
        check=False,
    ).stdout


@pytest.mark.slow
def test_a_typed_client_passes(report: str) -> None:
    assert "Found" in report, report
    assert not [line for line in report.splitlines() if "client.py" in line]


@pytest.mark.slow
def test_the_examples_pass(report: str) -> None:
    """Whoever copies one begins without errors."""
    assert "Found" in report, report
    assert not [line for line in report.splitlines() if "examples" in line]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_pyright_agrees(tmp_path: Path) -> None:
    """Editors use it."""
    configuration = {
        "include": ["."],
        "typeCheckingMode": "standard",
        "extraPaths": [str(HERE.parent.parent), str(PACKAGE)],
    }
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    shutil.copy(HERE / "client.py", tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(configuration))
    result = subprocess.run(
        ["pyright", "--pythonpath", sys.executable],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_mistakes_are_found(report: str) -> None:
    """Catches public names that are `Any`: then a misspelt option passes, and editors know nothing."""
    lines = (HERE / "mistakes.py").read_text().splitlines()
    expected = {
        (number, found[1])
        for number, line in enumerate(lines, 1)
        if (found := MISTAKE.search(line))
    }
    assert {
        (int(found[1]), found[2]) for found in map(FOUND.search, report.splitlines()) if found
    } == expected


def test_names_that_are_imported_late_are_those_that_are_typed() -> None:
    assert set(outrider.__all__) == {"__version__", *outrider._HOMES}
    for name, home in outrider._HOMES.items():
        assert getattr(outrider, name) is getattr(importlib.import_module(home), name)
    source = Path(outrider.__file__).read_text()
    typed = re.findall(r"^    from (outrider\.\S+) import (.+)$", source, re.MULTILINE)
    assert {name: home for home, names in typed for name in names.split(", ")} == outrider._HOMES


def test_importing_the_package_stays_quick() -> None:
    """Nothing of it is needed before one of its names is."""
    code = "import sys, outrider; print([name for name in ('torch', 'numpy', 'outrider.llm') if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "[]\n"


def described(shown: object) -> list[str]:
    """The names that a docstring has a line about, as `help` shows it; how far `__doc__` is indented
    depends on the version of Python."""
    text = inspect.getdoc(shown)
    assert text is not None
    lines = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)  +\S", text, re.MULTILINE)
    return [name for line in lines for name in line.split(", ")]


@pytest.mark.parametrize("kind", [outrider.LLM, outrider.AsyncLLM])
def test_help_shows_every_option_with_its_meaning(kind: type) -> None:
    assert sorted(described(kind.__init__)) == sorted(inspect.signature(kind).parameters)
    assert "LLM(" in (inspect.getdoc(kind) or ""), "an example"


@pytest.mark.parametrize(
    "kind",
    [
        outrider.SamplingParams,
        outrider.StructuredOutputsParams,
        outrider.Completion,
        outrider.StreamChunk,
        outrider.DecodeStats,
    ],
)
def test_help_shows_every_field_with_its_meaning(kind: Any) -> None:
    assert described(kind) == [field.name for field in dataclasses.fields(kind)]


@pytest.mark.parametrize(
    "method",
    [
        outrider.LLM.generate,
        outrider.LLM.chat,
        outrider.LLM.stream,
        outrider.LLM.chat_prompt,
        outrider.AsyncLLM.generate,
    ],
)
def test_help_of_a_method_shows_every_argument(method: Callable[..., object]) -> None:
    names = set(inspect.signature(method).parameters) - {"self"}
    if method is outrider.LLM.chat:  # it names `chat_prompt`, which has them
        names -= set(described(outrider.LLM.chat_prompt)) - {"messages"}
    assert set(described(method)) == names
