"""The demo's measurement: plain decoding against every drafter on held-out problems, greedy, one at a time.

Runs are interleaved (every drafter once, then every drafter again, in a rotated order), so that a machine
that slows down does so for all of them; the reported speed is the median over the rounds (of drafters that learn, the first:
afterwards they would know the answers). Identical output
means the same token ids as plain decoding, in every round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.demo import DEMO_PROMPTS
from outrider.demo.problems import Problem, is_correct, problems
from outrider.stats import DecodeStats

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion
    from outrider.sampling.params import SamplingParams

PROBLEM_SEED = 2024  # any: the split, not the seed, keeps training questions out
PLAIN = "none"


class Contender(NamedTuple):
    """One line of the demo's table."""

    label: str
    drafter: str
    options: tuple[str, ...] = ()  # NAME=VALUE
    num_draft_tokens: str | None = None


CONTENDERS = (
    Contender(PLAIN, "none"),
    Contender("draft-model", "draft-model"),
    Contender("draft-model, auto length", "draft-model", (), "auto"),
    Contender("draft-model, tree", "draft-model", ("tree=best-first",), "8"),
    Contender("ngram", "ngram"),
    Contender("suffix", "suffix"),
    Contender("recycling", "recycling", (), "8"),
    Contender("lookahead", "lookahead", (), "11"),
    Contender("composite", "composite"),
    Contender("medusa", "medusa"),
    Contender("eagle3", "eagle3", (), "7"),
    Contender("block", "block", (), "7"),  # a pass of 8 tokens
)


def held_out_problems(count: int) -> list[Problem]:
    """The same problems every time, none of which the embedded pair was trained on."""
    return list(islice(problems(PROBLEM_SEED, held_out=True), count))


@dataclass
class Series:
    """All rounds of one contender."""

    drafter: str  # its label
    llm: LLM
    learns: bool = False  # from the second round on it knows the answers, so only the first one counts
    speeds: list[float] = field(default_factory=list)  # tokens/s, one per round
    answers: list[list[Completion]] = field(default_factory=list)  # [round][problem]

    def run_round(self, chosen: Sequence[Problem], params: SamplingParams) -> None:
        answers = [self.llm.generate(problem.prompt, params)[0] for problem in chosen]
        stats = total(answers)
        self.speeds.append(stats.tokens_per_s or 0.0)
        self.answers.append(answers)


def total(answers: Sequence[Completion]) -> DecodeStats:
    """The stats of several answers added up."""
    result = DecodeStats()
    for answer in answers:
        result = result.merge(answer.stats)
    return result


def measure(
    series: Sequence[Series],
    chosen: Sequence[Problem],
    params: SamplingParams,
    rounds: int,
    tick: Callable[[], None],
) -> list[dict[str, Any]]:
    """Run everything and describe each drafter in one dict; `tick` is called after each drafter's round."""
    for one in series:
        one.llm.generate(DEMO_PROMPTS[0], params)  # first calls allocate; none of the measured problems
    for turn in range(rounds):
        for position in range(len(series)):
            series[(position + turn) % len(series)].run_round(chosen, params)
            tick()
    plain = next(one for one in series if one.drafter == PLAIN)
    return [describe(one, plain, chosen) for one in series]


def describe(one: Series, plain: Series, chosen: Sequence[Problem]) -> dict[str, Any]:
    """What the table and `--json` say about one drafter. Counters are of one round: all are alike."""
    expected = [answer.token_ids for answer in plain.answers[0]]
    same = [all(r[i].token_ids == ids for r in one.answers) for i, ids in enumerate(expected)]
    right = [is_correct(a.text, p.answer) for a, p in zip(one.answers[0], chosen, strict=True)]
    speeds = one.speeds[:1] if one.learns else one.speeds
    speed = statistics.median(speeds)
    stats = total(one.answers[0])
    return {
        "drafter": one.drafter,
        "tokens_per_s": speed,
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "speedup": speed / statistics.median(plain.speeds),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "num_identical": sum(same),
        "num_correct": sum(right),
        "num_problems": len(chosen),
        "num_rounds": len(speeds),
        "num_tokens": stats.emitted,
    }
