"""Vocabularies small enough to enumerate, and grammars over them."""

from __future__ import annotations

from dataclasses import dataclass

import llguidance

from outrider.grammar import Grammars, regex
from outrider.grammar.matcher import Matcher

END = 0


@dataclass(frozen=True)
class Letters:
    """Token 0 ends, the others are given texts."""

    tokens: list[bytes]
    eos_token_id: int = END
    bos_token_id: None = None
    special_token_ids: tuple[int, ...] = (END,)


def grammars_over(*texts: str) -> Grammars:
    """Grammars over the tokens END and `texts`."""
    words = llguidance.TokenizerWrapper(Letters([b"<end>", *(text.encode() for text in texts)]))
    grammars = Grammars(None, 1 + len(texts), [END])
    grammars._index = llguidance.LLTokenizer(
        words, n_vocab=1 + len(texts), eos_token=[END], slices=[]
    )
    return grammars


def matcher(pattern: str, *texts: str) -> Matcher:
    """A constraint by a regex over the tokens END and `texts`."""
    return grammars_over(*texts).constraint(regex(pattern))
