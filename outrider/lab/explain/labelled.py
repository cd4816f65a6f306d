"""An annotated text with its words: what each token added to the text, its kind, its section, its fate, what was lost to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.lab.explain.annotate import NONE, Annotated
from outrider.lab.explain.causes import CAUSES, LENGTH, LUCK, STOPPED
from outrider.lab.explain.explain_result import LETTERS, TextColumns
from outrider.lab.explain.regions import token_kinds, token_sections
from outrider.models.tokens.token_bytes import token_name
from outrider.text import Detokenizer, decode

PROMPT_END = 400  # characters of the prompt that decide about sections and sentences
MIN_LOST = 0.005  # tokens; what is smaller has no cause


@dataclass(frozen=True)
class Labelled(Annotated):
    """One text, ready to be counted and shown."""

    id: str
    task: str
    prompt: str
    pieces: list[str]
    kinds: list[str]
    sections: list[str]
    fates: list[str]  # "accepted", "correction", "bonus" or "plain"

    @property
    def lost(self) -> np.ndarray:
        """(n,) tokens lost at each position, luck left out."""
        parts = self.ledger.parts
        return parts.sum(1) - parts[:, LUCK]

    @property
    def lost_to_rejections(self) -> np.ndarray:
        """(n,) the same without what short drafts lost."""
        return self.lost - self.ledger.parts[:, [STOPPED, LENGTH]].sum(1)

    @property
    def causes(self) -> list[str | None]:
        """The largest part at each position, luck left out."""
        parts = self.ledger.parts.copy()
        parts[:, LUCK] = 0
        best = parts.argmax(1)
        return [CAUSES[cause] if parts[index, cause] > MIN_LOST else None for index, cause in enumerate(best.tolist())]


def labelled(annotated: Annotated, tokenizer: Any, origins: Sequence[str], *, id: str, task: str) -> Labelled:
    """`origins`: `Completion.origins`."""
    text = annotated.text
    prompt = decode(tokenizer, text.prompt, special=True, flush=False)  # the answer begins with an unfinished character
    pieces = token_pieces(tokenizer, text.prompt, text.output)
    end = prompt[-PROMPT_END:]
    kinds, sections = token_kinds(end, pieces), token_sections(end, pieces)
    return Labelled(
        **vars(annotated), id=id, task=task, prompt=prompt, pieces=pieces, kinds=kinds, sections=sections, fates=list(origins)
    )


def token_pieces(tokenizer: Any, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    """The text that each token adds; joined they are the answer."""
    detokenizer = Detokenizer(tokenizer, list(prompt))
    pieces = [detokenizer.push(token) for token in output]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces


def as_columns(one: Labelled, tokenizer: Any) -> TextColumns:
    """For the result."""
    positions, ledger = one.positions, one.ledger
    rejected = ledger.kept == 0
    draft = [
        token_name(tokenizer, token) if no and token != NONE else ""
        for token, no in zip(positions.draft.tolist(), rejected.tolist(), strict=True)
    ]
    letters = {name: {word: letter for letter, word in table.items()} for name, table in LETTERS.items()}
    return TextColumns(
        id=one.id, task=one.task, prompt=one.prompt, pieces=_named_ends(one, tokenizer),
        fate="".join(letters["fate"][fate] for fate in one.fates), kind="".join(letters["kind"][kind] for kind in one.kinds),
        section="".join(letters["section"][section] for section in one.sections),
        cause="".join("." if cause is None else letters["cause"][cause] for cause in one.causes),
        level=ledger.level.tolist(), draft=draft, siblings=positions.siblings.tolist(), kept_chance=numbers(ledger.expected),
        p_token=numbers(positions.p_token), q_token=numbers(positions.q_token), p_draft=numbers(positions.p_draft),
        q_draft=numbers(positions.q_draft), p_entropy=numbers(positions.p_entropy), q_entropy=numbers(positions.q_entropy),
        disagreement=numbers(positions.tv), rank_draft=_ranks(positions.rank_draft), rank_token=_ranks(positions.rank_token),
        lost=numbers(one.lost),
    )  # fmt: skip


def numbers(column: np.ndarray) -> list[float | None]:
    """Three significant digits; None where there is no number."""
    return [float(f"{value:.3g}") if np.isfinite(value) else None for value in column.tolist()]


def _ranks(column: np.ndarray) -> list[int | None]:
    return [int(value) if np.isfinite(value) else None for value in column.tolist()]


def _named_ends(one: Labelled, tokenizer: Any) -> list[str]:
    """The pieces; a last token that adds no text (the end of text) shows its name."""
    pieces = list(one.pieces)
    if pieces and not pieces[-1]:
        pieces[-1] = token_name(tokenizer, one.text.output[-1])
    return pieces
