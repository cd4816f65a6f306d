"""Kinds of step on real GSM8K solutions (test split, MIT), by hand, and on anything else."""

from __future__ import annotations

import json
import sys
import time
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

_BENCHMARKS = str(Path(__file__).resolve().parents[4] / "benchmarks")
sys.path.insert(0, _BENCHMARKS)
try:
    from study.kinds import KINDS, character_kinds, repetition, token_kinds
finally:
    sys.path.remove(_BENCHMARKS)

LETTERS = dict(zip("darc", KINDS, strict=True))
HOUSE = (
    "Josh decides to try flipping a house.  He buys a house for $80,000 and then puts in $50,000 in repairs.  This increased the "
    "value of the house by 150%.  How much profit did he make?"
)
ROLLS = (
    "Mrs. Sherman made a dozen bread rolls for breakfast. After feeding her 6 children with one each, she broke each of the "
    "remaining rolls into 8 pieces and fed them to the chickens. How many pieces of rolls did she feed to the chickens?"
)
SOLUTIONS = [
    (
        "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins for her friends every "
        "day with four. She sells the remainder at the farmers' market daily for $2 per fresh duck egg. How much in dollars does "
        "she make every day at the farmers' market?",
        "d:Janet sells |a:16 - 3 - 4 = <<16-3-4=9>>9|d: duck eggs a day.\n|r:She makes |a:9 * 2 = $<<9*2=18>>18|"
        "r: every day at the farmer’s market.\n|c:#### 18",
    ),
    (
        HOUSE,
        "d:The cost of the house and repairs came out to |a:80,000+50,000=$<<80000+50000=130000>>130,000|d:\n|"
        "r:He increased the value of the house by |a:80,000*1.5=<<80000*1.5=120000>>120,000|r:\n|"
        "d:So the new value of the house is |a:120,000+80,000=$<<120000+80000=200000>>200,000|d:\nSo he made a profit of |"
        "a:200,000-130,000=$<<200000-130000=70000>>70,000|d:\n|c:#### 70000",
    ),
    (
        "Each class in a school has 20 students. There are 3 classes. The school as a whole is 50% boys and 50% girls. The first "
        "class has 15 girls. The second class has 12 girls. How many boys are in the third class?",
        "d:The school has 60 students because |a:3 x 20 = <<3*20=60>>60|d:\nThe school has 30 girls because |"
        "a:60 x .5 = <<60*.5=30>>30|d:\n|r:The third class has 3 girls because |a:30 - 15 - 12 = <<30-15-12=3>>3|r:\n"
        "The third class has 17 boys because |a:20 - 3 = <<20-3=17>>17|r:\n|c:#### 17",
    ),
    (
        "Steve and Tim decide to see who can get home from school the fastest. Steve lives further away than Tim, so he is "
        "allowed to ride his bike. Steve lives 3 miles from the school and can bike at 440 feet per minute.",
        "d:Steve has to travel |a:3 miles * (5280 feet/1 mile) = <<3*5280=15840>>15840|d: feet to get home.\n"
        "It will take Steve |a:15840 feet / (440 feet/minute) = <<15840/(440)=36>>36|d: minutes to get home.\n|c:#### 36",
    ),
    (
        ROLLS,
        "d:After feeding her children, Mrs. Sherman was left with |a:12 - 6 = <<12-6=6>>6|d: rolls\n|"
        "r:She fed |a:6 x 8 = <<6*8=48>>48|r: pieces of rolls to the chickens.\n|c:#### 48",
    ),
    (
        "Together Lily, David, and Bodhi collected 43 insects. Lily found 7 more than David. How many insects did Lily find?",
        "d:Let B = the number of insects Bodhi collected\nDavid = B/2\nB = |a:<<18=18>>18|d: insects\nLily = |"
        "a:9 + 7 = <<9+7=16>>16|d: insects\nTherefore the last one is |a:1/2 + 1 1/2 + 2 = 4|d: in all.\n|c:#### 16",
    ),
]  # fmt: skip


def parsed(marked: str) -> list[tuple[str, str]]:
    """'d:text|a:text' -> (kind, text) pairs."""
    return [(LETTERS[part[0]], part[2:]) for part in marked.split("|")]


def segments(question: str, text: str) -> list[tuple[str, str]]:
    kinds = character_kinds(question, text)
    assert len(kinds) == len(text)
    letters = groupby(zip(kinds, text, strict=True), key=lambda pair: pair[0])
    return [(kind, "".join(letter for _, letter in group)) for kind, group in letters]


