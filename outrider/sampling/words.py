"""Bad words as text: which tokens would complete one of them, given the text before, in whatever
tokens it is written.

    spelling = Spelling([b"<s>", b" app", b"les", b" applesauce", ...])     # one per vocabulary: the bytes of every token
    words = BadWords(spelling, ["apples"])                                  # one per request
    words.anywhere                                                          # tokens that hold a word by themselves: never allowed
    words.completing(Tail().then(b" app"))                                  # tokens that complete one after this text: b"les"

A word is matched as bytes, so " app" + "les", " a" + "pples" and single bytes are all found. It
counts where it begins at the beginning of a token or after another kind of letter, and ends at the
end of a token or before another kind: with "ass" banned a model cannot write "ass", " ass" or
"(ass)", but " class" and " assume" as tokens of their own stay other words. Letters without case
(Chinese, Arabic) have no such edges: there a word counts wherever it stands.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

NO_TEXT = b"\xff"  # a byte that no text has
MAX_LETTER = 4  # bytes of a character in UTF-8
MAX_KNOWN = 8192  # answers that a vocabulary remembers


@dataclass(frozen=True)
class Tail:
    """The end of a text, and where its tokens begin: a byte 1 for the first byte of each."""

    text: bytes = b""
    starts: bytes = b""

    def then(self, token: bytes, size: int) -> Tail:
        """This tail with one more token, cut to the last `size` bytes."""
        starts = b"\x01" + bytes(len(token) - 1) if token else b""
        return Tail((self.text + token)[-size:], (self.starts + starts)[-size:])

    def may_begin(self, length: int, first: str) -> bool:
        """Whether a word of which the last `length` bytes are the beginning counts here; `first`:
        its first letter."""
        return bool(self.starts[-length]) or not _same_kind(
            _last_letter(self.text[:-length]), first
        )


class Spelling:
    """The bytes of every token of a vocabulary, in order, to look up by their beginnings."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        """Empty for ids that write nothing."""
        self.tokens = list(tokens)
        self.longest = max(map(len, self.tokens), default=0)
        self._order = sorted(range(len(self.tokens)), key=self.tokens.__getitem__)
        self._sorted = [self.tokens[token] for token in self._order]
        self._all = NO_TEXT.join(self.tokens)
        self._offsets = np.array([0, *accumulate(len(token) + 1 for token in self.tokens)])
        self._known: dict[tuple[str, bytes], list[int]] = {}

    def holding(self, word: bytes) -> list[int]:
        """Tokens that have the word in themselves."""
        return self._recalled(self._holding, word)

    def completing(self, rest: bytes) -> list[int]:
        """Tokens that begin with the rest of a word and do not continue with it."""
        return self._recalled(self._completing, rest)

    def _recalled(self, search: Callable[[bytes], list[int]], text: bytes) -> list[int]:
        """The result of a search, now or earlier: requests of one client name the same words again
        and again."""
        key = (search.__name__, text)
        tokens = self._known.get(key)
        if tokens is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            tokens = self._known[key] = search(text)
        return tokens

    def _holding(self, word: bytes) -> list[int]:
        begin = self._all.find(word)
        if begin < 0:
            return []
        first = _first_letter(word)
        last = _last_letter(word)
        text = re.escape(word)
        alone = re.compile(b"%s(?<!%s%s)(?!%s)" % (text, _like(first), text, _like(last)))
        starts = [place.start() for place in alone.finditer(self._all, begin)]
        tokens = (np.searchsorted(self._offsets, starts, side="right") - 1).tolist()
        return sorted(
            {t for t, at in zip(tokens, starts, strict=True) if self._stands_alone(word, t, at)}
        )

    def _stands_alone(self, word: bytes, token: int, at: int) -> bool:
        place = at - int(self._offsets[token])
        text = self.tokens[token]
        before = _last_letter(text[:place])
        after = _first_letter(text[place + len(word) :])
        return not (
            _same_kind(before, _first_letter(word)) or _same_kind(_last_letter(word), after)
        )

    def _completing(self, rest: bytes) -> list[int]:
        last = _last_letter(rest)
        begin = bisect_left(self._sorted, rest)
        end = bisect_left(self._sorted, rest[:-1] + bytes([rest[-1] + 1]))
        return [
            self._order[place]
            for place in range(begin, end)
            if not _same_kind(last, _first_letter(self._sorted[place][len(rest) :]))
        ]


class BadWords:
    """The words of one request."""

    def __init__(
        self, spelling: Spelling, words: Sequence[str], *, silent: Collection[int] = ()
    ) -> None:
        """`silent`: tokens that the text does not show."""
        self._spelling = spelling
        self._silent = frozenset(silent)
        self.unwritten: list[str] = []  # words that no tokens of this vocabulary spell
        anywhere: set[int] = set()
        # beginning of a word -> (its first letter, tokens that complete it)
        self._behind: dict[bytes, tuple[str, set[int]]] = {}
        for word in words:
            alone, behind = self._completions(word.encode())
            if not alone and not behind:
                self.unwritten.append(word)
            anywhere.update(alone)
            for begin, tokens in behind.items():
                self._behind.setdefault(begin, (word[0], set()))[1].update(tokens)
        self.anywhere = frozenset(anywhere)
        self._lengths = sorted({len(begin) for begin in self._behind})
        self._size = max(self._lengths, default=0) + MAX_LETTER  # of the tail that has to be known

    def after(self, tail: Tail, tokens: Sequence[int]) -> Tail:
        """The tail with these tokens."""
        for token in tokens:
            if token < len(self._spelling.tokens) and token not in self._silent:
                tail = tail.then(self._spelling.tokens[token], self._size)
        return tail

    def completing(self, tail: Tail) -> set[int]:
        """Tokens that would complete a word after this text, alongside those that hold one by
        themselves."""
        tokens: set[int] = set()
        for length in self._lengths:
            if length > len(tail.text):
                break
            entry = self._behind.get(tail.text[-length:])
            if entry is not None and tail.may_begin(length, entry[0]):
                tokens |= entry[1]
        return tokens

    def _completions(self, word: bytes) -> tuple[list[int], dict[bytes, list[int]]]:
        """Tokens that hold the word, and by its beginnings those that complete it."""
        cuts = range(max(1, len(word) - self._spelling.longest), len(word))
        behind = {
            word[:cut]: tokens for cut in cuts if (tokens := self._spelling.completing(word[cut:]))
        }
        return self._spelling.holding(word), behind


def _same_kind(letter: str, other: str) -> bool:
    """Whether two letters side by side are inside one word: both have case, or both are digits."""
    return bool(letter and other) and _kind(letter) == _kind(other) != 0


def _kind(letter: str) -> int:
    if letter.isdecimal():
        return 2
    return int(letter.lower() != letter.upper())


def _like(letter: str) -> bytes:
    """A regex for the ASCII letters of the same kind, to look at few places; nothing matches where
    there are none."""
    return (rb"[^\x00-\xff]", rb"[A-Za-z]", rb"[0-9]")[_kind(letter)]


def _first_letter(text: bytes) -> str:
    return text[:MAX_LETTER].decode(errors="ignore")[:1]


def _last_letter(text: bytes) -> str:
    return text[-MAX_LETTER:].decode(errors="ignore")[-1:]
