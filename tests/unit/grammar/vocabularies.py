"""Vocabularies small enough to enumerate, and grammars over them."""

from __future__ import annotations

from dataclasses import dataclass

import llguidance

from outrider.grammar.compiled import Compiled
from outrider.grammar.matcher import Matcher

END = 0


@dataclass(frozen=True)
class Letters:
    """Token 0 ends, the others are given texts."""

    tokens: list[bytes]
    eos_token_id: int = END
    bos_token_id: None = None
    special_token_ids: tuple[int, ...] = (END,)

    def __call__(self, text: str) -> list[int]:
        """Greedy: the longest token first."""
        rest, found = text.encode() if isinstance(text, str) else text, []
        while rest:
            fitting = [token for token in range(1, len(self.tokens)) if rest.startswith(self.tokens[token])]
            found.append(max(fitting, key=lambda token: len(self.tokens[token])))
            rest = rest[len(self.tokens[found[-1]]) :]
        return found


def matcher(pattern: str, *texts: str) -> Matcher:
    """A constraint by a regex over the tokens END and `texts`."""
    words = llguidance.TokenizerWrapper(Letters([b"<end>", *(text.encode() for text in texts)]))
    index = llguidance.LLTokenizer(words, n_vocab=1 + len(texts), eos_token=[END], slices=[])
    compiled = Compiled("pattern", lambda: llguidance.LLMatcher(index, llguidance.grammar_from("regex", pattern), log_level=0))
    return Matcher(compiled, frozenset([END]), 1 + len(texts))
