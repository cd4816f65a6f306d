"""The embedded prompts: references that are right, and problems the demo pair has never seen."""

from __future__ import annotations

import ast
import json
import operator
import re
from fractions import Fraction
from itertools import islice
from typing import Any

import pytest

from outrider.demo.training import training_prompts
from outrider.errors import ConfigError
from outrider.lab.workload.builtin import EMBEDDED, KINDS
from outrider.lab.workload.load import load_workload
from tools.demo_models.problems import is_held_out, problems
from tools.demo_models.workload import NUM_PROBLEMS, TRAINING_SEED, workload_lines

OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
EQUATION = re.compile(r"(\d[\d.+*/-]*)=(\d+(?:\.\d+)?)")


def rows(kind: str) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (EMBEDDED / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def value(expression: str) -> Fraction:
    def of(node: ast.expr) -> Fraction:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](of(node.left), of(node.right))
        assert isinstance(node, ast.Constant)
        return Fraction(str(node.value))

    return of(ast.parse(expression, mode="eval").body)


@pytest.mark.parametrize("kind", ["reasoning", "demo"])
def test_every_step_of_every_solution_is_right(kind: str) -> None:
    """A wrong reference would count right answers as wrong."""
    for row in rows(kind):
        steps = EQUATION.findall(row["solution"])
        assert len(steps) >= row["solution"].count("=")
        assert all(value(left) == Fraction(right) for left, right in steps), row["id"]
        assert Fraction(steps[-1][1]) == Fraction(row["reference"])


@pytest.mark.parametrize("kind", ["reasoning", "demo"])
def test_solutions_are_graded_right(kind: str) -> None:
    solutions = {row["id"]: row["solution"] for row in rows(kind)}
    name = "demo" if kind == "demo" else f"embedded:{kind}"
    for request in load_workload(name).requests:
        assert request.task == "reasoning"
        assert (request.prompt or "").startswith("Question: ")
        assert (request.prompt or "").endswith("\nAnswer:")
        assert request.is_right(solutions[request.id]) is True
        assert request.is_right(f"{solutions[request.id]}0") is False


@pytest.mark.parametrize("kind", KINDS)
def test_a_dozen_of_each_kind_of_its_task(kind: str) -> None:
    requests = load_workload(f"embedded:{kind}").requests
    assert len(requests) == 12
    assert {request.task for request in requests} == {"reasoning" if kind == "math" else kind}
    assert len({request.prompt or str(request.messages) for request in requests}) == 12
    assert all(request.reference for request in requests) == (
        kind in ("reasoning", "math", "qa", "rag")
    )


def test_answers_of_rag_stand_in_the_passages() -> None:
    for row in rows("rag"):
        assert (
            row["reference"].lower()
            in row["messages"][0]["content"].partition("Question:")[0].lower()
            or row["id"] == "rag-4"
        )
    assert "four months" in rows("rag")[3]["messages"][0]["content"]


def test_code_prompts_are_python_up_to_their_end() -> None:
    for row in rows("code"):
        body = "        pass\n" if "__init__" in row["prompt"] else "    pass\n"
        compile(row["prompt"] + body, row["id"], "exec")


def test_demo_is_what_the_generator_writes_and_what_outrider_demo_asks() -> None:
    """`python -m tools.demo_models.workload outrider/lab/workload/embedded/demo.jsonl` writes the
    file anew."""
    assert (EMBEDDED / "demo.jsonl").read_text(encoding="utf-8").splitlines() == workload_lines()
    chosen = load_workload("demo").requests
    assert len(chosen) == NUM_PROBLEMS
    assert [row["prompt"] for row in rows("demo")] == [problem.prompt for problem in chosen]
    assert all(is_held_out(question_of(problem.prompt or "")) for problem in chosen)


def test_training_problems_are_what_the_generator_writes() -> None:
    """`python -m tools.demo_models.workload --packed 6000 outrider/demo/training.txt.xz` writes the
    file anew."""
    known = training_prompts(6000)
    assert known == [one.prompt for one in islice(problems(TRAINING_SEED), 6000)]
    assert not any(is_held_out(question_of(prompt)) for prompt in known)
    with pytest.raises(
        ConfigError, match="demo:6001 asks for more than the 6000 problems that come with outrider"
    ):
        training_prompts(6001)


def question_of(prompt: str) -> str:
    return prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
