"""One step: add or subtract, results up to about 60."""

from random import Random

from tools.demo_models.templates.sketch import Sketch
from tools.demo_models.wording import COLOURS, CONTAINERS, GOODS, THINGS, people


def two_groups(rng: Random) -> Sketch:
    sketch = Sketch()
    a = rng.randint(2, 20)
    b = rng.randint(2, 20)
    one, two = rng.sample(COLOURS, 2)
    things = rng.choice(THINGS)
    place = rng.choice(CONTAINERS)[0]
    sketch.question = rng.choice(
        (
            (
                f"There are {a} {one} {things} and {b} {two} {things} in a {place}. How many {things} are "
                f"there in total?"
            ),
            (
                f"A {place} holds {a} {one} {things} and {b} {two} {things}. How many {things} does the "
                f"{place} hold?"
            ),
            f"A {place} has {a} {one} and {b} {two} {things}. How many {things} is that in all?",
        )
    )
    sketch.step(f"There are {{}} {things}.", f"{a}+{b}")
    return sketch


def compare(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y) = people(rng, 2)
    things = rng.choice(THINGS)
    a = rng.randint(4, 20)
    b = rng.randint(2, 20)
    more = b >= a or rng.random() < 0.5
    word = "more" if more else "fewer"
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has {a} {things}. {y.name} has {b} {word} {things} than {x.name}. How many "
                f"{things} does {y.name} have?"
            ),
            (
                f"{x.name} has {a} {things}. How many {things} does {y.name} have if {y.he} has {b} {word} "
                f"than {x.name}?"
            ),
        )
    )
    sketch.step(f"{y.name} has {{}} {things}.", f"{a}{'+' if more else '-'}{b}")
    return sketch


def difference(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y) = people(rng, 2)
    things = rng.choice(THINGS)
    b = rng.randint(2, 20)
    a = b + rng.randint(1, 20)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has {a} {things} and {y.name} has {b} {things}. How many more {things} does "
                f"{x.name} have?"
            ),
            (
                f"{x.name} has {a} {things}. {y.name} has {b} {things}. How many more {things} does {x.name} "
                f"have than {y.name}?"
            ),
        )
    )
    sketch.step(f"{x.name} has {{}} more {things}.", f"{a}-{b}")
    return sketch


def still_needed(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    things = rng.choice(THINGS)
    b = rng.randint(2, 20)
    a = b + rng.randint(1, 20)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} needs {a} {things}. {x.He} already has {b}. How many more {things} does {x.he} "
                f"need?"
            ),
            f"{x.name} wants to collect {a} {things} and has {b} so far. How many {things} are missing?",
        )
    )
    sketch.step(f"{x.name} needs {{}} more {things}.", f"{a}-{b}")
    return sketch


def age_later(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    a = rng.randint(5, 40)
    b = rng.randint(2, 20)
    if b < a and rng.random() < 0.5:
        sketch.question = f"{x.name} is {a} years old. How old was {x.he} {b} years ago?"
        sketch.step(f"{x.name} was {{}} years old.", f"{a}-{b}")
    else:
        sketch.question = f"{x.name} is {a} years old. How old will {x.he} be in {b} years?"
        sketch.step(f"{x.name} will be {{}} years old.", f"{a}+{b}")
    return sketch


def two_prices(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    (one, two) = rng.sample(GOODS, 2)
    a = rng.randint(2, 20)
    b = rng.randint(2, 20)
    sketch.question = rng.choice(
        (
            f"A {one[0]} costs ${a} and a {two[0]} costs ${b}. How much do they cost together?",
            f"{x.name} buys a {one[0]} for ${a} and a {two[0]} for ${b}. How much does {x.he} pay?",
        )
    )
    sketch.step("The cost is ${}.", f"{a}+{b}")
    return sketch


def money_left(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    good = rng.choice(GOODS)
    b = rng.randint(2, 20)
    a = b + rng.randint(1, 20)
    sketch.question = rng.choice(
        (
            f"{x.name} has ${a} and buys a {good[0]} for ${b}. How much money does {x.he} have left?",
            f"{x.name} had ${a}. {x.He} spent ${b} on a {good[0]}. How much money is left?",
        )
    )
    sketch.step(f"{x.name} has ${{}} left.", f"{a}-{b}")
    return sketch
