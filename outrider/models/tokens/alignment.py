"""Between two tokenizers: a target's text in a draft model's tokens, and the draft's words back in
the target's tokens.

`TokenizerPair` knows both vocabularies: tokens that say the same in both are *shared* (token-level
intersection, TLI, Timor et al. 2502.05202); everything else goes through text. `DraftContext` is
one row's committed text in draft tokens:

    target tokens   [ settled chunk ][ settled chunk ][ open chunk ......... ][ unfinished character ]
                    translated once, for ever          anew at every change    byte by byte, or not yet

A chunk ends where a special token stands or, from `MIN_CHUNK` tokens on, before a token that begins
a word; text without such points is cut at `MAX_CHUNK`. So a step costs no more in a long text than
in a short one, and the translation is a function of the committed tokens alone: however they came,
step by step or at once, it is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outrider.models.tokens.bytes_text import MAX_UNFINISHED, UNFINISHED
from outrider.models.tokens.token_text import TokenText, end_of_turn

# target tokens
MIN_CHUNK = 32
MAX_CHUNK = 64
BEFORE = 4  # tokens decoded along, so that leading spaces come out right


class TokenizerPair:
    """A target's and a draft's tokenizer. Vocabulary sizes are the models': ids beyond them are not
    shared."""

    def __init__(self, target: Any, draft: Any, target_size: int, draft_size: int) -> None:
        self.target = TokenText(target)
        self.draft = TokenText(draft)
        self.to_target = _shared(self.draft, self.target, draft_size, target_size)
        self.to_draft = {ours: theirs for theirs, ours in self.to_target.items()}
        self._add_role(target.bos_token_id, draft.bos_token_id)
        self._add_role(end_of_turn(target), end_of_turn(draft))
        self._add_role(target.eos_token_id, draft.eos_token_id)
        # share of the draft's vocabulary
        self.coverage = len(self.to_target) / len(self.draft.keys)

    def _add_role(self, ours: int | None, theirs: int | None) -> None:
        """Begin and end of a text are the same thing under any name."""
        if (
            ours is not None
            and theirs is not None
            and ours not in self.to_draft
            and theirs not in self.to_target
        ):
            self.to_draft[ours], self.to_target[theirs] = theirs, ours

    def translate(self, tokens: Sequence[int], before: Sequence[int]) -> list[int]:
        """Draft tokens of target tokens that follow `before`: by their text, or one by one where it
        is broken.

        A special token becomes the draft's own, if it has such a one, else nothing.
        """
        if len(tokens) == 1 and tokens[0] in self.target.specials:
            return [self.to_draft[tokens[0]]] if tokens[0] in self.to_draft else []
        text = self.target.text(tokens, before)
        if UNFINISHED in text and all(token in self.to_draft for token in tokens):
            return [self.to_draft[token] for token in tokens]
        return self.draft.ids(text, continues=bool(before))

    def continuation(
        self, tokens: Sequence[int], context: DraftContext, drafted: Sequence[int]
    ) -> list[int]:
        """Target tokens that follow `tokens` if the draft's tokens `drafted` follow its context;
        perhaps none.

        The text is encoded after as much of the committed text as leaves that text's tokens what
        they are, so that tokens come out as the target would write them; at worst by itself. Broken
        text goes token by token, as far as tokens are shared. The draft's end token becomes the
        target's.
        """
        body, end = self._until_special(drafted)
        # with the bytes of a character that the draft finishes now
        draft_tokens = [*context.tokens[context.whole :], *body]
        before = _last(context.tokens[: context.whole], self.draft.specials)
        whole = len(draft_tokens) - self.draft.num_unfinished(draft_tokens, before)
        text = self.draft.text(draft_tokens[:whole], before)
        rest = draft_tokens[whole:]
        continuation = None if UNFINISHED in text else self._encode_behind(tokens, context, text)
        if continuation is None:
            if not context.is_complete:
                return []
            continuation = []
            rest = body
        mapped = list(_while_known(rest, self.to_target))
        return continuation + mapped + (end if len(mapped) == len(rest) else [])

    def _encode_behind(
        self, tokens: Sequence[int], context: DraftContext, text: str
    ) -> list[int] | None:
        """The tokens that `text` adds after the context's whole characters; None where the tokens
        before would not stay."""
        for begin in context.windows():
            known = self.target.text(tokens[begin : context.covered], context.before(tokens, begin))
            ids = self.target.ids(known + text, continues=begin > context.segment)
            count = len(tokens) - begin
            if ids[:count] == list(tokens[begin:]):
                return ids[count:]
        return None

    def _until_special(self, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        """(tokens of text, the target's token for the special one that ends them or nothing)"""
        at = next(
            (index for index, token in enumerate(drafted) if token in self.draft.specials), None
        )
        if at is None:
            return list(drafted), []
        return list(drafted[:at]), list(_while_known([drafted[at]], self.to_target))


class DraftContext:
    """One row's text in draft tokens. `update` with the row's tokens, which may only grow."""

    def __init__(self, pair: TokenizerPair) -> None:
        self._pair = pair
        self._settled: list[int] = []  # draft tokens of the closed chunks
        self._seen = 0  # target tokens at the last update
        self.tokens: list[int] = []  # what the draft model is fed
        self.prefix = 0  # of these the draft's own beginning of a text
        # of these stand for whole characters; after them, bytes of an unfinished one
        self.whole = 0
        self.covered = 0  # target tokens that make up whole characters
        self.is_complete = True  # whether the draft was fed the rest, too
        # where the text begins in which the open chunk lies: after the last special token
        self.segment = 0
        self.start = 0  # where the open chunk begins

    def update(self, tokens: Sequence[int]) -> None:
        """Bring `tokens` and the rest up to date."""
        if len(tokens) == self._seen:
            return
        if self._seen == 0:
            self._begin(tokens[0])
        self._seen = len(tokens)
        for end in self._cuts(tokens):
            self._settled += self._pair.translate(
                tokens[self.start : end], self.before(tokens, self.start)
            )
            if tokens[self.start] in self._pair.target.specials:
                self.segment = end
            self.start = end
        self._translate_open(tokens)

    def _translate_open(self, tokens: Sequence[int]) -> None:
        pair = self._pair
        opened = tokens[self.start :]
        before = self.before(tokens, self.start)
        whole = len(opened) - pair.target.num_unfinished(opened, before)
        self.tokens = self._settled + (pair.translate(opened[:whole], before) if whole else [])
        self.whole = len(self.tokens)
        self.covered = self.start + whole
        rest = list(_while_known(opened[whole:], pair.to_draft))
        self.is_complete = self.covered + len(rest) == len(tokens)
        if self.is_complete:
            self.tokens += rest

    def before(self, tokens: Sequence[int], index: int) -> Sequence[int]:
        """The tokens of the open chunk's text that stand before `index`, as many as are worth
        decoding along."""
        return tokens[max(self.segment, index - BEFORE) : index]

    def windows(self) -> list[int]:
        """Places from which the end of the text may be encoded again, the farthest first."""
        near = (self.covered - length for length in (8, 4, 2, 1, 0))
        return [
            self.start,
            *(index for index in near if index > self.start or index == self.covered),
        ]

    def _begin(self, first: int) -> None:
        prefix = self._pair.draft.prefix
        if [self._pair.to_draft.get(first)] != prefix:  # else the row brings it along
            self._settled = list(prefix)
            self.prefix = len(prefix)

    def _cuts(self, tokens: Sequence[int]) -> Iterator[int]:
        """Ends of the chunks that are complete. Each is decided by the tokens up to it alone."""
        target = self._pair.target
        start = self.start
        for index in range(start + 1, len(tokens) + 1):
            special = tokens[index - 1] in target.specials
            if special and index - 1 > start:
                yield (start := index - 1)
            if special:
                yield (start := index)
            elif index - start > MAX_CHUNK:
                yield (start := self._whole_cut(tokens, start, index - 1))
            elif index - 1 - start >= MIN_CHUNK and self._begins_word(tokens, index - 1):
                yield (start := index - 1)

    def _begins_word(self, tokens: Sequence[int], index: int) -> bool:
        target = self._pair.target
        return target.begins_word(tokens[index]) and not target.ends_in_space(tokens[index - 1])

    def _whole_cut(self, tokens: Sequence[int], start: int, end: int) -> int:
        """`end`, or the last index shortly before it that splits no character."""
        for index in range(end, end - MAX_UNFINISHED - 1, -1):
            if not self._pair.target.text(tokens[start:index], self.before(tokens, start)).endswith(
                UNFINISHED
            ):
                return index
        return end


def _shared(
    draft: TokenText, target: TokenText, draft_size: int, target_size: int
) -> dict[int, int]:
    """Draft id -> target id for tokens that say the same, one to one: of equals the lowest ids."""
    ours = {
        key: token
        for token, key in sorted(target.keys.items(), reverse=True)
        if token < target_size
    }
    theirs = {
        key: token for token, key in sorted(draft.keys.items(), reverse=True) if token < draft_size
    }
    return {token: ours[key] for key, token in theirs.items() if key in ours}


def _while_known(tokens: Sequence[int], table: dict[int, int]) -> Iterator[int]:
    for token in tokens:
        if token not in table:
            return
        yield table[token]


def _last(tokens: Sequence[int], specials: frozenset[int]) -> Sequence[int]:
    """The last few tokens, none before a special one."""
    few = list(tokens[-BEFORE:])
    at = max((index for index, token in enumerate(few) if token in specials), default=-1)
    return few[at + 1 :]
