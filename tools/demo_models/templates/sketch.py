"""A problem being written: the question's text, and steps whose arithmetic is computed here, never
typed."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random

_APPLY: dict[str, Callable[[Fraction, int], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


@dataclass
class Sketch:
    """Question text, worked steps, and the value of the last step."""

    question: str = ""
    steps: list[str] = field(default_factory=list)
    answer: int = 0

    def step(self, template: str, expression: str) -> int:
        """Append `template` with `{}` filled by `expression=value`; return the value, a whole
        number."""
        self.answer = whole_value(expression)
        self.steps.append(template.format(f"{expression}={self.answer}"))
        return self.answer


def whole_value(expression: str) -> int:
    """`12+7` or `80*25/100`, from left to right; a family must draw its numbers so that no result
    is broken.
    """
    first, *rest = re.findall(r"\d+|[-+*/]", expression)
    value = Fraction(first)
    for operator, number in zip(rest[::2], rest[1::2], strict=True):
        value = _APPLY[operator](value, int(number))
    assert value.denominator == 1, expression
    assert value >= 0, expression
    return int(value)


Family = Callable[[Random], Sketch]
