"""Files of .github: they call what exists, and name what needs an account."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
FORM_KEYS = {"name", "description", "labels", "body"}


def commands(workflow: Path) -> list[str]:
    """Every `run` of a workflow."""
    jobs: dict[str, Any] = yaml.safe_load(workflow.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_commands_exist(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = commands(workflow)
    assert lines
    for line in lines:
        if line.startswith("make "):
            assert set(line.split()[1:]) <= targets, line
        for path in re.findall(r"(?<![\w/])(?:\.ci|deploy|tools)/[\w./]+", line):
            assert (ROOT / path).is_file(), path


def test_what_needs_an_account_is_named_at_the_top() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text()
    head = text[: text.index("name: release")]
    used = set(re.findall(r"\b(?:vars|secrets)\.[A-Z_]+", text))
    assert used == set(re.findall(r"\b(?:vars|secrets)\.[A-Z_]+", head))


def test_forms_ask_for_the_doctor() -> None:
    forms = [form for form in FORMS if form.name != "config.yml"]
    assert forms
    for form in forms:
        content = yaml.safe_load(form.read_text())
        assert set(content) == FORM_KEYS
        fields = {field["id"]: field for field in content["body"]}
        assert "`outrider doctor`" in fields["doctor"]["attributes"]["label"]
        assert fields["doctor"]["validations"] == {"required": True}
