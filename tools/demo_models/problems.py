"""Graded arithmetic word problems with worked steps: training text and an exact test of the demo
target.

Why: a 14M-parameter model cannot do GSM8K, so "did speculation change the answers" would be
measured on noise. These problems are easy enough to be solved and can be checked by a program.
Everything is a pure function of a seed.

The held-out split is decided by a hash of the question, so a training question can never be a test
question, whatever seeds and counts were used. Questions, not numbers, are held out: `7+5=12` occurs
in both splits.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

from tools.demo_models.templates import FAMILIES

GRADES = tuple(FAMILIES)
HELD_OUT_ONE_IN = 20  # share of all questions that training never sees
_ANSWER = re.compile(r"####\s*\$?(-?[\d,]+)")


@dataclass(frozen=True)
class Problem:
    question: str
    solution: str  # worked steps, one a line, the last line is `#### answer`
    answer: int
    grade: int

    @property
    def prompt(self) -> str:
        """The raw text the demo target completes (its tokenizer puts `<s>` in front)."""
        return f"Question: {self.question}\nAnswer:"


def problems(
    seed: int, *, held_out: bool = False, weights: Mapping[int, float] | None = None
) -> Iterator[Problem]:
    """An endless stream of problems of one split; `weights` maps grade to its share (default:
    equal)."""
    rng = Random(f"{seed}/{'held out' if held_out else 'train'}")
    shares = dict.fromkeys(GRADES, 1.0) if weights is None else dict(weights)
    while True:
        grade = rng.choices(list(shares), list(shares.values()))[0]
        problem = write_problem(rng, grade)
        if is_held_out(problem.question) == held_out:
            yield problem


def write_problem(rng: Random, grade: int) -> Problem:
    """One problem of either split."""
    sketch = rng.choice(FAMILIES[grade])(rng)
    solution = "\n".join([*sketch.steps, f"#### {sketch.answer}"])
    return Problem(sketch.question, solution, sketch.answer, grade)


def is_held_out(question: str) -> bool:
    digest = hashlib.sha256(question.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def read_answer(text: str) -> int | None:
    """The number after the first `####`, or None where there is none."""
    match = _ANSWER.search(text)
    digits = match.group(1).replace(",", "") if match else ""
    return int(digits) if digits.lstrip("-") else None


def is_correct(text: str, answer: int) -> bool:
    return read_answer(text) == answer
