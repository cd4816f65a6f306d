"""One total that grows and shrinks: n changes make n steps, so the family serves grades 1 to 4."""

from dataclasses import dataclass
from random import Random

from tools.demo_models.templates.sketch import Sketch
from tools.demo_models.wording import THINGS, people


@dataclass(frozen=True)
class Range:
    """Number ranges of one grade: the first amount and every change."""

    first: tuple[int, int]
    change: tuple[int, int]


SMALL = Range((3, 20), (2, 20))
MEDIUM = Range((5, 40), (2, 30))
LARGE = Range((20, 200), (10, 150))

GAINS = (
    "{who} finds {n} more {things}.",
    "{who} buys {n} more {things}.",
    "{friend} gives {who} {n} more {things}.",
    "Then {he} gets {n} {things} as a present.",
    "Later {he} collects {n} more {things}.",
)
LOSSES = (
    "{who} gives {n} {things} to {friend}.",
    "{who} loses {n} {things}.",
    "{He} sells {n} of the {things}.",
    "Then {he} gives away {n} {things}.",
    "{friend} takes {n} of the {things}.",
)
STARTS = (
    "{who} has {n} {things}.",
    "{who} starts with {n} {things}.",
    "At first {who} has {n} {things}.",
    "There are {n} {things} in the room of {who}.",
)
HOW_MANY_NOW = (
    "How many {things} does {who} have now?",
    "How many {things} does {he} have in the end?",
    "How many {things} are there now?",
)


def _change(rng: Random, sketch: Sketch, total: int, sizes: Range, words: dict[str, str]) -> int:
    """One gain or loss: appends its sentence to the question and its step; returns the new total."""
    low, high = sizes.change
    loses = total > low + 2 and rng.random() < 0.5
    n = rng.randint(low, min(high, total - 1)) if loses else rng.randint(low, high)
    sentence = rng.choice(LOSSES if loses else GAINS)
    sketch.question += " " + sentence.format(n=n, **words)
    if loses:
        return sketch.step(f"{words['who']} has {{}} {words['things']} left.", f"{total}-{n}")
    return sketch.step(f"{words['who']} has {{}} {words['things']}.", f"{total}+{n}")


def _words(rng: Random) -> dict[str, str]:
    who, friend = people(rng, 2)
    return {
        "who": who.name,
        "he": who.he,
        "He": who.He,
        "friend": friend.name,
        "things": rng.choice(THINGS),
    }


def _running(rng: Random, sizes: Range, num_changes: int) -> Sketch:
    sketch = Sketch()
    words = _words(rng)
    total = rng.randint(*sizes.first)
    sketch.question = rng.choice(STARTS).format(n=total, **words)
    for _ in range(num_changes):
        total = _change(rng, sketch, total, sizes, words)
    sketch.question += " " + rng.choice(HOW_MANY_NOW).format(**words)
    return sketch


def running_one(rng: Random) -> Sketch:
    return _running(rng, SMALL, 1)


def running_two(rng: Random) -> Sketch:
    return _running(rng, SMALL, 2)


def running_three(rng: Random) -> Sketch:
    return _running(rng, MEDIUM, 3)


def running_four(rng: Random) -> Sketch:
    return _running(rng, LARGE, 4)
