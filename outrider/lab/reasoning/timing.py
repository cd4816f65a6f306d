"""Seconds of a step of every draft length, before any speed is forecast or measured.

Plain steps are timed in plain decoding: between steps that draft, the processor's caches hold other weights. Lengths from 1 on
take turns step by step (`lab/costs.py`), both sides problem by problem, so that a slow moment of the machine hits all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outrider.lab.configuration import Configuration
from outrider.lab.costs import measure_steps
from outrider.lab.disturbance import Disturbance, Repeats
from outrider.lab.progress import Progress
from outrider.lab.runner import Contender, Runner
from outrider.sampling.params import SamplingParams

REPEATS, PLAIN_REPEATS = 3, 120  # steps of each length, per problem: both come about as far into the context
ATTEMPTS = 3  # beside busy neighbours


def calmest_step_seconds(
    runner: Runner, chain: Configuration, prompts: Sequence[list[int]], params: SamplingParams, longest: int,
    max_other_cpu: float, progress: Progress,
) -> dict[int, float]:  # fmt: skip
    """Draft tokens, 0 .. `longest` -> median seconds of a step, of the calmest of a few attempts."""
    progress.stage("timing steps of every length", ATTEMPTS)
    plain, drafting = runner.open(Configuration()), runner.open(chain)

    def attempt() -> tuple[float, dict[int, float]]:
        others = Disturbance()
        found = step_seconds(plain, drafting, prompts, params, longest)
        progress.advance()
        return others.share(), found

    (_, calmest), _ = Repeats(max_other_cpu, progress.say).calmest(attempt, lambda found: found[0], ATTEMPTS - 1)
    return calmest


def step_seconds(
    plain: Contender, drafting: Contender, prompts: Sequence[list[int]], params: SamplingParams, longest: int
) -> dict[int, float]:
    """Medians over problems of medians over steps; steps near the limit, which draft less than asked, count as what they did."""
    found: dict[int, list[float]] = {}
    for prompt in prompts:
        sweep = measure_steps(drafting, [prompt], params, range(1, longest + 1), repeats=REPEATS)
        own = measure_steps(plain, [prompt], params, [0], repeats=PLAIN_REPEATS)
        for length, seconds in (*own.items(), *((length, one) for length, one in sweep.items() if length)):
            found.setdefault(length, []).append(seconds)
    return {length: median(several) for length, several in sorted(found.items())}
