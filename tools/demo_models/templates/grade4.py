"""Four steps, two products or three-digit numbers."""

from random import Random

from tools.demo_models.templates.sketch import Sketch
from tools.demo_models.wording import GOODS, THINGS, TREES, people


def shop_two_kinds(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    (one, two) = rng.sample(GOODS, 2)
    n = rng.randint(2, 12)
    p = rng.randint(2, 12)
    m = rng.randint(2, 12)
    q = rng.randint(2, 12)
    paid = n * p + m * q + rng.randint(1, 99)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} buys {n} {one[1]} for ${p} each and {m} {two[1]} for ${q} each. {x.He} pays with "
                f"${paid}. How much change does {x.he} get?"
            ),
            (
                f"A {one[0]} costs ${p} and a {two[0]} costs ${q}. {x.name} has ${paid} and buys {n} "
                f"{one[1]} and {m} {two[1]}. How much money is left?"
            ),
        )
    )
    a = sketch.step(f"The {one[1]} cost ${{}}.", f"{n}*{p}")
    b = sketch.step(f"The {two[1]} cost ${{}}.", f"{m}*{q}")
    c = sketch.step("The cost is ${}.", f"{a}+{b}")
    sketch.step(f"{x.name} has ${{}} left.", f"{paid}-{c}")
    return sketch


def orchard(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    tree = rng.choice(TREES)
    rows = rng.randint(3, 12)
    per_row = rng.randint(3, 12)
    planted = rng.randint(10, 99)
    cut = rng.randint(2, rows * per_row)
    sold = rng.randint(2, 9)
    sketch.question = (
        f"{x.name} has {rows} rows of {per_row} {tree} trees. {x.He} plants {planted} more trees and "
        f"cuts down {cut}. {sold} trees go to {rng.choice(('a neighbor', 'the school', 'a friend'))}. "
        f"How many trees are left?"
    )
    a = sketch.step(f"{x.name} has {{}} trees.", f"{rows}*{per_row}")
    b = sketch.step("Then there are {} trees.", f"{a}+{planted}")
    c = sketch.step("Then there are {} trees.", f"{b}-{cut}")
    sketch.step("{} trees are left.", f"{c}-{sold}")
    return sketch


def chain_of_three(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y, z) = people(rng, 3)
    things = rng.choice(THINGS)
    a = rng.randint(5, 60)
    b = rng.randint(5, 60)
    k = rng.randint(2, 4)
    factor = "twice" if k == 2 else f"{k} times"
    sketch.question = (
        f"{x.name} has {a} {things}. {y.name} has {b} more {things} than {x.name}. {z.name} has "
        f"{factor} as many {things} as {y.name}. How many {things} do they have together?"
    )
    c = sketch.step(f"{y.name} has {{}} {things}.", f"{a}+{b}")
    d = sketch.step(f"{z.name} has {{}} {things}.", f"{c}*{k}")
    e = sketch.step(f"{x.name} and {y.name} have {{}} {things}.", f"{a}+{c}")
    sketch.step(f"Together they have {{}} {things}.", f"{e}+{d}")
    return sketch


def two_jobs(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    good = rng.choice(GOODS)
    h = rng.randint(2, 12)
    w = rng.randint(3, 12)
    k = rng.randint(2, 12)
    v = rng.randint(3, 12)
    spent = rng.randint(5, h * w + k * v - 1)
    sketch.question = (
        f"{x.name} works {h} hours for ${w} an hour and {k} hours for ${v} an hour. Then {x.he} "
        f"spends ${spent} on {good[1]}. How much money does {x.he} have left?"
    )
    a = sketch.step(f"At first {x.name} earns ${{}}.", f"{h}*{w}")
    b = sketch.step(f"Then {x.name} earns ${{}}.", f"{k}*{v}")
    c = sketch.step(f"{x.name} has ${{}}.", f"{a}+{b}")
    sketch.step(f"{x.name} has ${{}} left.", f"{c}-{spent}")
    return sketch
