"""The problem generator: the worked steps are right, seeds decide, the splits never meet."""

import re
from itertools import islice

import pytest

from outrider.demo import DEMO_PROMPTS
from tools.demo_models.problems import (
    GRADES,
    Problem,
    is_correct,
    is_held_out,
    problems,
    read_answer,
)
from tools.demo_models.templates import FAMILIES, Family

_STEP = re.compile(r"(\d+(?:[-+*/]\d+)+)=(\d+)")


def _sample(grade: int, count: int = 400, *, held_out: bool = False) -> list[Problem]:
    return list(islice(problems(7, held_out=held_out, weights={grade: 1.0}), count))


def _left_to_right(expression: str) -> float:
    """An evaluator that shares nothing with the generator's own."""
    first, *rest = re.findall(r"\d+|[-+*/]", expression)
    value = float(first)
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        value = {
            "+": value + int(number),
            "-": value - int(number),
            "*": value * int(number),
            "/": value / int(number),
        }[operator]
    return value


@pytest.mark.parametrize("grade", GRADES)
def test_every_step_and_the_answer_are_right(grade: int) -> None:
    """Catches a family whose sentence and arithmetic disagree, or whose last step is not the
    answer."""
    for problem in _sample(grade):
        *lines, last = problem.solution.split("\n")
        results = []
        for line in lines:
            (match,) = _STEP.finditer(line)
            assert _left_to_right(match[1]) == int(match[2]), line
            results.append(int(match[2]))
        assert last == f"#### {results[-1]}"
        assert problem.answer == results[-1]


@pytest.mark.parametrize("grade", GRADES)
def test_numbers_of_the_first_step_come_from_the_question(grade: int) -> None:
    """Catches a family that uses a number it never gave the reader ("twice", "half" and 100 %
    apart)."""
    for problem in _sample(grade):
        given = set(re.findall(r"\d+", problem.question)) | {"2", "3", "4", "100"}
        used = re.findall(r"\d+", _STEP.search(problem.solution)[1])  # type: ignore[index]
        assert set(used) <= given, problem


@pytest.mark.parametrize(("grade", "steps"), [(1, {1}), (2, {2}), (3, {3}), (4, {4}), (5, {3, 4})])
def test_grade_is_the_number_of_steps(grade: int, steps: set[int]) -> None:
    for problem in _sample(grade):
        assert problem.grade == grade
        assert len(_STEP.findall(problem.solution)) in steps


def test_same_seed_same_problems() -> None:
    assert list(islice(problems(3), 50)) == list(islice(problems(3), 50))
    assert list(islice(problems(3), 50)) != list(islice(problems(4), 50))


@pytest.mark.slow
def test_splits_are_disjoint_whatever_the_seed() -> None:
    """Catches a split by seed: two seeds of a small grade do repeat questions."""
    train = {
        p.question for seed in range(3) for p in islice(problems(seed, weights={1: 1.0}), 2000)
    }
    held_out = {
        p.question
        for seed in range(3)
        for p in islice(problems(seed, held_out=True, weights={1: 1.0}), 500)
    }
    assert not train & held_out
    assert all(is_held_out(question) for question in held_out)


def test_weights_choose_the_grades() -> None:
    assert {p.grade for p in islice(problems(1, weights={2: 1.0, 4: 1.0}), 100)} == {2, 4}


@pytest.mark.parametrize(
    "family", sorted({f for fs in FAMILIES.values() for f in fs}, key=lambda f: f.__name__)
)
def test_every_family_writes_finished_text(family: Family) -> None:
    """Catches a placeholder left in the text, a doubled space, or a question without a question
    mark."""
    from random import Random

    for seed in range(100):
        sketch = family(Random(seed))
        text = sketch.question + "\n" + "\n".join(sketch.steps)
        assert not re.search(r"[{}]|  ", text), text
        assert sketch.question.endswith("?")
        assert sketch.question[0].isupper()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so 3+4=7\n#### 7", 7),
        ("#### $1,250", 1250),
        ("#### -3", -3),
        ("no answer", None),
        ("#### ,", None),
        ("#### 7\n#### 8", 7),
    ],
)
def test_read_answer(text: str, answer: int | None) -> None:
    assert read_answer(text) == answer


def test_is_correct_reads_only_the_marked_number() -> None:
    assert is_correct("It is 12.\n#### 12</s>", 12)
    assert not is_correct("12", 12)
    assert not is_correct("#### 120", 12)


def test_demo_prompts_are_held_out_questions() -> None:
    """Catches demo prompts the model was trained on."""
    assert len(DEMO_PROMPTS) == 6
    for prompt in DEMO_PROMPTS:
        question = prompt.removeprefix("Question: ").removesuffix("\nAnswer:")
        assert prompt == f"Question: {question}\nAnswer:"
        assert is_held_out(question)
