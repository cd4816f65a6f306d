"""Families of word problems, by grade: each function writes one question and its worked steps.

A family draws its numbers first, so that every intermediate value is a positive whole number, then
picks one of a few wordings for the question. The wording of the steps is fixed per family: a step
is one short sentence holding one expression such as `12+7=19`, written without spaces because every
digit is a token of its own.

To add a family: write `def name(rng) -> Sketch` in its grade's file and append it to `FAMILIES`.
"""

from tools.demo_models.templates import grade1, grade2, grade3, grade4, grade5, running
from tools.demo_models.templates.sketch import Family, Sketch

FAMILIES: dict[int, tuple[Family, ...]] = {
    1: (
        running.running_one,
        running.running_one,
        grade1.two_groups,
        grade1.compare,
        grade1.difference,
        grade1.still_needed,
        grade1.age_later,
        grade1.two_prices,
        grade1.money_left,
    ),
    2: (
        running.running_two,
        running.running_two,
        grade2.compare_total,
        grade2.three_groups,
        grade2.spend_two,
        grade2.bus,
        grade2.age_two,
        grade2.packs_once,
    ),
    3: (
        running.running_three,
        grade3.packs_and_gift,
        grade3.shop_change,
        grade3.times_as_many,
        grade3.share_out,
        grade3.wages,
        grade3.pages,
    ),
    4: (
        running.running_four,
        grade4.shop_two_kinds,
        grade4.orchard,
        grade4.chain_of_three,
        grade4.two_jobs,
    ),
    5: (grade5.discount, grade5.part_of_a_group, grade5.half_and_third, grade5.team_savings),
}

__all__ = ["FAMILIES", "Family", "Sketch"]
