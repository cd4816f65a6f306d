"""What `outrider explain` found. Texts are kept as columns, a few hundred bytes a token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from outrider.lab.result import Comparable, Interval, Record, Result

Tone = Literal["good", "bad", "caution", "plain"]


class CauseRow(Record):
    """Tokens that steps could have emitted and did not. All rows add up to `ideal - emitted`."""

    cause: str  # outrider.lab.explain.causes.CAUSES
    tokens: float
    tokens_per_step: float
    tokens_per_s: float | None  # tokens / seconds of the steps


class LevelRow(Record):
    """Tests of the n-th draft token of a step."""

    level: int  # from 1
    tested: int
    kept: int
    share: Interval  # kept / tested; Wilson's interval, as if tests were independent


class GroupRow(Record):
    """Positions of one kind of text, or in one part of the answer."""

    name: str
    tokens: int
    tested: int
    kept: int
    share: Interval | None  # as in LevelRow; None where nothing was tested
    lost: float  # tokens, to rejections: drafts that were too short left out
    disagreement: float | None  # mean total variation of the distributions shown
    entropy: float | None  # mean of the target's, nats


class Advice(Record):
    """One thing to do, and why."""

    title: str
    evidence: str
    tone: Tone = "plain"


class Times(Record):
    """Mean seconds of a step, without each text's first one, which reads the prompt."""

    step_s: float
    draft_s: float
    draft_level_s: float  # draft_s / levels of the drafts; 0 where nothing was drafted
    steps: int

    @property
    def rest_s(self) -> float:
        """Target pass, verification, bookkeeping."""
        return self.step_s - self.draft_s


class TextColumns(Record):
    """One text, one entry per output token. `fate`, `kind`, `section` and `cause` have one letter a
    token."""

    id: str
    task: str
    prompt: str
    pieces: list[str]  # text that each token added; empty inside a character
    fate: str  # letters: `LETTERS`
    kind: str
    section: str
    cause: str  # of the largest part of what was lost there; "." where nothing was
    level: list[int]  # draft tokens kept before it in its step
    draft: list[str]  # the draft token that was rejected there; empty where none was
    siblings: list[int]  # draft tokens that were tested there
    p_token: list[float | None]
    q_token: list[float | None]
    p_draft: list[float | None]
    q_draft: list[float | None]
    p_entropy: list[float | None]  # nats
    q_entropy: list[float | None]
    disagreement: list[float | None]  # total variation
    rank_draft: list[int | None]  # of the draft token in p, 1 = likeliest
    rank_token: list[int | None]  # of the text's token in q
    lost: list[float]  # tokens


LETTERS = {
    "fate": {"a": "accepted", "c": "correction", "b": "bonus", "p": "plain"},
    "kind": {
        "t": "tool call",
        "c": "code",
        "d": "number",
        "n": "name",
        "w": "word",
        "p": "punctuation",
        "s": "whitespace",
    },
    "section": {"t": "thinking", "a": "answer", "x": "text"},
    "cause": {
        "d": "draft",
        "v": "vocabulary",
        "f": "filters",
        "s": "stopped",
        "b": "tree-budget",
        "l": "length",
    },
}


class ExplainResult(Result):
    """`outrider explain`."""

    schema_version: int = 3
    kind: Literal["explain"] = "explain"
    target: str
    draft: str | None
    configuration: str  # text form
    verifier: str
    is_greedy: bool
    has_draft_probs: bool  # the draft's distribution is known at the positions of the texts
    is_chain: bool
    sampling: dict[str, Any]
    num_draft_tokens: str
    workload: str
    texts_read: int
    # totals
    steps: int
    emitted: int
    drafted: int
    tested: int
    accepted: int
    near_misses: int  # rejections at which the text has the draft's second to eighth guess
    ideal: float  # tokens that the steps could have emitted
    tau: Interval  # emitted / steps; prompts resampled
    alpha: Interval | None  # accepted / tested; likewise
    tokens_per_s: float | None  # tau / mean seconds of a step
    other_cpu: float  # highest share of the processors that others used, 0..1
    times: Times | None
    causes: list[CauseRow]
    by_level: list[LevelRow]
    by_kind: list[GroupRow]
    by_section: list[GroupRow]
    advice: list[Advice]
    texts: list[TextColumns] = Field(default_factory=list)

    def comparable(self) -> Iterator[Comparable]:
        """What two explanations of one configuration can be compared in."""
        label = self.configuration
        yield Comparable(f"{label}: tokens per step", self.tau, higher_is_better=True)
        if self.alpha is not None:
            yield Comparable(f"{label}: kept / tested", self.alpha, higher_is_better=True)
