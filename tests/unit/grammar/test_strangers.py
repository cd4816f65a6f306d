"""Grammars that were written to harm: they are refused, cost no more than the limits say, and hold
nobody else up."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import llguidance
import psutil
import pytest

from outrider.errors import RequestError
from outrider.grammar import Grammars, Spec, choice, json_schema, lark, regex
from outrider.grammar import trial as trials
from outrider.grammar.compiled import Compiled
from outrider.grammar.grammars import ALL_SPELLINGS
from outrider.grammar.matcher import Matcher
from outrider.grammar.vocabulary import index_vocabulary
from tests.helpers import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
A, B = TOKENIZER("ab")["input_ids"]
NUM_RULES = 4000
CHAIN = (
    "start: x0\n"
    + "\n".join(f'x{at}: x{at + 1} "a" | "b"' for at in range(NUM_RULES))
    + f'\nx{NUM_RULES}: "c"'
)
PATTERNS = {
    "allOf": [
        {"type": "string", "pattern": f"[a-z]*{chr(97 + at)}[a-z]{{{20 + at}}}"} for at in range(26)
    ]
}


def of_strangers() -> Grammars:
    return Grammars(TOKENIZER, 257, [EOS], of_strangers=True)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (lark(CHAIN), "grammar cannot be compiled in 2 MiB of stack"),
        (json_schema(PATTERNS), r"schema takes more than 0\.3 s to compile"),
        (regex("a" * 600_000), "regex has 600,000 characters as a grammar; at most 524,288"),
        (choice([f"{number:x}" for number in range(60_000)]), "choice is not usable: .*too big"),
        (
            json_schema({"type": "object", "properties": {"a": {"type": "strin"}}}),
            r"schema\.properties\.a: Invalid type: strin",
        ),
    ],
    ids=["stack", "time", "text", "lexer", "wrong"],
)
def test_a_grammar_that_takes_too_much_is_refused_with_the_limit(
    spec: Spec, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process the first one would end it, and the second one compile for minutes."""
    monkeypatch.setattr(trials, "COMPILE_S", 0.3)
    grammars = of_strangers()
    for _ in range(2):
        with pytest.raises(RequestError, match=match):
            grammars.constraint(spec)
    # in a new process, where the other one ended
    assert grammars.constraint(regex("ab")).allowed([[]])[0, A]


def test_tokens_that_a_grammar_names_are_those_of_the_vocabulary() -> None:
    grammars = of_strangers()
    assert grammars.constraint(lark("start: <[65]> <[66-70]>")).allowed([[]])[
        0
    ].nonzero().tolist() == [[65]]
    with pytest.raises(RequestError, match="unknown special token"):
        grammars.constraint(lark("start: <|nobody|>"))


def test_a_million_letters_take_no_memory() -> None:
    """Two hundred megabytes each where llguidance looks for text that is forced."""
    grammars = of_strangers()
    grammars.constraint(regex("a"))
    before = psutil.Process().memory_info().rss
    for letter in "bcdefghijklm":
        for form in (
            regex(f"({letter}{{1000}}){{1000}}"),
            json_schema({"type": "string", "pattern": f"^{letter}{{1000000}}$"}),
        ):
            grammars.constraint(form).allowed([[]])
    assert psutil.Process().memory_info().rss - before < 50 << 20


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the lexers of rows that are gone, and of texts; the grammar that was used longest ago goes
    first."""
    compiled: list[str] = []
    original = Compiled
    monkeypatch.setattr(
        "outrider.grammar.grammars.Compiled",
        lambda name, make, index: (compiled.append(name), original(name, make, index))[1],
    )
    monkeypatch.setattr("outrider.grammar.grammars.MAX_KEPT", 2)
    grammars = of_strangers()
    for pattern in ("a", "b", "a", "c", "a", "b"):
        grammars.constraint(regex(pattern, name=pattern))
    assert compiled == ["a", "b", "c", "b"]
    assert not grammars.has(regex("c", name="c"))
    grammars._kept[regex("a", name="a")].result().is_spent = True
    assert not grammars.has(regex("a", name="a"))
    grammars.constraint(regex("b", name="b"))
    assert list(grammars._kept) == [regex("b", name="b")]


def test_a_grammar_that_takes_long_holds_no_other_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for the same one waits for it, and gets it, or its error."""
    grammars = of_strangers()
    slow = regex("b+", name="slow")
    begun = threading.Event()
    may_end = threading.Event()
    problem = trials.Trial.problem
    calls: list[str] = []
    asked = threading.Event()
    future_result = Future.result

    def waits_for(future: Any, timeout: float | None = None) -> Any:
        asked.set()
        return future_result(future, timeout)

    def waits(trial: Any, grammar: str, compiled: str, name: str) -> str:
        calls.append(name)
        if name == "slow":
            begun.set()
            assert may_end.wait(30)
            raise RequestError("slow is refused")
        return problem(trial, grammar, compiled, name)

    monkeypatch.setattr(trials.Trial, "problem", waits)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(grammars.constraint, slow)
        assert begun.wait(30)
        assert grammars.constraint(regex("ab")).allowed([[]])[0, A]
        monkeypatch.setattr(Future, "result", waits_for)
        second = pool.submit(grammars.constraint, slow)
        assert asked.wait(30)
        may_end.set()
        for waiting in (first, second):
            with pytest.raises(RequestError, match="slow is refused"):
                waiting.result(30)
    assert calls.count("slow") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds a process's memory")
def test_memory_that_compiling_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "COMPILE_MIB", 16)
    grammars = of_strangers()
    with pytest.raises(RequestError, match="schema takes more than 16 MiB to compile"):
        grammars.constraint(
            json_schema({"enum": [f"value number {number}" for number in range(20_000)]})
        )
    grammars.constraint(json_schema({"enum": ["value number 1"]}))


