"""Replayed lengths against real runs: the same steps where nothing is left to chance, the same mean where it is."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from outrider.lab.certify.enumerate import emitted_tokens, enumerate_step, target_pass
from outrider.lab.certify.tables import Path as Tokens
from outrider.lab.certify.tables import TableModel, sampled_drafts
from outrider.lab.explain.annotate import Positions, annotate
from outrider.lab.explain.causes import Drafting
from outrider.lab.explain.distributions import forced_distributions
from outrider.lab.explain.forecast import Mode, TextWalk, favourites_walk, walk_of
from outrider.lab.runner import Contender, Runner, Trace
from outrider.sampling.confidence import ConfidenceSettings
from outrider.sampling.params import SamplingParams
from outrider.verifiers import VERIFIERS
from outrider.verifiers.multi_round import MultiRoundVerifier
from tests.unit.lab.explain.pairs import PROMPTS, finished, runner_of, save_pair
from tests.unit.lab.explain.test_causes import tables

LENGTHS = (1, 3, 8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"), noise=0.12)


def opened(runner: Runner, configuration: str) -> Contender:
    from outrider.lab.configuration import Configuration

    return runner.open(Configuration.parse(configuration))


def positions_of(contender: Contender, trace: Trace, params: SamplingParams) -> tuple[Positions, int]:
    text = finished(contender, trace, params)
    decoder = contender.built.decoder
    forced = forced_distributions(decoder.target, decoder.drafter, text)
    found = annotate(text, trace.steps, forced, Drafting(MultiRoundVerifier()))
    return found.positions, text.limit


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=40),
        SamplingParams(max_tokens=40, repetition_penalty=1.2, presence_penalty=0.3),
        SamplingParams(max_tokens=40, stop_token_ids=[7, 80, 13]),
    ],
    ids=["plain", "penalties", "stop tokens"],
)
def test_greedy_lengths_equal_real_runs(pair: tuple[str, str], params: SamplingParams) -> None:
    """An off-by-one at the limit, at the end of the text, behind a rejection: every length and prompt, to the step."""
    runner = runner_of(pair, *(f"draft-model k={length}" for length in LENGTHS))
    recorded = opened(runner, "draft-model k=3")
    traces = recorded.run(PROMPTS, params)
    walks = [walk_of(*positions_of(recorded, trace, params)[:1], "guessed", params.max_tokens) for trace in traces]
    for length in LENGTHS:
        real = opened(runner, f"draft-model k={length}").run(PROMPTS, params)
        assert [trace.completion.token_ids for trace in real] == [trace.completion.token_ids for trace in traces]
        assert [walk.steps(length) for walk in walks] == [len(trace.steps) for trace in real]
    assert [walk.steps(0) for walk in walks] == [len(trace.completion.token_ids) for trace in traces]


@pytest.mark.parametrize("stop", ["entropy stop_below=0.6", "product stop_below=0.4"])
def test_stop_rules_equal_real_runs(pair: tuple[str, str], stop: str) -> None:
    params, configuration = SamplingParams(max_tokens=40), f"draft-model k=6 stop={stop}"
    runner = runner_of(pair, "draft-model k=3", configuration)
    recorded = opened(runner, "draft-model k=3")
    rule = ConfidenceSettings(stop=stop.split()[0], stop_below=float(stop.rsplit("=", 1)[1]))  # type: ignore[arg-type]
    real = opened(runner, configuration).run(PROMPTS, params)
    for trace, actual in zip(recorded.run(PROMPTS, params), real, strict=True):
        walk = walk_of(positions_of(recorded, trace, params)[0], "guessed", params.max_tokens, rule)
        assert walk.steps(6, rule) == len(actual.steps)
        assert walk.steps(6) < len(actual.steps)


def test_shared_noise_leaves_nothing_to_chance(pair: tuple[str, str]) -> None:
    """With the drafter-invariant verifier a sampled text is replayed as exactly as a greedy one."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=11)
    runner = runner_of(pair, *(f"draft-model k={length} verifier=gumbel" for length in LENGTHS))
    recorded = opened(runner, "draft-model k=2 verifier=gumbel")
    trace = recorded.run(PROMPTS[:1], params)[0]
    walk = walk_of(positions_of(recorded, trace, params)[0], "guessed", params.max_tokens)
    for length in LENGTHS:
        real = opened(runner, f"draft-model k={length} verifier=gumbel").run(PROMPTS[:1], params)[0]
        assert real.completion.token_ids == trace.completion.token_ids
        assert walk.steps(length) == len(real.steps)


