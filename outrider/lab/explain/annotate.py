"""Every output position of a text: how likely its token was to either model, how sure they were, how far they disagreed; then its
words: what each token added, its kind, its section, its fate, what was lost to what.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import numpy as np

from outrider.lab.explain.causes import CAUSES, LENGTH, LUCK, STOPPED, Drafting, Ledger, account
from outrider.lab.explain.distributions import Distributions, FinishedText
from outrider.lab.explain.explain_result import LETTERS, TextColumns
from outrider.lab.explain.regions import token_kinds, token_sections
from outrider.lab.runner import Step
from outrider.models.tokens.token_bytes import token_name
from outrider.text import Detokenizer, decode

IDS = ("token", "draft", "siblings", "p_best", "q_best", "guess")  # columns of whole numbers
NONE = -1  # where there is no token
PROMPT_END = 400  # characters of the prompt that decide about sections and sentences
MIN_LOST = 0.005  # tokens; what is smaller has no cause


@dataclass(frozen=True)
class Positions:
    """Columns over the output positions of one text. NaN and -1 where there is no number or token.

    Distributions are those in force for sampled rows; greedy rows show temperature 1 without filters.
    """

    token: np.ndarray  # (n,) int
    draft: np.ndarray  # (n,) int: the draft token tested there; of several siblings, the kept one or the first
    siblings: np.ndarray  # (n,) int: draft tokens that stood there
    p_best: np.ndarray  # (n,) int: favourites
    q_best: np.ndarray
    guess: np.ndarray  # (n,) int: what a deterministic draft says
    p_token: np.ndarray  # (n,) float: probabilities of the text's token
    q_token: np.ndarray
    p_draft: np.ndarray  # of the tested draft token
    q_draft: np.ndarray
    p_entropy: np.ndarray  # nats
    q_entropy: np.ndarray
    tv: np.ndarray  # 1 - sum min(p, q)
    outside: np.ndarray  # mass of p on tokens that the draft can never say
    rank_draft: np.ndarray  # of the tested draft token in p, 1 = likeliest
    rank_token: np.ndarray  # of the text's token in q

    def __len__(self) -> int:
        return len(self.token)

    @property
    def has_draft_probs(self) -> bool:
        """Whether the draft's distribution is known anywhere."""
        return bool(np.isfinite(self.q_entropy).any())


@dataclass(frozen=True)
class Annotated:
    """One text with everything that is known about it."""

    text: FinishedText
    steps: Sequence[Step]
    positions: Positions
    ledger: Ledger


def annotate(text: FinishedText, steps: Sequence[Step], distributions: Iterable[Distributions], drafting: Drafting) -> Annotated:
    """`distributions`: of every output position, in order; only those of one step are held at a time."""
    ledgers, rows = list[Ledger](), list[dict[str, float]]()
    stream = iter(distributions)
    for number, step in enumerate(steps):
        here = list(islice(stream, step.taken))
        own = replace(drafting, seed=drafting.seed + number)
        ledgers.append(account(step, here, len(text.output) - step.start, own))
        tested = tested_tokens(step)
        for level, point in enumerate(here):
            rows.append(_row(point, tested[level]))
    return Annotated(text, steps, _columns(rows), Ledger.joined(ledgers))


def tested_tokens(step: Step) -> list[list[int]]:
    """At every token that the step took: the draft tokens that stood there, the kept one first."""
    found = []
    for level, node in enumerate([-1, *step.path][: step.taken]):
        there = [child for child, parent in enumerate(step.parent_list) if parent == node]
        kept = step.path[level] if level < len(step.path) else None
        found.append([step.tokens[child] for child in sorted(there, key=lambda child: child != kept)])
    return found


def _row(point: Distributions, tested: list[int]) -> dict[str, float]:
    """What `Positions` says of one position."""
    p, q = point.p_soft, point.q
    row = {
        "token": point.token, "siblings": len(tested), "p_best": point.p_best, "p_token": p[point.token], "p_entropy": entropy(p),
    }  # fmt: skip
    if tested:
        row |= {"draft": tested[0], "p_draft": p[tested[0]], "rank_draft": rank(p, tested[0])}
    if q is None:
        return row
    assert point.q_best is not None
    if tested:
        row["q_draft"] = q[tested[0]]
    return row | {
        "q_best": point.q_best, "guess": NONE if point.guess is None else point.guess, "q_token": q[point.token],
        "q_entropy": entropy(q), "rank_token": rank(q, point.token), "tv": 1 - np.minimum(p, q).sum(),
        "outside": 0.0 if point.outside is None else p[point.outside].sum(),
    }  # fmt: skip


def _columns(rows: Sequence[dict[str, float]]) -> Positions:
    names = [field.name for field in fields(Positions)]
    ids = {name: np.array([row.get(name, NONE) for row in rows], dtype=int) for name in IDS}
    numbers = {name: np.array([row.get(name, np.nan) for row in rows], dtype=float) for name in names if name not in IDS}
    return Positions(**ids, **numbers)


def entropy(point: np.ndarray) -> float:
    """In nats."""
    mass = point[point > 0]
    return float(-(mass * np.log(mass)).sum())


def rank(point: np.ndarray, token: int) -> int:
    """1 for the likeliest; equals share the better rank."""
    return 1 + int((point > point[token]).sum())


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
    """One text as the columns that a result keeps."""
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
