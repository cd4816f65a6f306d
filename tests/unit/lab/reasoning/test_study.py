"""What a study refuses before any model runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.build import Options
from outrider.errors import ConfigError
from outrider.lab.reasoning.study import StudyPlan, run_study
from outrider.lab.workload.types import Request, Workload
from tests.unit.lab.explain.pairs import save_pair

PLAN = StudyPlan(problems=3, max_tokens=24, longest=4)


def problems(task: str) -> Workload:
    return Workload("words", (Request("q", prompt="How many?", task=task),))


def test_a_study_needs_a_draft_and_problems(tmp_path: Path) -> None:
    target, draft = save_pair(tmp_path)
    options = Options(target, draft=draft, dtype="float32", runtime="eager", threads=1)
    with pytest.raises(ConfigError, match="give --draft"):
        run_study(replace(options, draft=None), PLAN, problems("reasoning"), tmp_path / "j")
    with pytest.raises(ConfigError, match="no reasoning problems, only chat"):
        run_study(options, PLAN, problems("chat"), tmp_path / "j")
    assert not (tmp_path / "j").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"problems": 0}, {"max_tokens": 0}, {"rounds": 0}, {"longest": 1}, {"lengths": (5,)}, {"lengths": (0,)},
        {"temperatures": ()}, {"temperatures": (0.0, 0.0)}, {"temperatures": (0.0, 1e-9)},
        {"temperatures": (-1.0,)}, {"budget_s": 0.0},
        {"max_other_cpu": 0.0},
    ],
)  # fmt: skip
def test_plans_that_make_no_sense(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(PLAN, **wrong)  # type: ignore[arg-type]
