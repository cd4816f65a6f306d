"""Grammars that use up what llguidance allows them: the rows to blame are refused, all others are
served.

A broken matcher of llguidance raises nothing. It counts as stopped and allows the end token alone,
so without the code under test each of these texts would just end early, as if it were complete.
"""

from __future__ import annotations

import random

import llguidance
import pytest
import torch

from outrider.errors import RequestError
from outrider.grammar import Grammars, lark, regex
from outrider.grammar.compiled import Compiled
from outrider.grammar.matcher import Matcher
from outrider.grammar.vocabulary import index_vocabulary
from tests.helpers import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
A, B, C = TOKENIZER("abc")["input_ids"]
HEAVY = regex(r"((a{1,100}){1,100}){1,100}")  # its lexer is full behind about 30 letters
TOO_HEAVY = "regex takes more work than one answer may cost .*too many expressions"
BRANCHING = r"[ab]*a[ab]{12}c"  # a state of the lexer for every set of positions where an "a" stood


def say(constraint: Matcher, count: int) -> None:
    """So many letters, each one allowed, none the last."""
    for _ in range(count):
        assert constraint.allowed([[]])[0, A]
        constraint.commit([A])
        assert not constraint.is_over


def test_a_text_that_is_too_heavy_is_refused_and_says_nothing_more() -> None:
    constraint = Grammars(TOKENIZER, 257, [EOS]).constraint(HEAVY)
    with pytest.raises(RequestError, match=TOO_HEAVY):
        say(constraint, 200)
    for call in (lambda: constraint.allowed([[]]), lambda: constraint.commit([A])):
        with pytest.raises(RequestError, match=TOO_HEAVY):
            call()
    assert not constraint.is_over


def test_neither_neighbours_nor_later_texts_pay_for_it() -> None:
    """Copies of one matcher share a lexer: catches a grammar that is broken for everybody once one
    client used it up."""
    grammars = Grammars(TOKENIZER, 257, [EOS])
    guilty = grammars.constraint(HEAVY)
    neighbour = grammars.constraint(HEAVY)
    say(neighbour, 5)
    with pytest.raises(RequestError, match=TOO_HEAVY):
        say(guilty, 200)
    say(neighbour, 15)
    for _ in range(2):
        say(grammars.constraint(HEAVY), 20)


def test_masks_of_a_row_that_began_anew_are_right() -> None:
    """Draft paths use the lexer up, again and again; what was committed and each path by itself do
    not. Catches a row that comes back without its text, or at another position of it."""
    index = index_vocabulary(TOKENIZER, 257, [EOS])
    text = llguidance.grammar_from("regex", BRANCHING)

    def limited(states: int) -> Matcher:
        limits = llguidance.LLParserLimits(max_lexer_states=states)
        grammar = Compiled(
            "regex", lambda: llguidance.LLMatcher(index, text, log_level=0, limits=limits)
        )
        grammars.append(grammar)
        return Matcher(grammar, frozenset([EOS]), 257)

    grammars: list[Compiled] = []
    small = limited(90)
    large = limited(100_000)
    drawn = random.Random(1)
    for _ in range(3):
        paths = [[drawn.choice([A, B]) for _ in range(drawn.randint(0, 12))] for _ in range(30)] + [
            [A, C],
            [B] * 14,
        ]
        assert torch.equal(small.allowed(paths), large.allowed(paths))
        for constraint in (small, large):
            constraint.commit([B, A, B])
    assert [grammar.is_spent for grammar in grammars] == [True, False]


def test_what_no_row_could_begin_with_is_refused_at_once() -> None:
    """`validate_grammar` says yes to it, so it is the matcher that must be asked. Twice: a broken
    one is not to be remembered."""
    grammars = Grammars(TOKENIZER, 257, [EOS])
    spec = lark("start: A\nA: /(.*a.{200}b.*)/ & /(.*b.{150}c.*)/ & /(.*c.{150}a)/")
    for _ in range(2):
        with pytest.raises(RequestError, match=r"grammar takes more work .*fuel exhausted"):
            grammars.constraint(spec)