@pytest.mark.parametrize(("question", "marked"), SOLUTIONS, ids=range(len(SOLUTIONS)))
def test_real_solutions(question: str, marked: str) -> None:
    wanted = parsed(marked)
    assert segments(question, "".join(text for _, text in wanted)) == wanted


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("She has 3 cats and 4 dogs.", "d"),  # numbers alone are no arithmetic
        ("A two-thirds share, self-made.", "d"),
        ("It is well-known in 2020-21.", "dad"),  # a rule's price: a minus joins any two numbers
        ("$5 x 3 = $15", "a"),
        ("5x3=15", "a"),
        ("The tax x 3", "d"),
        ("50% * 80 = 40", "a"),
        ("(3 + 4) * 2 = 14", "a"),
        ("<<48/2=24>>24", "a"),
        ("<<48/2=", "a"),  # cut off
        ("He spends 20 dollars - 5 dollars = 15 dollars.", "dad"),
        ("Then stop.\nThe answer is 5.", "dc"),
        ("So, the final answer is 5.", "c"),
        ("Answer: 12 / 3", "c"),
        ("Therefore $x=\\boxed{2}$.", "dc"),
        ("#### 5\n#### 6 and more", "dc"),  # the last line of its kind, and what is behind it
    ],
)
def test_small_rules(text: str, kinds: str) -> None:
    wanted = [LETTERS[letter] for letter in kinds]
    assert [kind for kind, _ in segments("What is it?", text)] == wanted


def test_the_last_conclusion_counts() -> None:
    found = segments("What is it?", "#### 5 is wrong\nIt is 2 + 2 = 4\n#### 4")
    assert found[-1] == (LETTERS["c"], "#### 4")
    assert (LETTERS["a"], "2 + 2 = 4") in found


def test_restating_needs_half_of_the_pairs() -> None:
    known = {("the", "first"), ("first", "class"), ("class", "has")}
    assert repetition("The first class has girls.", known) == 3 / 4
    assert repetition("The first class", known) == 0.0  # too few pairs
    assert repetition("All other words here", known) == 0.0
    question = "The first class has a teacher."
    assert segments(question, "The first class has boys")[0][0] == LETTERS["r"]
    assert segments(question, "The first class gets many boys")[0][0] == LETTERS["d"]  # 2 of 5


def test_arithmetic_joins_no_words() -> None:
    """ "buys eggs" would be a pair of the question if the sum between them vanished."""
    assert segments("He buys eggs.", "He buys 2 + 2 = 4 eggs, too")[0][0] == LETTERS["d"]
    assert segments("He buys eggs.", "He buys eggs, too")[0][0] == LETTERS["r"]


def test_tokens_take_the_kind_of_their_first_visible_character() -> None:
    pieces = ["It", " is", " 2", "+", "2", "=", "4", ".\n", "####", " 4", ""]
    assert token_kinds("", pieces) == [LETTERS[letter] for letter in "ddaaaaadccc"]
    assert token_kinds("", []) == []
    assert token_kinds("", ["", ""]) == [LETTERS["d"]] * 2


@given(st.text("ab .?\n12+-*/=x$<>#()", max_size=80), st.integers(1, 5))
def test_any_cut_into_tokens_agrees_with_the_characters(text: str, size: int) -> None:
    """Kinds belong to characters: however a tokenizer cuts, a token that begins visibly has its
    first character's kind."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    by_character = character_kinds("", text)
    for number, (piece, kind) in enumerate(zip(pieces, token_kinds("", pieces), strict=True)):
        visible = len(piece) - len(piece.lstrip())
        assert kind == by_character[number * size + (visible if piece.strip() else 0)]


@pytest.mark.parametrize(
    "text",
    ["2" * 3000, "((((" * 300, "2 apples of x " * 300, "<<" * 800, "2 * " * 800, "1 1/2 " * 500],
)
def test_runaway_text_takes_no_time(text: str) -> None:
    """Models do loop; a pattern that backtracks over all of it would take minutes."""
    began = time.perf_counter()
    assert len(character_kinds("q " * 500, text)) == len(text)
    assert time.perf_counter() - began < 5


def test_all_of_gsm8k(shared: Path) -> None:
    """Every solution ends in its conclusion, every calculator's note is arithmetic, and no kind
    swallows the others."""
    count = dict.fromkeys(KINDS, 0)
    for line in (shared / "data" / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        text = entry["answer"]
        kinds = character_kinds(entry["question"], text)
        for kind in kinds:
            count[kind] += 1
        last = text.rindex("####")
        assert set(kinds[last:]) == {LETTERS["c"]}
        assert LETTERS["c"] not in kinds[:last]
        at = text.find("<<")
        while at >= 0:
            assert set(kinds[at : text.index(">>", at) + 2]) == {LETTERS["a"]}, text[at:]
            at = text.find("<<", at + 2)
    total = sum(count.values())
    assert 0.4 < count[LETTERS["d"]] / total < 0.6
    assert 0.25 < count[LETTERS["a"]] / total < 0.35
    assert 0.1 < count[LETTERS["r"]] / total < 0.25
