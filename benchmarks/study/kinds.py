"""What a worked solution is doing at each token, by rules on its text: no model, nobody's opinion.

The first that fits wins, character by character; a token has the kind of its first visible
character:

    conclusion      the line that says the final answer: from "####", "the (final) answer is", "answer:" or \\boxed on, and
                    everything behind it
    arithmetic      a calculator's note <<48/2=24>> with the result behind it, and any run of numbers joined by = + - * / x × ÷ ^;
                    a number may carry a sign of currency or percent, brackets, and up to three
                    words of unit before the next operator ("16 eggs - 3 eggs = 13")
    restating       sentences that repeat the question: at least half of their pairs of neighbouring words stand in it
    decomposition   all other sentences: what is to be computed next, and why

Pairs of words are taken without case, punctuation and arithmetic; a sentence with fewer than three
repeats nothing. Sentences end at . ! ? before a capital, a digit or $, and at the end of a line. A
sentence of decomposition may have arithmetic in its middle, which is how worked solutions are
written. The rules were made on GSM8K; LaTeX is read as words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

DECOMPOSITION = "decomposition"
ARITHMETIC = "arithmetic"
RESTATING = "restating"
CONCLUSION = "conclusion"
KINDS = (DECOMPOSITION, ARITHMETIC, RESTATING, CONCLUSION)
REPEATED = 0.5  # share of a sentence's pairs of words from which it restates
FEWEST_PAIRS = 3

_NUMBER = r"(?>\d+ \d+/\d+|\d[\d,]*(?:\.\d+)?|\.\d+)"
_OPERAND = rf"[(\[]*-?[$€£]?{_NUMBER}%?[)\]]*"
_UNIT = r"(?:[ -]?[A-Za-z][A-Za-z']*\.?(?:[ /][A-Za-z']+){0,2})?[)\]]*"
_OPERATOR = r"[ \t]?(?:[=+*/×÷^−]|-|(?<=\s)x(?=\s?[\d$(.])|(?<=\d)x(?=\d))[ \t]?"
_NOTE = r"(?>[$€£]?<<[^<>\n]*(?:>>[$€£]?-?[$€£]?[\d,.]*\d%?|>>)?)"
_TERM = rf"(?:{_NOTE}|{_OPERAND})"
_ARITHMETIC = re.compile(rf"{_TERM}(?:{_UNIT}{_OPERATOR}{_TERM})+|{_NOTE}")
_CONCLUSION = re.compile(
    r"####|\\boxed\b|(?:^|(?<=[.!?]\s))[ \t*]*(?:(?:so|thus|therefore|hence),? )?"
    r"(?:the (?:final )?answer is\b|(?:the )?(?:final )?answer ?:)",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE = re.compile(
    r"[^\n]*?(?:(?<!\bMr)(?<!\bMs)(?<!\bDr)(?<!\bSt)(?<!\bMrs)[.!?]\s+(?=[A-Z$\d])|\n|\Z)"
)
_WORD = re.compile(r"[a-z]+(?:['-][a-z]+)*|\d[\d,]*(?:\.\d+)?")


def token_kinds(question: str, pieces: Sequence[str]) -> list[str]:
    """The kind of each token, from the text that each one added (empty: the character comes with a
    later one, or the text ended)."""
    labels = character_kinds(question, "".join(pieces))
    found = []
    for start, piece in zip(accumulate(map(len, pieces), initial=0), pieces, strict=False):
        visible = next((at for at, character in enumerate(piece) if not character.isspace()), 0)
        found.append(labels[min(start + visible, len(labels) - 1)] if labels else DECOMPOSITION)
    return found


def character_kinds(question: str, text: str) -> list[str]:
    """One kind per character of a worked solution."""
    labels = [DECOMPOSITION] * len(text)
    spans = [found.span() for found in _ARITHMETIC.finditer(text)]
    known = set(_pairs(question))
    for start, end in _sentences(text):
        if repetition(_without(text, start, end, spans), known) >= REPEATED:
            labels[start:end] = [RESTATING] * (end - start)
    for start, end in spans:
        labels[start:end] = [ARITHMETIC] * (end - start)
    if (last := _conclusion(text)) is not None:
        labels[last:] = [CONCLUSION] * (len(text) - last)
    return labels


def repetition(sentence: str, known: set[tuple[str, str]]) -> float:
    """Share of a sentence's pairs of neighbouring words that are among `known`; 0 for too few
    pairs."""
    pairs = _pairs(sentence)
    return sum(pair in known for pair in pairs) / len(pairs) if len(pairs) >= FEWEST_PAIRS else 0.0


def _pairs(text: str) -> list[tuple[str, str]]:
    """Inside lines."""
    lines = text.lower().replace("\u2019", "'").split("\n")
    return [pair for line in lines for pair in pairwise(_WORD.findall(line))]


def _sentences(text: str) -> Iterator[tuple[int, int]]:
    """(start, end) of each, with the space behind it."""
    return (found.span() for found in _SENTENCE.finditer(text) if found[0])


def _without(text: str, start: int, end: int, spans: Sequence[tuple[int, int]]) -> str:
    """text[start:end] less the spans; line breaks in their place, over which no words are
    neighbours."""
    kept = []
    at = start
    for first, last in spans:
        if first < end and last > start:
            kept.append(text[at : max(first, at)])
            at = max(at, min(last, end))
    return "\n".join([*kept, text[at:end]])


def _conclusion(text: str) -> int | None:
    """The start of the last line of its kind; None where no answer is given."""
    marks = [found.start() for found in _CONCLUSION.finditer(text)]
    if not marks:
        return None
    line = text.rfind("\n", 0, marks[-1]) + 1
    return next(mark for mark in marks if mark >= line)
