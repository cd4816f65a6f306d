"""What needs an extra that is not installed says so in one line, before a model is loaded;
everything else works without it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from outrider.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "outrider.llm")
HINT = "pip install '.[{extra}]' in a checkout of Outrider"
PROGRAM = """
import contextlib, io, json, sys
missing, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
from outrider.cli.app import run
ends = []
for command in commands:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()) as output:
        code = run(command.split())
    ends.append([code, output.getvalue(), errors.getvalue()])
print(json.dumps([ends, sorted(sys.modules)]))
"""
LAB = {  # verb -> a command that is complete
    "bench": "bench demo", "tune": "tune demo", "replay": "replay log.jsonl --tokenizer demo", "estimate": "estimate --alpha 0.8",
    "certify": "certify demo", "explain": "explain demo", "report": "report result.json",
    "the table (--limit 0 skips it)": "demo",
}  # fmt: skip


def ends_of(
    missing: tuple[str, ...], *commands: str
) -> tuple[list[tuple[int, str, str]], set[str]]:
    """(Exit code, output, errors) of each command in a process without some packages, and the
    modules that it has then."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([missing, commands])],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    ends, modules = json.loads(done.stdout.splitlines()[-1])
    return [tuple(end) for end in ends], set(modules)


def test_a_verb_of_the_lab_names_the_extra() -> None:
    missing = EXTRAS["lab"]
    ends, modules = ends_of(missing, *LAB.values())
    for what, (code, output, errors) in zip(LAB, ends, strict=True):
        assert (code, output) == (2, "")
        assert errors == f"error: {what} needs {', '.join(missing)}: {HINT.format(extra='lab')}\n"
    assert not modules.intersection(HEAVY)


@pytest.mark.parametrize(
    ("what", "command", "extra", "missing"),
    [
        ("a draft service", "service draft demo", "services", "grpc_health"),
        ("a call to a service", "service health grpc://localhost:1", "services", "grpc"),
        ("training", "train eagle3 --target demo --out runs", "train", "accelerate"),
    ],
)
def test_other_verbs_name_theirs(
    what: str, command: str, extra: str, missing: str, tmp_path: Path
) -> None:
    ((code, _, errors),), modules = ends_of(
        (missing,), command.replace("runs", str(tmp_path / "runs"))
    )
    assert (code, errors) == (2, f"error: {what} needs {missing}: {HINT.format(extra=extra)}\n")
    assert "outrider.llm" not in modules


@pytest.mark.slow
def test_the_rest_works_without() -> None:
    ask = "generate demo 2+2= --max-tokens 4 --runtime eager"
    ends, modules = ends_of(
        EXTRAS["lab"],
        ask,
        "bench --help",
        "ls drafters",
        "doctor",
        "export --help",
        "demo --limit 0 --questions 0",
    )
    assert [code for code, *_ in ends] == [0] * len(ends)
    assert ends[0][1].strip()
    assert not any(name.startswith("scipy.") for name in modules)


@pytest.mark.parametrize(
    ("code", "what", "missing"),
    [
        *(
            (f"import outrider.lab.{name}.run", name, "scipy")
            for name in ("bench", "tune", "replay", "certify")
        ),
        ("import outrider.lab.explain.explain", "explain", "scipy"),
        ("import outrider.lab.estimate.estimate", "estimate", "scipy"),
        ("import outrider.lab.server.measure", "measuring servers", "scipy"),
        (
            "from outrider.lab.compare import compare; compare(None, None)",
            "comparing results",
            "scipy",
        ),
    ],
)
def test_from_python_the_same_is_raised(code: str, what: str, missing: str) -> None:
    """As an ImportError, and as an error of ours."""
    program = f"""
import sys
sys.modules["{missing}"] = None
from outrider.errors import ConfigError
try:
    {code}
except ImportError as error:
    assert isinstance(error, ConfigError), error
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"{what} needs {missing}: {HINT.format(extra='lab')}\n"


def test_extras_bring_what_is_asked_for() -> None:
    """And the base does not."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]

    def named(requirements: list[str]) -> set[str]:
        return {
            re.split(r"[\[<>=~! ]", requirement)[0].lower().replace("_", "-")
            for requirement in requirements
        }

    distributions = packages_distributions()
    for extra, packages in EXTRAS.items():
        needed = named([name for package in packages for name in distributions[package]])
        brought = named(project["optional-dependencies"][extra])
        assert needed <= brought
        assert not needed & named(project["dependencies"])
        if extra == "lab":
            assert needed == brought
