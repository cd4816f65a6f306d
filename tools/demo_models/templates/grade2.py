"""Two steps: sums and differences, and a first small product."""

from random import Random

from tools.demo_models.templates.sketch import Sketch
from tools.demo_models.wording import ANIMALS, CONTAINERS, GOODS, PLACES, THINGS, people


def compare_total(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y) = people(rng, 2)
    things = rng.choice(THINGS)
    a = rng.randint(4, 20)
    b = rng.randint(2, 15)
    more = b >= a or rng.random() < 0.6
    word = "more" if more else "fewer"
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has {a} {things}. {y.name} has {b} {word} {things} than {x.name}. How many "
                f"{things} do they have together?"
            ),
            (
                f"{x.name} has {a} {things} and {y.name} has {b} {word}. How many {things} do {x.name} and "
                f"{y.name} have in total?"
            ),
        )
    )
    c = sketch.step(f"{y.name} has {{}} {things}.", f"{a}{'+' if more else '-'}{b}")
    sketch.step(f"Together they have {{}} {things}.", f"{a}+{c}")
    return sketch


def three_groups(rng: Random) -> Sketch:
    sketch = Sketch()
    place = rng.choice(PLACES)
    kinds = rng.sample(ANIMALS, 3)
    a, b, c = (rng.randint(2, 20) for _ in range(3))
    sketch.question = rng.choice(
        (
            (
                f"There are {a} {kinds[0]}, {b} {kinds[1]} and {c} {kinds[2]} at the {place}. How many "
                f"animals are there?"
            ),
            (
                f"{people(rng, 1)[0].name} counts {a} {kinds[0]}, {b} {kinds[1]} and {c} "
                f"{kinds[2]}. "
                f"How many animals is that in total?"
            ),
        )
    )
    d = sketch.step(f"There are {{}} {kinds[0]} and {kinds[1]}.", f"{a}+{b}")
    sketch.step("In total there are {} animals.", f"{d}+{c}")
    return sketch


def spend_two(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    (one, two) = rng.sample(GOODS, 2)
    b = rng.randint(2, 20)
    c = rng.randint(2, 15)
    a = b + c + rng.randint(1, 20)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has ${a}. {x.He} buys a {one[0]} for ${b} and a {two[0]} for ${c}. How much money "
                f"does {x.he} have left?"
            ),
            (
                f"A {one[0]} costs ${b} and a {two[0]} costs ${c}. {x.name} pays for both with ${a}. "
                f"How much change does {x.he} get?"
            ),
        )
    )
    d = sketch.step("The cost is ${}.", f"{b}+{c}")
    sketch.step(f"{x.name} has ${{}} left.", f"{a}-{d}")
    return sketch


def bus(rng: Random) -> Sketch:
    sketch = Sketch()
    a = rng.randint(8, 40)
    off = rng.randint(2, min(20, a - 1))
    on = rng.randint(2, 20)
    vehicle = rng.choice(("bus", "train", "boat"))
    sketch.question = rng.choice(
        (
            (
                f"There are {a} people on a {vehicle}. At the stop {off} people get off and {on} get on. How "
                f"many people are on the {vehicle} now?"
            ),
            (
                f"A {vehicle} carries {a} people. Then {off} people leave and {on} people come in. How many "
                f"people are on the {vehicle}?"
            ),
        )
    )
    b = sketch.step("{} people stay.", f"{a}-{off}")
    sketch.step(f"Now there are {{}} people on the {vehicle}.", f"{b}+{on}")
    return sketch


def age_two(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y) = people(rng, 2)
    a = rng.randint(5, 30)
    b = rng.randint(2, 15)
    c = rng.randint(2, 15)
    older = b >= a - 1 or rng.random() < 0.5
    word = "older" if older else "younger"
    sketch.question = (
        f"{x.name} is {a} years old. {y.name} is {b} years {word} than {x.name}. How old will "
        f"{y.name} be in {c} years?"
    )
    d = sketch.step(f"{y.name} is {{}} years old.", f"{a}{'+' if older else '-'}{b}")
    sketch.step(f"{y.name} will be {{}} years old.", f"{d}+{c}")
    return sketch


def packs_once(rng: Random) -> Sketch:
    """A first, gentle times table: n packs of m, then a few more."""
    sketch = Sketch()
    (x,) = people(rng, 1)
    things = rng.choice(THINGS)
    (one, many) = rng.choice(CONTAINERS)
    n = rng.randint(2, 6)
    m = rng.randint(2, 6)
    more = rng.randint(2, 15)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has {n} {many} with {m} {things} in each {one}. {x.He} gets {more} more {things}. "
                f"How many {things} does {x.he} have?"
            ),
            (
                f"{x.name} fills {n} {many} with {m} {things} each and has {more} {things} left over. How "
                f"many {things} does {x.he} have?"
            ),
        )
    )
    a = sketch.step(f"The {many} hold {{}} {things}.", f"{n}*{m}")
    sketch.step(f"{x.name} has {{}} {things}.", f"{a}+{more}")
    return sketch
