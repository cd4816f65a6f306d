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
    tokens: float  # in all; luck, filters and the verifier's gap may be negative
    tokens_per_step: float
    tokens_per_s: float | None  # tokens / seconds of the steps: what the same time would have yielded more
    spread: float | None = None  # luck: standard deviation of `tokens` over the coins and draws of the same tests


class LevelRow(Record):
    """Tests of the n-th draft token of a step."""

    level: int  # from 1
    tested: int
    kept: int
    share: Interval  # kept / tested; Wilson's interval, as if tests were independent
    expected: float  # mean probability of being kept, over the tests


class GroupRow(Record):
    """Positions of one kind of text, part of the answer, or range of entropy."""

    name: str
    tokens: int
    tested: int
    kept: int
    share: Interval | None  # as in LevelRow; None where nothing was tested
    expected: float | None  # mean probability of being kept, over the tests
    lost: float  # tokens, to rejections; luck and drafts that were too short left out
    disagreement: float | None  # mean total variation of the distributions shown, over all positions with a draft distribution
    entropy: float | None  # mean of the target's, nats


class RankRow(Record):
    """Ranks of the text's token in the draft's distribution, at rejections."""

    rank: str
    rejections: int


class Confusion(Record):
    """A draft token and what stands in the text instead."""

    draft: str
    text: str
    count: int


class Counterfactual(Record):
    """What another choice would have given on the same texts."""

    name: str
    family: Literal["length", "stop rule", "temperature", "drafter"]
    steps: float
    tokens_per_step: float
    tokens_per_s: float | None  # estimated from the times of this run; None where they say nothing about it
    num_draft_tokens: int | None = None  # of a chain of another length
    current: bool = False  # the choice of this run
    exact: bool  # else an expectation, or another text
    method: str
    limits: str


class Advice(Record):
    """One thing to do, and why."""

    title: str
    evidence: str
    tone: Tone = "plain"
    gain: float | None = None  # predicted tokens/s, relative: 0.1 is 10 % more


class Times(Record):
    """Mean seconds of a step; each text's first step, which reads the prompt into the draft, is left out."""

    step_s: float
    draft_s: float
    draft_level_s: float  # draft_s / levels of the drafts (a chain's tokens); 0 where nothing was drafted
    width: float  # mean tokens of a target pass: the pending one and the draft's
    pass_s: dict[int, float] = Field(default_factory=dict)  # tokens of a target pass -> seconds, measured afterwards
    steps: int

    @property
    def rest_s(self) -> float:
        """Target pass, verification, bookkeeping."""
        return self.step_s - self.draft_s


class TextColumns(Record):
    """One text, one entry per output token. `fate`, `kind` and `section` have one letter a token, see `LETTERS`."""

    id: str
    task: str
    prompt: str
    pieces: list[str]  # text that each token added; empty inside a character
    fate: str
    kind: str
    section: str
    cause: str  # of the largest part of what was lost there; "." where nothing was
    level: list[int]  # draft tokens kept before it in its step
    draft: list[str]  # the draft token that was tested there and rejected; empty where none was
    siblings: list[int]  # draft tokens that stood there
    kept_chance: list[float | None]  # b: the probability that one is kept, before they were drawn
    p_token: list[float | None]
    q_token: list[float | None]
    p_draft: list[float | None]
    q_draft: list[float | None]
    p_entropy: list[float | None]  # nats
    q_entropy: list[float | None]
    disagreement: list[float | None]  # total variation
    rank_draft: list[int | None]  # of the draft token in p, 1 = likeliest
    rank_token: list[int | None]  # of the text's token in q
    lost: list[float | None]  # tokens, luck left out


LETTERS = {
    "fate": {"a": "accepted", "c": "correction", "b": "bonus", "p": "plain"},
    "kind": {
        "t": "tool call", "c": "code", "d": "number", "n": "name", "w": "word", "p": "punctuation", "s": "whitespace",
    },
    "section": {"t": "thinking", "a": "answer", "x": "text"},
    "cause": {
        "d": "draft", "v": "vocabulary", "f": "filters", "s": "stopped", "b": "tree-budget", "l": "length", "g": "verifier",
    },
}  # fmt: skip


class ExplainResult(Result):
    """`outrider explain`."""

    kind: Literal["explain"] = "explain"
    target: str
    draft: str | None
    configuration: str  # text form
    verifier: str
    is_greedy: bool
    has_draft_probs: bool  # a model stands behind the draft: its distribution is known at every position
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
    ideal: float  # tokens that the steps could have emitted: asked for, plus one, plus the next one of drafts kept whole
    tau: Interval  # emitted / steps; prompts resampled
    alpha: Interval | None  # accepted / tested; likewise
    tokens_per_s: float | None  # tau / mean seconds of a step
    other_cpu: float  # highest share of the processors that others used, 0..1
    times: Times | None
    causes: list[CauseRow]
    by_level: list[LevelRow]
    by_kind: list[GroupRow]
    by_section: list[GroupRow]
    by_entropy: list[GroupRow]
    ranks: list[RankRow]
    confusions: list[Confusion]
    counterfactuals: list[Counterfactual]
    advice: list[Advice]
    texts: list[TextColumns] = Field(default_factory=list)

    def comparable(self) -> Iterator[Comparable]:
        """What two explanations of one configuration can be compared in."""
        yield Comparable(f"{self.configuration}: tokens per step", self.tau, higher_is_better=True)
        if self.alpha is not None:
            yield Comparable(f"{self.configuration}: kept / tested", self.alpha, higher_is_better=True)