def test_temperature_zero_at_sampled_positions_is_agreement(pair: tuple[str, str]) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2)
    recorded = opened(runner_of(pair, "draft-model k=3"), "draft-model k=3")
    found, limit = positions_of(recorded, recorded.run(PROMPTS[:1], params)[0], params)
    np.testing.assert_array_equal(favourites_walk(found, limit).agrees, found.p_best == found.q_best)


# ------------------------------------------------ sampled: exactly, by enumeration


@pytest.mark.parametrize(("verifier", "mode"), [("token", "token"), ("block", "block")])
@pytest.mark.parametrize("seed", [0, 5])
def test_survival_given_the_text_is_that_of_the_verifier(verifier: str, mode: Mode, seed: int) -> None:
    """P(at least i kept and the text begins with y) / P(the text begins with y), by enumerating every outcome of one step."""
    target, draft = tables(seed)
    proposals = sampled_drafts(draft, 3)
    found = enumerate_step(VERIFIERS.load(verifier)().verify, proposals, target_pass(target, proposals))
    joint: dict[Tokens, float] = {}  # (y_1 .. y_i) -> P(at least i kept, and they are these)
    counts = found.verdict.lists.num_accepted
    for row, text in enumerate(emitted_tokens(found, proposals)):
        for length in range(1, counts[row] + 1):
            joint[text[:length]] = joint.get(text[:length], 0.0) + float(found.weights[row])
    for text in itertools.product(range(3), repeat=3):
        walk = _walk_along(target, draft, text, mode)
        chance = np.cumprod([float(target.probs(text[:index])[token]) for index, token in enumerate(text)])
        given = [joint.get(text[:length], 0.0) / chance[length - 1] for length in (1, 2, 3)]
        np.testing.assert_allclose(walk.survival(0, 3), given, atol=1e-9)


def _walk_along(target: TableModel, draft: TableModel, text: Tokens, mode: Mode) -> TextWalk:
    p, q = (
        np.array([float(model.probs(text[:index])[token]) for index, token in enumerate(text)]) for model in (target, draft)
    )
    return TextWalk(mode, 99, np.zeros(3), p / q, np.ones(3), q)


def test_steps_add_up_where_steps_can_start() -> None:
    """Two positions, each kept with probability 1/2: 1 step if the first is kept (with the token behind), else 2."""
    walk = TextWalk("token", 99, np.zeros(2), np.array([2.0, 2.0]), np.ones(2), np.ones(2))
    assert walk.steps(1) == pytest.approx(0.5 * 1 + 0.5 * 2)
    assert walk.steps(0) == 2
    assert TextWalk("token", 2, *(walk.agrees, walk.ratio, walk.bound, walk.prob)).steps(5) == pytest.approx(1.5)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "lengths"), [
    ("block", (6,)), *(pytest.param(mode, (2, 3, 6), marks=pytest.mark.nightly) for mode in ("token", "block")),
])  # fmt: skip
def test_expectation_agrees_with_many_seeds(pair: tuple[str, str], mode: Mode, lengths: tuple[int, ...]) -> None:
    """Steps predicted from runs at 3 tokens, realised at other lengths with other seeds: means within 3.5 standard errors."""
    seeds, base = 32, SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
    names = {length: f"draft-model k={length} verifier={mode}" for length in {3, *lengths}}
    runner = runner_of(pair, *names.values())
    params = [replace(base, seed=seed) for seed in range(seeds)]
    recorded = opened(runner, names[3])
    traces = recorded.run([PROMPTS[0]] * seeds, params)
    walks = [walk_of(positions_of(recorded, trace, one)[0], mode, 30) for trace, one in zip(traces, params, strict=True)]
    for length in lengths:
        other = [replace(base, seed=1000 + seed) for seed in range(seeds)]
        real = opened(runner, names[length]).run([PROMPTS[0]] * seeds, other)
        predicted = np.array([walk.steps(length) for walk in walks])
        realised = np.array([len(trace.steps) for trace in real])
        error = np.hypot(predicted.std(ddof=1), realised.std(ddof=1)) / np.sqrt(seeds)
        assert abs(predicted.mean() - realised.mean()) < 3.5 * error
        assert error < 0.1 * realised.mean()  # else nothing was tested