@pytest.mark.slow
def test_a_process_that_says_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a system that cannot count its time, or where it gets no processor; and no more of them
    run at once than may."""
    running = tmp_path / "running"
    running.mkdir()
    (tmp_path / "silent.py").write_text(
        f"import os, time; open(f'{running}/{{os.getpid()}}', 'w'); time.sleep(60)"
    )
    monkeypatch.setattr(trials, "SCRIPT", tmp_path / "silent.py")
    monkeypatch.setattr(trials, "PATIENCE", 1.0)
    grammars = of_strangers()
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(grammars.constraint, regex("a" * count)) for count in range(1, 7)]
        most = 0
        while not all(future.done() for future in waiting):
            most = max(most, sum(psutil.pid_exists(int(file.name)) for file in running.iterdir()))
            time.sleep(0.02)
    assert 1 <= most <= trials.MAX_PROCESSES
    for future in waiting:
        with pytest.raises(RequestError, match="regex takes more than 2 s to compile"):
            future.result()


def test_a_process_that_ends_by_itself_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(trials, "SCRIPT", tmp_path / "broken.py")
    with pytest.raises(
        RequestError, match="regex cannot be compiled: the process that tried ended with status 3"
    ):
        of_strangers().constraint(regex("a"))


def pattern(drawn: random.Random, depth: int) -> str:
    kind = drawn.random()
    if depth == 0 or kind < 0.3:
        return drawn.choice(["a", "b", "[ab]", "[a-z]", ".", "\\w", "[^a]", "ab"])
    if kind < 0.6:
        return f"({pattern(drawn, depth - 1)}){{{drawn.randint(0, 3)},{drawn.randint(3, 60)}}}"
    if kind < 0.8:
        return f"({pattern(drawn, depth - 1)}|{pattern(drawn, depth - 1)})"
    return pattern(drawn, depth - 1) + drawn.choice(["", "*", "+"]) + pattern(drawn, depth - 1)


def test_what_a_mask_allows_may_be_committed() -> None:
    """Or the row ends with the error that its grammar takes too much. A lexer that is used up
    within a token says no to the token and nothing else; taken for an answer, that was an error of
    the engine's, and a node of a draft was free of the grammar."""
    drawn = random.Random(5)
    index = index_vocabulary(TOKENIZER, 257, [EOS])
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        limits = llguidance.LLParserLimits(
            max_lexer_states=drawn.choice([60, 300, 250_000]),
            step_lexer_fuel=drawn.choice([100, 500, 3000, 200_000]),
        )
        text = f"start: /{pattern(drawn, 4)}/{ALL_SPELLINGS}"
        make = partial(llguidance.LLMatcher, index, text, log_level=0, limits=limits)
        try:
            answer(drawn, Compiled("regex", make))
            outcomes["whole"] += 1
        except RequestError:
            outcomes["too heavy"] += 1
    assert all(outcomes[kind] > 10 for kind in ("whole", "too heavy"))


def answer(drawn: random.Random, compiled: Compiled) -> None:
    """A random text of at most 100 tokens, with masks of random drafts on the way. Raises
    NumericalError for a mask that lied."""
    constraint = Matcher(compiled, frozenset([EOS]), 257)
    for _ in range(100):
        drafts = [
            [drawn.choice([A, B, B + 1]) for _ in range(drawn.randint(1, 5))]
            for _ in range(drawn.choice([0, 4]))
        ]
        allowed = constraint.allowed([[], *drafts])[0].nonzero().flatten().tolist()
        constraint.commit([drawn.choice([token for token in allowed if token != EOS] or allowed)])
        if constraint.is_over:
            return


def test_new_lexers_of_a_row_may_take_so_long_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are built in the engine's thread, where all rows wait."""
    drawn = random.Random(1)
    index = index_vocabulary(TOKENIZER, 257, [EOS])
    limits = llguidance.LLParserLimits(max_lexer_states=200)
    compiled = Compiled(
        "regex",
        lambda: llguidance.LLMatcher(index, "start: /[ab]*a[ab]{12}c/", log_level=0, limits=limits),
    )
    tokens = [drawn.choice([A, B]) for _ in range(150)]

    def read() -> None:
        constraint = Matcher(compiled, frozenset([EOS]), 257)
        for token in tokens:
            assert constraint.allowed([[]])[0, token]
            constraint.commit([token])

    read()
    assert compiled.is_spent
    monkeypatch.setattr("outrider.grammar.matcher.REBUILD_S", 0.0)
    with pytest.raises(RequestError, match=r"regex takes more work .*used up again and again"):
        read()


def test_what_the_parser_refuses_is_not_compiled_again() -> None:
    """A new lexer would not help; building it takes time in the engine's thread."""
    made: list[int] = []
    index = index_vocabulary(TOKENIZER, 257, [EOS])
    text = "start: " + " | ".join(f'"a{number}"' for number in range(2500))

    def make() -> Any:
        made.append(1)
        return llguidance.LLMatcher(index, text, log_level=0)

    constraint = Matcher(Compiled("grammar", make), frozenset([EOS]), 257)
    constraint.allowed([[]])
    with pytest.raises(RequestError, match=r"grammar takes more work .*Current row has"):
        constraint.allowed([[A]])
    assert made == [1]


def test_thousands_of_choices_are_fine() -> None:
    options = [f"number {number}" for number in range(5000)]
    constraint = of_strangers().constraint(choice(options))
    for token in TOKENIZER("number 4999")["input_ids"]:
        assert constraint.allowed([[]])[0, token]
        constraint.commit([token])
    assert constraint.allowed([[]])[0, EOS]
