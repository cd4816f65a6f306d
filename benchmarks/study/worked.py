"""Study `worked-solutions`: how far drafts are kept on worked solutions, why not further, and what
that brings.

For each temperature `explain` decodes the problems with drafts of `LONGEST` tokens and reads both
models' distributions at every token; `bench` then measures several draft lengths, the one that a
replay of these texts puts first among them, and other ways to draft. Kinds of step follow rules on
the text (`kinds.py`). Where decoding is greedy, a rejection has one of four reasons, the first that
fits, distributions at temperature 1:

    near tie        the target gives the draft's token at least half the probability of its own: either would nearly have done
    second guess    the text's token is the draft's second or third guess: a tree has room for it
    doubt           the draft gave its own token less than even odds: a stop rule could have ended the draft before it
    sure            none of these: the draft is confidently wrong, and only a better draft helps

Where tokens are drawn, explain's causes say more: tokens lost, counted for the largest cause at
their position.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from outrider.build import Options
from outrider.configuration import Configuration
from outrider.drafters.base import LARGE_TREE, SMALL_TREE
from outrider.lab.bench.bench_result import BenchResult
from outrider.lab.bench.plan import Plan
from outrider.lab.bench.run import run_bench
from outrider.lab.explain.explain import explain
from outrider.lab.explain.explain_result import ExplainedText, ExplainResult, Place
from outrider.lab.intervals import ratio_of_sums
from outrider.lab.runner import Runner
from outrider.lab.workload.load import load_workload
from outrider.lab.workload.prompts import PreparedPrompt, prepare
from outrider.lab.workload.types import Workload
from outrider.sampling.params import SamplingParams
from outrider.sampling.theory import speedup, tau
from study.common import TEMPERATURES, WORK, saved
from study.kinds import ARITHMETIC, CONCLUSION, DECOMPOSITION, RESTATING, token_kinds

ALL = "all"
KINDS = (ALL, DECOMPOSITION, ARITHMETIC, RESTATING, CONCLUSION)
REASONS = NEAR_TIE, SECOND_GUESS, DOUBT, SURE = "near tie", "second guess", "doubt", "sure"
LONGEST = 12
LENGTHS = (2, 5, 8)  # draft lengths to measure, besides the one that the replay puts first
CHAIN = "draft-model"
MAX_NEW_TOKENS = 128
JOURNALS = WORK / "worked-solutions"
SHOWN = 100_000  # tokens whose numbers explain hands out: all of them

Line = dict[str, Any]


def run_worked(target: str, draft: str | None, workload: str, problems: int) -> None:
    """Measure and write the result."""
    options = Options(target, draft=draft)
    found = load_workload(workload)
    studies = []
    for temperature in TEMPERATURES:
        explained = _explained(options, found, temperature, problems)
        counted = lengths(explained)
        best = max(counted, key=lambda one: one["replay_tokens_per_s"] or 0.0)["num_draft_tokens"]
        words = ideas(temperature, best)
        measured = _measured(options, found, temperature, problems, best)
        clock = speeds(measured, explained, counted, words)
        studies.append({"temperature": temperature, "best": best, **counts(explained), **clock})
        example = example_of(explained.texts[0])
    origin = {
        "target": target,
        "workload": workload,
        "problems": problems,
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    saved(
        "worked-solutions", {**origin, "longest": LONGEST, "studies": studies, "example": example}
    )
    rmtree(JOURNALS)


def _explained(
    options: Options, workload: Workload, temperature: float, problems: int
) -> ExplainResult:
    def prompts_of(runner: Runner) -> Sequence[PreparedPrompt]:
        prepared = prepare(
            workload,
            runner.tokenizer,
            context=runner.context,
            max_tokens=MAX_NEW_TOKENS,
            on_bad="skip",
        )
        return prepared.prompts[:problems]

    params = SamplingParams(max_tokens=MAX_NEW_TOKENS, temperature=temperature, seed=0)
    return explain(options, Configuration(CHAIN, LONGEST), prompts_of, params, max_shown=SHOWN)


def _measured(
    options: Options, workload: Workload, temperature: float, problems: int, best: int
) -> BenchResult:
    wanted = [f"{CHAIN} k={length}" for length in sorted({*LENGTHS, best})] + [
        f"{CHAIN} k=auto:{LONGEST}"
    ]
    plan = Plan(
        tuple(Configuration.parse(text) for text in [*wanted, *ideas(temperature, best)]),
        (temperature,),
        prompts=problems,
        sampling=SamplingParams(max_tokens=MAX_NEW_TOKENS),
        rounds=1,
    )
    journal = _journal(f"bench-{temperature:g}")
    return run_bench(options, plan, workload, journal, resume=journal.exists(), on_bad="skip")


def _journal(name: str) -> Path:
    JOURNALS.mkdir(parents=True, exist_ok=True)
    return JOURNALS / f"{name}.jsonl"


def ideas(temperature: float, best: int) -> dict[str, str]:
    """Configurations that might beat the best chain of the draft model, each with its change in
    words."""
    found = {
        f"{CHAIN} k={LONGEST} stop=entropy": "stop drafting where the draft is unsure",
        "suffix k=8": "copy from question and answer, no draft model",
        f"composite k={SMALL_TREE} parts={CHAIN}+suffix": "copies beside the draft model's guesses, in one tree",
        f"{CHAIN} k={SMALL_TREE} tree=sequoia": f"several guesses: a tree of {SMALL_TREE}, its shape planned beforehand",
        f"{CHAIN} k={LARGE_TREE} tree=sequoia": f"several guesses: a tree of {LARGE_TREE}, its shape planned beforehand",
    }
    if temperature:
        return found | {
            f"{CHAIN} k={best} verifier=token": "judge token by token instead of whole blocks"
        }
    return found | {
        f"{CHAIN} k={SMALL_TREE} tree=best-first": f"a tree of {SMALL_TREE}, grown where the draft is sure",
        f"{CHAIN} k={LARGE_TREE} tree=best-first": f"a tree of {LARGE_TREE}, grown where the draft is sure",
        "early-exit k=3": "instead of a draft model, the target's first layers",
        "quantised k=3 bits=8": "a better draft that costs more: the target in 8 bits",
    }


# ---------------------------------------------------------------- what explain found, by kind of step


def counts(result: ExplainResult) -> Line:
    """Totals, and a line for each kind of step that occurs."""
    texts = [list(tokens_of(one, result.is_greedy)) for one in result.texts]
    lines = [_by_kind(name, texts) for name in KINDS]
    return {
        "tokens": result.emitted,
        "texts": result.texts_read,
        "kinds": [one for one in lines if one["tokens"]],
    }


def tokens_of(text: ExplainedText, greedy: bool) -> Iterator[Line]:
    """Every token of a solution: its kind, its step's, whether a draft token was tested there and
    kept, and why not."""
    kinds = _kinds(text)
    for n, (kind, place) in enumerate(zip(kinds, text.places, strict=True)):
        yield {
            "kind": kind,
            "level": place.level,
            "began": kinds[n - place.level],
            "tested": place.fate in ("accepted", "correction"),
            "kept": place.fate == "accepted",
            "overlap": None if place.disagreement is None else 1 - place.disagreement,
            "why": _reason(place) if greedy else place.cause,
            "pair": (place.rejected, place.piece),
            "weight": place.fate == "correction" if greedy else sum(place.lost.values()),
        }


def _kinds(text: ExplainedText) -> list[str]:
    return token_kinds(text.prompt, [place.piece for place in text.places])


def _reason(place: Place) -> str:
    if (place.p_draft or 0.0) >= 0.5 * place.p_token:
        return NEAR_TIE
    if place.rank_token is not None and place.rank_token <= 3:
        return SECOND_GUESS
    return DOUBT if (place.q_draft or 0.0) < 0.5 else SURE


def _by_kind(name: str, texts: Sequence[Sequence[Line]]) -> Line:
    own = [[one for one in text if name in (ALL, one["kind"])] for text in texts]
    kept, tested = ([sum(one[what] for one in text) for text in own] for what in ("kept", "tested"))
    overlaps = [one["overlap"] for text in own for one in text if one["overlap"] is not None]
    rejected = [one for text in own for one in text if one["tested"] and not one["kept"]]
    pairs = Counter(one["pair"] for one in rejected if one["pair"][0]).most_common(4)
    why: dict[str, float] = defaultdict(float)
    for one in (one for text in own for one in text if one["why"] and one["weight"]):
        why[one["why"]] += one["weight"]
    begun = [one for text in texts for one in text if name in (ALL, one["began"])]
    return {
        "kind": name,
        "tokens": sum(map(len, own)),
        "tested": sum(tested),
        "kept": sum(kept),
        "alpha": _share(kept, tested),
        "overlap": float(np.mean(overlaps)) if overlaps else None,
        "survival": np.cumprod(_shares(begun)).tolist(),
        "starts": sum(one["tested"] and one["level"] == 0 for one in begun),
        "by_position": _shares([one for text in own for one in text], fewest=10),
        "rejected": len(rejected),
        "why": dict(why),
        "pairs": [[*pair, count] for pair, count in pairs if count > 1],
    }


def _share(kept: Sequence[int], tested: Sequence[int]) -> list[float] | None:
    """Value and ends of the interval: kept / tested, problems resampled."""
    known = [(above, below) for above, below in zip(kept, tested, strict=True) if below]
    if not known:
        return None
    found = ratio_of_sums([above for above, _ in known], [below for _, below in known])
    return [found.value, found.low, min(found.high, 1.0)]


def _shares(tokens: Sequence[Line], fewest: int = 1) -> list[float]:
    """Kept / tested at positions 1, 2, ... of a draft, as far as enough were tested."""
    reached: dict[int, list[bool]] = defaultdict(list)
    for one in tokens:
        if one["tested"]:
            reached[one["level"]].append(one["kept"])
    found: list[float] = []
    while len(reached[len(found)]) >= fewest:
        found.append(float(np.mean(reached[len(found)])))
    return found


def example_of(text: ExplainedText) -> list[list[str]]:
    """A solution in pieces of one kind each."""
    pieces = zip(_kinds(text), [place.piece for place in text.places], strict=True)
    runs = groupby(pieces, key=lambda pair: pair[0])
    found = [[kind, "".join(piece for _, piece in group).strip()] for kind, group in runs]
    return [one for one in found if one[1]]


# ---------------------------------------------------------------- what the clock says


def lengths(result: ExplainResult) -> list[Line]:
    """A replay of the recorded texts with every draft length: tokens a step, and a second, by the
    times of the run."""
    assert result.times is not None
    lines = []
    for length in range(1, LONGEST + 5):
        steps = sum(
            expected_steps(_chances(text, result.is_greedy), length) for text in result.texts
        )
        tau = result.emitted / steps
        seconds = result.times.rest_s + length * result.times.draft_level_s
        lines.append(
            {"num_draft_tokens": length, "replay_tau": tau, "replay_tokens_per_s": tau / seconds}
        )
    return lines


def _chances(text: ExplainedText, greedy: bool) -> list[float]:
    """P(a draft token is kept) at every position, given the text: of the draft's favourite, or of a
    draw."""
    if greedy:
        return [float(place.rank_token == 1) for place in text.places]
    return [min(1.0, (place.q_token or 0.0) / max(place.p_token, 1e-30)) for place in text.places]


def expected_steps(chances: Sequence[float], length: int) -> float:
    """Steps over a text with chains of `length` tokens, which are kept one by one with these
    chances."""
    total = len(chances)
    starts = [1.0] + [0.0] * total  # P(a step starts here)
    for position in range(total):
        alive = starts[position]
        end = min(position + length, total)
        for at in range(position, end):
            starts[at + 1] += alive * (1 - chances[at])
            alive *= chances[at]
        starts[min(end + 1, total)] += alive
    return sum(starts[:total])


def speeds(
    result: BenchResult, explained: ExplainResult, counted: Sequence[Line], words: dict[str, str]
) -> Line:
    """Forecasts of every length next to what was measured, and every configuration that ran."""
    cell = result.cells[0]
    plain = cell.measured(0)
    assert plain is not None
    assert plain.tokens_per_s is not None
    assert explained.times is not None
    c = explained.times.draft_level_s * plain.tokens_per_s.value
    alpha = explained.accepted / max(explained.tested, 1)
    forecasts = [
        {
            **one,
            "alpha_speedup": speedup(
                tau(alpha, one["num_draft_tokens"]), one["num_draft_tokens"], c
            ),
            "replay_speedup": (one["replay_tokens_per_s"] or 0.0) / plain.tokens_per_s.value,
        }
        for one in counted
    ]
    measured: list[dict[str, Any]] = []
    for number, info in enumerate(result.configurations[1:], 1):
        found = cell.measured(number)
        if found is None or found.speedup is None:
            failure = info.failure or cell.failures.get(info.label, "not measured")
            measured.append(
                {"configuration": info.label, "what": words.get(info.label, ""), "failure": failure}
            )
            continue
        ends = found.speedup
        same = found.identity
        measured.append(
            {
                "configuration": info.label,
                "what": words.get(info.label, ""),
                "tau": found.tau,
                "tokens_per_s": found.tokens_per_s and found.tokens_per_s.value,
                "exact": info.exact,
                "drafted": found.drafted / found.num_steps,
                "speedup": [ends.value, ends.low, ends.high],
                "same_texts": None if same is None else [same.num_identical, same.num_compared],
            }
        )
    return {
        "c": c,
        "lengths": forecasts,
        "measured": measured,
        "other_cpu": cell.others.highest if cell.others else None,
    }
