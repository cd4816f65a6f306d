"""The result of `outrider explain`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer

from outrider.lab.result import Comparable, Interval, Record, Result
from outrider.stats import PartStats

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


# written with three significant digits
Short = Annotated[float, PlainSerializer(lambda value: float(f"{value:.3g}"))]


class Place(Record):
    """One output token: what was drafted and lost there, and the numbers of both models; with its
    words, where the result keeps its text."""

    token: int = Field(exclude=True, default=-1)
    level: int  # draft tokens kept before it in its step
    # draft tokens that were tested there, the kept one first
    tested: list[int]
    is_kept: bool
    # P(a draft token there is the text's), given the text; None: not known
    keeps: float | None = Field(exclude=True, default=None)
    p_token: Short
    p_entropy: Short  # nats
    q_token: Short | None = None
    q_entropy: Short | None = None
    p_draft: Short | None = None  # of the first tested token
    q_draft: Short | None = None
    rank_draft: int | None = None  # of that token in p, 1 = likeliest
    rank_token: int | None = None  # of the text's token in q
    disagreement: Short | None = None  # total variation
    lost: dict[str, Short] = Field(default_factory=dict)  # cause -> tokens
    piece: str = ""  # text that the token added; empty inside a character
    fate: str = "plain"  # as in `Completion.origins`
    kind: str = ""  # of regions.KINDS
    section: str = ""  # of regions.SECTIONS
    rejected: str = ""  # the draft token that was rejected there

    @property
    def is_rejection(self) -> bool:
        return bool(self.tested) and not self.is_kept

    @property
    def cause(self) -> str | None:
        """The largest part of what was lost there."""
        return max(self.lost, key=lambda cause: self.lost[cause], default=None)


class ExplainedText(Record):
    """One text, a place for each output token."""

    id: str
    task: str
    prompt: str
    places: list[Place]


class ExplainResult(Result):
    """`outrider explain`."""

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
    ideal: float  # tokens that the steps could have emitted
    tau: Interval  # emitted / steps; prompts resampled
    alpha: Interval | None  # accepted / tested; likewise
    tokens_per_s: float | None  # tau / mean seconds of a step
    other_cpu: float  # highest share of the processors that others used, 0..1
    times: Times | None
    causes: list[CauseRow]
    # by part of a composite, and of forced tokens; empty where the drafter alone drafts
    by_part: dict[str, PartStats] = Field(default_factory=dict)
    by_level: list[LevelRow]
    by_kind: list[GroupRow]
    by_section: list[GroupRow]
    advice: list[Advice]
    texts: list[ExplainedText] = Field(default_factory=list)

    def comparable(self) -> Iterator[Comparable]:
        """The figures by which two explanations of one configuration can be compared."""
        label = self.configuration
        yield Comparable(f"{label}: tokens per step", self.tau, higher_is_better=True)
        if self.alpha is not None:
            yield Comparable(f"{label}: kept / tested", self.alpha, higher_is_better=True)
