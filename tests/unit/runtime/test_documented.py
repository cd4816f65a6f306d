"""docs/models.md names the families that the native runtime runs, and those that it does not."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.runtime.families import FAMILIES, NOT_LOWERED

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_names_the_families_that_the_tests_lower() -> None:
    section = PAGE.read_text().split("\n## Families\n")[1].split("\n## ")[0]
    lowered, others = section.split("What is served but not lowered")
    assert set(re.findall(r"`(\w+)`", lowered)) - {"model_type"} == set(FAMILIES)
    assert set(re.findall(r"`(\w+)`", others)) - {"dynamic", "longrope"} == set(NOT_LOWERED)
