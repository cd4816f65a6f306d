"""Percentages, fractions, and several people."""

from random import Random

from tools.demo_models.templates.sketch import Sketch
from tools.demo_models.wording import GOODS, PLACES, THINGS, people


def discount(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    good = rng.choice(GOODS)
    percent = rng.choice((10, 20, 25, 30, 40, 50))
    price = 20 * rng.randint(1, 10)
    n = rng.randint(2, 5)
    sketch.question = (
        f"A {good[0]} costs ${price}. Today it is {percent}% off. {x.name} buys {n} {good[1]}. "
        f"How much does {x.he} pay?"
    )
    off = sketch.step("The discount is ${}.", f"{price}*{percent}/100")
    now = sketch.step(f"One {good[0]} costs ${{}}.", f"{price}-{off}")
    sketch.step(f"{x.name} pays ${{}}.", f"{now}*{n}")
    return sketch


def part_of_a_group(rng: Random) -> Sketch:
    sketch = Sketch()
    place = rng.choice(PLACES)
    percent = rng.choice((10, 20, 25, 30, 40, 50, 75))
    total = 20 * rng.randint(1, 15)
    part = total * percent // 100
    gone = rng.randint(1, total - part)
    who, rest = rng.choice((("children", "adults"), ("girls", "boys"), ("members", "guests")))
    sketch.question = (
        f"There are {total} people at the {place}. {percent}% of them are {who} and the others are "
        f"{rest}. {gone} {rest} go home. How many {rest} are left?"
    )
    sketch.step(f"There are {{}} {who}.", f"{total}*{percent}/100")
    others = sketch.step(f"There are {{}} {rest}.", f"{total}-{part}")
    sketch.step(f"{{}} {rest} are left.", f"{others}-{gone}")
    return sketch


def half_and_third(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y, z) = people(rng, 3)
    things = rng.choice(THINGS)
    k, name = rng.choice(((2, "half"), (3, "a third"), (4, "a quarter")))
    total = 2 * k * rng.randint(2, 20)
    gone = rng.randint(1, total - total // k - 1)
    found = rng.randint(2, 40)
    sketch.question = (
        f"{x.name} has {total} {things}. {x.He} gives {name} of them to {y.name} and {gone} to "
        f"{z.name}. Then {x.he} finds {found} {things}. How many {things} does {x.he} have now?"
    )
    first = sketch.step(f"{y.name} gets {{}} {things}.", f"{total}/{k}")
    both = sketch.step(f"{x.name} gives away {{}} {things}.", f"{first}+{gone}")
    rest = sketch.step(f"{x.name} has {{}} {things} left.", f"{total}-{both}")
    sketch.step(f"{x.name} has {{}} {things}.", f"{rest}+{found}")
    return sketch


def team_savings(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y, z) = people(rng, 3)
    good = rng.choice(GOODS)
    a = rng.randint(2, 15)
    b = rng.randint(2, 15)
    weeks = rng.randint(2, 10)
    c = rng.randint(5, 60)
    cost = (a + b) * weeks + c + rng.randint(1, 99)
    sketch.question = (
        f"{x.name} saves ${a} a week and {y.name} saves ${b} a week. {z.name} gives them ${c}. They "
        f"want {good[1]} for ${cost}. How much money is missing after {weeks} weeks?"
    )
    d = sketch.step("They save ${} a week.", f"{a}+{b}")
    e = sketch.step("They save ${}.", f"{d}*{weeks}")
    f = sketch.step("They have ${}.", f"{e}+{c}")
    sketch.step("They need ${} more.", f"{cost}-{f}")
    return sketch
