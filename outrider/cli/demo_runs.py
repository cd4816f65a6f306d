"""The demo's measurement: plain decoding against every drafter on held-out problems, greedy, one at a time.

Runs are interleaved: each problem goes through all drafters, in a rotated order, before the next problem does, so a slow
moment of the machine hits all of them alike. Speeds are those after the first step (docs/glossary.md). Of a problem the
median round counts; of drafters that learn the first round, because afterwards they would know the answers. The interval of a
speedup comes from resampling the problems. Identical output means the same token ids as plain decoding, in every round.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from outrider.demo import DEMO_PROMPTS
from outrider.errors import ConfigError
from outrider.lab.disturbance import Disturbance
from outrider.lab.intervals import ratio_of_rates
from outrider.lab.workload.grade import grade
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.types import Request
from outrider.stats import DecodeStats

if TYPE_CHECKING:
    from outrider.llm import LLM, Completion
    from outrider.sampling.params import SamplingParams

PLAIN = "none"
MAX_OTHER_CPU = 0.1  # share of the processors; a row beside busier processes is called disturbed


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
    Contender("draft-model, tree", "draft-model", ("tree=best-first",), "7"),
    Contender("ngram", "ngram"),
    Contender("suffix", "suffix"),
    Contender("recycling", "recycling"),
    Contender("lookahead", "lookahead"),
    Contender("composite", "composite"),
    Contender("medusa", "medusa"),
    Contender("eagle3", "eagle3", (), "7"),
    Contender("block", "block", (), "7"),  # a pass of 8 tokens
)


class Table(NamedTuple):
    """A row of numbers for each drafter, and whether Ctrl-C ended the measurement."""

    rows: list[dict[str, Any]]
    interrupted: bool


def held_out_problems(count: int) -> list[Request]:
    """The first problems of the workload `demo`, none of which the embedded pair was trained on.

    Raises ConfigError for more than there are."""
    known = load_workload("demo").requests
    if count > len(known):
        raise ConfigError(f"there are {len(known)} held-out problems, got --limit {count}; --rounds measures them again")
    return list(known[:count])


@dataclass
class Series:
    """All rounds of one contender."""

    drafter: str  # its label
    llm: LLM
    learns: bool = False  # from the second round on it knows the answers, so only the first one counts
    answers: list[list[Completion]] = field(default_factory=list)  # [round][problem]
    seconds: float = 0.0  # of all runs
    others_s: float = 0.0  # of these, as far as other processes used the processors

    def run(self, problem: Request, params: SamplingParams, turn: int) -> None:
        """One problem of round `turn`."""
        others, began = Disturbance(), time.perf_counter()
        answer = self.llm.generate(problem.prompt or "", params)[0]
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.others_s += seconds * others.share()
        if len(self.answers) == turn:
            self.answers.append([])
        self.answers[turn].append(answer)

    @property
    def num_rounds(self) -> int:
        """Rounds that count."""
        return 1 if self.learns else len(self.answers)

    def spread(self) -> list[float] | None:
        """Decode speed of the slowest and the fastest round over that of the median round; None: there was one round."""
        rounds = [total(answers).decode_tokens_per_s for answers in self.answers[: self.num_rounds]]
        speeds = [speed for speed in rounds if speed is not None]
        middle = statistics.median(speeds) if speeds else 0.0
        return [min(speeds) / middle, max(speeds) / middle] if len(speeds) > 1 else None

    def typical(self, problem: int, num_rounds: int) -> DecodeStats:
        """The stats of a problem in the round with the median speed."""
        rounds = [answers[problem].stats for answers in self.answers[:num_rounds]]
        return sorted(rounds, key=lambda stats: stats.tpot_s or 0.0)[(len(rounds) - 1) // 2]


def total(answers: Sequence[Completion]) -> DecodeStats:
    """The stats of several answers added up."""
    result = DecodeStats()
    for answer in answers:
        result = result.merge(answer.stats)
    return result


def measure(
    series: Sequence[Series],
    chosen: Sequence[Request],
    params: SamplingParams,
    rounds: int,
    tick: Callable[[], None],
) -> Table:
    """Run everything and describe each drafter in one dict; `tick` is called after each run. After Ctrl-C: what all have done."""
    for one in series:
        one.llm.generate(DEMO_PROMPTS[0], params)  # first calls allocate; none of the measured problems
    interrupted = False
    try:
        _run_all(series, chosen, params, rounds, tick)
    except KeyboardInterrupt:
        interrupted = True
        if not (chosen := _cut_to_common(series, chosen)):
            raise
    plain = next(one for one in series if one.drafter == PLAIN)
    return Table([describe(one, plain, chosen) for one in series], interrupted)


def _run_all(
    series: Sequence[Series], chosen: Sequence[Request], params: SamplingParams, rounds: int, tick: Callable[[], None]
) -> None:
    for turn in range(rounds):
        for number, problem in enumerate(chosen):
            for position in range(len(series)):
                series[(position + number + turn) % len(series)].run(problem, params, turn)
                tick()


def _cut_to_common(series: Sequence[Series], chosen: Sequence[Request]) -> Sequence[Request]:
    """Drop what only some series have run: a round that is not complete, of the first round the problems behind the last common
    one. Returns the problems that are left."""
    whole = min(sum(len(answers) == len(chosen) for answers in one.answers) for one in series)
    done = len(chosen) if whole else min(len(one.answers[0]) if one.answers else 0 for one in series)
    for one in series:
        one.answers = [answers[:done] for answers in one.answers[: max(whole, 1)]]
    return chosen[:done]


def describe(one: Series, plain: Series, chosen: Sequence[Request]) -> dict[str, Any]:
    """What the table and `--json` say about one drafter. Counters are of one round: all are alike."""
    expected = [answer.token_ids for answer in plain.answers[0]]
    same = [all(r[i].token_ids == ids for r in one.answers) for i, ids in enumerate(expected)]
    right = [bool(grade(p, a.text)) for a, p in zip(one.answers[0], chosen, strict=True)]
    stats = total(one.answers[0])
    return {
        "drafter": one.drafter,
        **_speeds(one, plain, len(chosen)),
        "tau": stats.tau,
        "alpha": stats.alpha,
        "num_identical": sum(same),
        "num_correct": sum(right),
        "num_problems": len(chosen),
        "num_rounds": one.num_rounds,
        "num_tokens": stats.emitted,
        "other_cpu": one.others_s / one.seconds if one.seconds else 0.0,
    }


def _speeds(one: Series, plain: Series, num_problems: int) -> dict[str, Any]:
    """Time to first token, speed after it, and speedup over the problems in which both sides decoded after their first step."""
    rounds = one.num_rounds  # both sides are compared over the same rounds
    ttft_s = statistics.median(answer.stats.ttft_s for answers in one.answers[:rounds] for answer in answers)
    pairs = [(one.typical(number, rounds), plain.typical(number, rounds)) for number in range(num_problems)]
    pairs = [(own, base) for own, base in pairs if own.decode_tokens_per_s and base.decode_tokens_per_s]
    if not pairs:
        return {"ttft_s": ttft_s, "decode_tokens_per_s": None, "speedup": None, "speedup_interval": None}
    tokens, seconds = [own.decode_tokens for own, _ in pairs], [own.decode_s for own, _ in pairs]
    found = ratio_of_rates(tokens, seconds, [base.decode_tokens for _, base in pairs], [base.decode_s for _, base in pairs])
    interval = [found.low, found.high] if math.isfinite(found.high) else None  # None: one problem
    return {
        "ttft_s": ttft_s,
        "decode_tokens_per_s": sum(tokens) / sum(seconds),
        "speedup": found.value,
        "speedup_interval": one.spread() if one is plain else interval,
    }


def disturbed(rows: Sequence[dict[str, Any]]) -> str | None:
    """One sentence where other processes used the processors: how much, in which rows."""
    busy = {row["drafter"]: row["other_cpu"] for row in rows if row["other_cpu"] > MAX_OTHER_CPU}
    if not busy:
        return None
    which = "all rows" if len(busy) == len(rows) else ", ".join(busy)
    low, high = min(busy.values()), max(busy.values())
    share = f"{high:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
    return (
        f"disturbed: other processes used {share} of the processors during the runs of {which}; speeds are too low and "
        "speedups uncertain beyond their intervals"
    )
