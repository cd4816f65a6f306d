"""Three steps with the times tables up to 9 x 12."""

from random import Random

from tools.demo_models.templates.sketch import Sketch
from tools.demo_models.wording import CONTAINERS, GOODS, THINGS, people


def packs_and_gift(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y) = people(rng, 2)
    things = rng.choice(THINGS)
    one, many = rng.choice(CONTAINERS)
    n = rng.randint(2, 9)
    m = rng.randint(2, 9)
    more = rng.randint(2, 20)
    gone = rng.randint(2, n * m + more - 1)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has {n} {many} with {m} {things} in each {one}. {x.He} finds {more} more {things} "
                f"and gives {gone} {things} to {y.name}. How many {things} does {x.he} have left?"
            ),
            (
                f"There are {m} {things} in each {one}. {x.name} buys {n} {many} and gets {more} more "
                f"{things} from {y.name}. Then {x.he} uses {gone} {things}. How many {things} are left?"
            ),
        )
    )
    a = sketch.step(f"The {many} hold {{}} {things}.", f"{n}*{m}")
    b = sketch.step(f"{x.name} has {{}} {things}.", f"{a}+{more}")
    sketch.step(f"{x.name} has {{}} {things} left.", f"{b}-{gone}")
    return sketch


def shop_change(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    (one, two) = rng.sample(GOODS, 2)
    n = rng.randint(2, 9)
    price = rng.randint(2, 9)
    extra = rng.randint(2, 20)
    paid = n * price + extra + rng.randint(1, 20)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} buys {n} {one[1]} for ${price} each and a {two[0]} for ${extra}. {x.He} pays with "
                f"${paid}. How much change does {x.he} get?"
            ),
            (
                f"A {one[0]} costs ${price} and a {two[0]} costs ${extra}. {x.name} has ${paid} and buys {n} "
                f"{one[1]} and one {two[0]}. How much money is left?"
            ),
        )
    )
    a = sketch.step(f"The {one[1]} cost ${{}}.", f"{n}*{price}")
    b = sketch.step("The cost is ${}.", f"{a}+{extra}")
    sketch.step(f"{x.name} has ${{}} left.", f"{paid}-{b}")
    return sketch


def times_as_many(rng: Random) -> Sketch:
    sketch = Sketch()
    (x, y) = people(rng, 2)
    things = rng.choice(THINGS)
    a = rng.randint(2, 10)
    k = rng.randint(2, 6)
    c = rng.randint(2, 20)
    factor = "twice" if k == 2 else f"{k} times"
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has {a} {things}. {y.name} has {factor} as many {things} as {x.name}. They find "
                f"{c} more {things}. How many {things} do they have together?"
            ),
            (
                f"{y.name} has {factor} as many {things} as {x.name}. {x.name} has {a} {things}. Then they "
                f"get {c} more. How many {things} do they have in total?"
            ),
        )
    )
    b = sketch.step(f"{y.name} has {{}} {things}.", f"{a}*{k}")
    d = sketch.step(f"Together they have {{}} {things}.", f"{a}+{b}")
    sketch.step(f"In total they have {{}} {things}.", f"{d}+{c}")
    return sketch


def share_out(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    things = rng.choice(THINGS)
    (one, many) = rng.choice(CONTAINERS)
    k = rng.randint(2, 9)
    each = rng.randint(2, 9)
    gone = rng.randint(2, 15)
    total = k * each + gone
    a = rng.randint(1, total - 1)
    b = total - a
    sketch.question = rng.choice(
        (
            (
                f"{x.name} has {a} {things} and gets {b} more. {x.He} gives away {gone} {things} and puts "
                f"the rest into {k} {many} equally. How many {things} are in each {one}?"
            ),
            (
                f"{x.name} picks {a} {things} in the morning and {b} in the evening. {gone} {things} are "
                f"bad. The others go into {k} equal {many}. How many {things} does each {one} hold?"
            ),
        )
    )
    first = sketch.step(f"{x.name} has {{}} {things}.", f"{a}+{b}")
    rest = sketch.step(f"{x.name} has {{}} {things} left.", f"{first}-{gone}")
    sketch.step(f"Each {one} holds {{}} {things}.", f"{rest}/{k}")
    return sketch


def wages(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    good = rng.choice(GOODS)
    hours = rng.randint(2, 9)
    wage = rng.randint(2, 12)
    saved = rng.randint(2, 20)
    spent = rng.randint(2, hours * wage + saved - 1)
    sketch.question = rng.choice(
        (
            (
                f"{x.name} earns ${wage} an hour and works {hours} hours. {x.He} already has ${saved}. Then "
                f"{x.he} spends ${spent} on {good[1]}. How much money does {x.he} have left?"
            ),
            (
                f"{x.name} has ${saved}. {x.He} works {hours} hours for ${wage} an hour and buys {good[1]} "
                f"for ${spent}. How much money is left?"
            ),
        )
    )
    a = sketch.step(f"{x.name} earns ${{}}.", f"{hours}*{wage}")
    b = sketch.step(f"{x.name} has ${{}}.", f"{a}+{saved}")
    sketch.step(f"{x.name} has ${{}} left.", f"{b}-{spent}")
    return sketch


def pages(rng: Random) -> Sketch:
    sketch = Sketch()
    (x,) = people(rng, 1)
    days = rng.randint(2, 9)
    per_day = rng.randint(2, 12)
    more = rng.randint(2, 20)
    book = days * per_day + more + rng.randint(1, 30)
    sketch.question = (
        f"{x.name} reads {per_day} pages a day for {days} days and then {more} pages more. The book "
        f"has {book} pages. How many pages are left?"
    )
    a = sketch.step(f"{x.name} reads {{}} pages.", f"{days}*{per_day}")
    b = sketch.step("That makes {} pages.", f"{a}+{more}")
    sketch.step("{} pages are left.", f"{book}-{b}")
    return sketch
