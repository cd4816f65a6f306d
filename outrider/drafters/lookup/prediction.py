"""Predicted output: the caller knows most of the answer, and the drafter copies from it.

A file with one name changed, a letter with a new date, a form filled in: `Row.prediction` holds the
tokens that the answer is expected to have (OpenAI's "predicted outputs"), and the draft is what
stands there next. Without a prediction, after its end, and while the answer differs from it,
nothing is drafted.

Where the answer departs from the prediction, the text's last tokens are looked for in it:

    ahead of the position where the two were last surely together, the longest agreement first, of
    equal ones the nearest; a single token counts within a short distance only, for commas and
    spaces are everywhere else after it (a part was moved), where several tokens agree else one
    token was replaced by another, perhaps: the next one is tried once

All of it follows from the row's own tokens and its prediction; no token of the draft decides
anything (docs/algorithms/ prediction.md). A prediction is the caller's guess, never a promise: the
text stays the target's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.drafters.base import LARGE_TREE, Drafter, DraftSetup
from outrider.drafters.requirements import Requirements
from outrider.rows import PerRow, Row, Rows
from outrider.settings import checked, setting
from outrider.trees.token_tree import TokenTree, to_draft
from outrider.types import Draft, TargetOutput, Verdict

# tokens in a row that agree: from there on the two are together, and a position after may be
# believed
SURE = 4
LONGEST = 8  # an agreement longer than that counts as this long
# that are looked at, in each direction, the nearest ones: bounds the cost of a departure
MAX_POSITIONS = 64


@checked()
@dataclass(frozen=True)
class PredictionSettings:
    """Options of drafter 'prediction'."""

    min_match: int = setting(
        2,
        "tokens that must agree where the answer is found again anywhere ahead",
        at_least=2,
        at_most=LONGEST,
    )
    near: int = setting(16, "this many tokens ahead a single one is enough; 0: nowhere", at_least=0)


class Alignment:
    """The position in its prediction that one growing answer has reached.

    `position` is that of the token that should come next, at most the end of the prediction. None:
    nobody knows.
    """

    def __init__(
        self, prediction: Sequence[int], num_prompt: int, settings: PredictionSettings
    ) -> None:
        self._prediction = prediction
        self._settings = settings
        self._positions: dict[int, list[int]] = {}  # token -> the positions after it, in order
        for position, token in enumerate(prediction):
            self._positions.setdefault(token, []).append(position + 1)
        self._read = num_prompt  # tokens of the text that were followed, or are the prompt's
        self.position: int | None = 0
        # tokens before `position` that are the text's last ones, as far as that was looked at
        self._agreed = 0
        self._sure = 0  # the position when SURE tokens agreed last
        # `position` is only where the next token would stand if one had been replaced
        self._tries = False

    def coming(self, count: int) -> Sequence[int]:
        """The predicted continuation, `count` tokens of it at most."""
        return (
            [] if self.position is None else self._prediction[self.position : self.position + count]
        )

    def update(self, tokens: Sequence[int]) -> None:
        """Follow what the text has now, token by token: what comes of it does not depend on how
        many come at once."""
        for end in range(self._read + 1, len(tokens) + 1):
            self._follow(tokens, end)
        self._read = len(tokens)

    def _follow(self, tokens: Sequence[int], end: int) -> None:
        """The text is tokens[:end]; its last token is new."""
        position = self.position
        if (
            position is not None
            and position < len(self._prediction)
            and self._prediction[position] == tokens[end - 1]
        ):
            self.position = position + 1
            self._agreed = self._agreed + 1
            self._tries = False
        elif match := self._find(tokens, end):
            (self.position, self._agreed), self._tries = match, False
        else:
            self._tries = position is not None and not self._tries
            self.position = position + 1 if position is not None and self._tries else None
            self._agreed = 0
        if self._agreed >= SURE and self.position is not None:
            self._sure = self.position

    def _find(self, tokens: Sequence[int], end: int) -> tuple[int, int] | None:
        """(position, tokens that agree before it) where the text's last tokens stand in the
        prediction."""
        positions = self._positions.get(tokens[end - 1], [])
        middle = bisect_right(positions, self._sure)
        near = self._sure + self._settings.near
        ahead = self._longest(tokens, end, positions[middle : middle + MAX_POSITIONS])
        if ahead is not None and (ahead[1] >= self._settings.min_match or ahead[0] <= near):
            return ahead
        earlier = self._longest(
            tokens, end, reversed(positions[max(0, middle - MAX_POSITIONS) : middle])
        )
        return earlier if earlier is not None and earlier[1] >= SURE else None

    def _longest(
        self, tokens: Sequence[int], end: int, positions: Iterable[int]
    ) -> tuple[int, int] | None:
        """(position, agreement) of the longest agreement, the first of equal ones."""
        best: tuple[int, int] | None = None
        for position in positions:
            agreed = self._agreement(tokens, end, position)
            if best is None or agreed > best[1]:
                best = position, agreed
                if agreed == LONGEST:
                    break
        return best

    def _agreement(self, tokens: Sequence[int], end: int, position: int) -> int:
        """How many tokens before `position` equal those before `end` in the text, up to LONGEST."""
        max_length = min(LONGEST, position, end)
        return next(
            (
                n
                for n in range(max_length)
                if self._prediction[position - 1 - n] != tokens[end - 1 - n]
            ),
            max_length,
        )


class PredictionDrafter(Drafter):
    """Follows each row's prediction along."""

    needs = "a prediction of the answer, which comes with the request"
    Settings = PredictionSettings
    # what is copied is long, and mostly right
    requires = Requirements(prediction=True, num_draft_tokens=LARGE_TREE)

    def __init__(self, settings: PredictionSettings | None = None) -> None:
        self._settings = settings or PredictionSettings()
        self._alignments = PerRow[Alignment | None]()

    @classmethod
    def build(cls, setup: DraftSetup) -> PredictionDrafter:
        return cls(setup.settings)

    def start(self, row: Row) -> None:
        alignment = (
            Alignment(row.prediction, row.num_prompt, self._settings) if row.prediction else None
        )
        if alignment is not None:
            alignment.update(row.tokens)
        self._alignments.append(alignment)

    def propose(self, rows: Rows, gamma: list[int]) -> Draft:
        trees = [TokenTree() for _ in rows]
        for tree, alignment, budget in zip(trees, self._alignments, gamma, strict=True):
            if alignment is not None:
                tree.add_path(alignment.coming(budget), budget)
        return to_draft(trees, rows.device)

    def commit(self, rows: Rows, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        for alignment, row in zip(self._alignments, rows, strict=True):
            if alignment is not None:
                alignment.update(row.tokens)
