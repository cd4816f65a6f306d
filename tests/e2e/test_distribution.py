"""The distribution of whole texts out of the real engine, against the one transformers gives them.

A random transformer of 12 tokens runs through everything that could bend its distribution: cache,
roll-back, batches of rows with their own prompts and options, draft model, verifier, keyed random
streams. The first three tokens of thousands of texts are counted and compared with exact
probabilities: transformers' forward over all 144 two-token continuations, its own logits processors
(and OpenAI's formula for presence and frequency penalties).

What is measured, and what it can see. G = 2 sum O ln(O/E) over the joint of the first three tokens
(outcomes expected fewer than 10 times are counted together), and over the first two. Under the
right distribution G is chi-squared; a distribution at total variation TV gives it a noncentrality
of at least 4 N TV^2. Pairs fill 25 to 45 cells here, so at N = 2500 and a level of 1.7e-4 (Holm's
strictest of six) TV = 0.09 is noticed with odds above 0.95 (the classic bug, resampling from p, is
off by 0.11 to 0.19 in the first token alone); the nightly version, N = 16 000 and up to 100 cells,
notices TV = 0.04 as surely (`test_power_is_as_stated` computes both). All p-values of a run are
judged together (Holm) at 0.001: one false alarm in a thousand changes of a random stream; with the
streams as they are the outcome is fixed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from outrider.build import Built, Options, build
from outrider.decode import Decoder
from outrider.draft_length import FixedLength
from outrider.models.lm import PassLimits
from outrider.parts import choose_parts
from outrider.sampling.params import SamplingParams
from outrider.sampling.rejection import acceptance
from outrider.sampling.rng import Purpose, Randomness
from outrider.types import Draft, Verdict
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier, chain_verdict
from tests.helpers import disturbed, make_row, save_checkpoint, tiny_llama, word_tokenizer

V = 12
DEPTH = 3
GAMMA = 3
ROWS = 192  # per batch
FALSE_ALARMS = 1e-3  # family-wise, per run
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kind of row: a prompt and its options."""

    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


CASES = (
    Case("temperature 1", (3,), SamplingParams(temperature=1.0, max_tokens=5)),
    Case("top-p", (9,), SamplingParams(temperature=0.8, top_p=0.85, max_tokens=5)),
    Case("penalties", (5, 6), SamplingParams(
        temperature=1.0, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.9, max_tokens=5)),
)  # fmt: skip


@dataclass
class World:
    """The models in the engine, and the target's exact distributions."""

    built: Built
    target: LlamaForCausalLM
    draft: LlamaForCausalLM

    def probs(self, model: LlamaForCausalLM, case: Case, output: tuple[int, ...]) -> np.ndarray:
        """(V,) the exact distribution after prompt + output."""
        return self.all_probs(model, case, [output])[0]

    def all_probs(
        self, model: LlamaForCausalLM, case: Case, outputs: list[tuple[int, ...]]
    ) -> np.ndarray:
        """(len(outputs), V) by transformers alone; outputs of one length."""
        ids = torch.tensor([[*case.prompt, *output] for output in outputs])
        with torch.inference_mode():
            scores = model(input_ids=ids).logits[:, -1].double()
        return processed(scores, ids, len(case.prompt), case.params).softmax(dim=-1).numpy()

    def joint(self, case: Case, depth: int) -> np.ndarray:
        """(V,) * depth: exact probability of every beginning."""
        total = np.ones(())
        for length in range(depth):
            outputs = list(itertools.product(range(V), repeat=length))
            probs = self.all_probs(self.target, case, outputs).reshape((V,) * (length + 1))
            total = total[..., None] * probs
        return total


def processed(scores: Tensor, ids: Tensor, num_prompt: int, params: SamplingParams) -> Tensor:
    """Transformers' processors in transformers' order, after them OpenAI's two penalties where the
    pipeline has them."""
    penalties = LogitsProcessorList()
    if params.repetition_penalty != 1:
        penalties.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    scores = penalties(ids, scores.clone())
    counts = torch.zeros_like(scores).scatter_add_(
        1, ids[:, num_prompt:], torch.ones_like(ids[:, num_prompt:]).double()
    )
    scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return warpers(ids, scores)


@pytest.fixture(scope="module")
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """On the runtime that is this fixture's parameter, if it has one."""
    root = tmp_path_factory.mktemp("distribution")
    threads = torch.get_num_threads()
    target = tiny_llama(V, seed=3, sharpness=2.0, **SIZES)
    draft = disturbed(target, 0.35)
    for name, model in (("target", target), ("draft", draft)):
        save_checkpoint(root / name, model, word_tokenizer(V))
    options = Options(
        target=str(root / "target"),
        draft=str(root / "draft"),
        drafter="draft-model",
        dtype="float32",
        runtime=getattr(request, "param", "auto"),
        threads=1,
    )
    built = build(options)
    for loaded in (built.target, built.draft):
        # whole batches in one pass: the distribution does not hang on the last bit
        loaded.lm.limits = PassLimits()
    yield World(built, target, draft)
    torch.set_num_threads(threads)


class ResamplesFromTarget(Verifier):
    """The classic bug: after a rejection the next token comes from p, not from the residual."""

    name = "broken"
    lossless = False

    def verify(
        self, draft: Draft, target_probs: Tensor, rng: Randomness, positions: Tensor
    ) -> Verdict:
        accepted = rng.bernoulli(acceptance(target_probs, draft), Purpose.ACCEPT, positions)
        num_accepted = accepted.long().cumprod(dim=1).sum(dim=1)
        probs = target_probs[torch.arange(len(num_accepted)), num_accepted]
        return chain_verdict(
            draft, num_accepted, rng.categorical(probs, Purpose.RESAMPLE, positions, 0)
        )


def make_decoder(
    world: World,
    drafter: str,
    verifier: Verifier,
    options: dict[str, str] | None = None,
    nodes: int = GAMMA,
) -> Decoder:
    parts = choose_parts(drafter, options or {}, "auto", {}, nodes, lossy=False)
    return Decoder(
        world.built.target.lm,
        parts.make_drafter(world.built.target, world.built.draft),
        verifier,
        FixedLength(nodes),
    )


def sample(decoder: Decoder, num_texts: int) -> dict[str, Counter]:
    """Beginnings of `num_texts` texts of every case. Rows of all cases share batches, joining as
    others leave."""
    kinds = itertools.cycle(CASES)
    counts: dict[str, Counter] = {case.name: Counter() for case in CASES}
    waiting = len(CASES) * num_texts
    while waiting or len(decoder.rows):
        while waiting and len(decoder.rows) < ROWS:
            case = next(kinds)
            decoder.add(make_row(case.prompt, case.params, seed=waiting, number=CASES.index(case)))
            waiting -= 1
        decoder.step()
        for index in reversed(range(len(decoder.rows))):
            if len(decoder.rows[index].output) >= DEPTH:
                row = decoder.remove(index)
                counts[CASES[row.request].name][tuple(row.output[:DEPTH])] += 1
    return counts


def p_value(counts: Counter, joint: np.ndarray) -> float:
    """G-test of counted beginnings against their exact joint distribution (V,) * depth."""
    depth = joint.ndim
    num_texts = sum(counts.values())
    observed = np.zeros_like(joint)
    for beginning, count in counts.items():
        observed[beginning[:depth]] += count
    if observed[joint < 1e-12].any():
        return 0.0  # emitted something impossible
    expected = joint * num_texts
    rare = expected < 10
    cells = [(o, e) for o, e in zip(observed[~rare], expected[~rare], strict=True)]
    if expected[rare].sum() > 0:
        cells.append((observed[rare].sum(), expected[rare].sum()))
    g = 2 * sum(o * np.log(o / e) for o, e in cells if o)
    return float(stats.chi2.sf(g, len(cells) - 1))


def holm(p_values: dict[str, float]) -> list[str]:
    """Names rejected at the family-wise level."""
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    rejected = []
    for rank, (name, p) in enumerate(ordered):
        if p > FALSE_ALARMS / (len(ordered) - rank):
            break
        rejected.append(f"{name}: p = {p:.1e}")
    return rejected


def verdicts(world: World, decoder: Decoder, num_texts: int) -> dict[str, float]:
    counts = sample(decoder, num_texts)
    return {
        f"{case.name}, {depth} tokens": p_value(counts[case.name], world.joint(case, depth))
        for case in CASES
        for depth in (2, 3)
    }


BY_DAY = [
    ("draft-model", {}, "block", GAMMA),
    ("draft-model", {"tree": "2x2"}, "traversal", 6),
    ("composite", {"parts": "draft-model,ngram-cache"}, "multi-round", 5),
]
CLOSELY = [
    ("draft-model", {}, "gumbel", GAMMA), ("draft-model", {"tree": "parallel:2"}, "multi-round", 4),
    ("composite", {"parts": "draft-model,ngram-cache"}, "traversal", 5),
    ("none", {}, "block", GAMMA), ("draft-model", {}, "token", GAMMA), ("draft-model", {"stop": "entropy"}, "block", GAMMA),
    ("draft-model", {"tree": "2x2"}, "gumbel", 6), ("recycling", {}, "traversal", 6), ("lookahead", {}, "multi-round", 6),
    ("suffix", {"tree": "true"}, "traversal", 6), ("universal", {"method": "shared"}, "block", GAMMA),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "drafter", "options", "verifier", "nodes"),
    [
        pytest.param("eager", *BY_DAY[0], marks=pytest.mark.nightly),
        *(("auto", *pair) for pair in BY_DAY),
    ],
    indirect=["world"],
)
def test_texts_follow_the_target_distribution(
    world: World, drafter: str, options: dict[str, str], verifier: str, nodes: int
) -> None:
    """Catches what no unit of the engine shows alone: stale keys, coins met twice, rows that share
    a stream."""
    assert not holm(
        verdicts(
            world, make_decoder(world, drafter, VERIFIERS.load(verifier)(), options, nodes), 2500
        )
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("drafter", "options", "verifier", "nodes"), [*BY_DAY, *CLOSELY])
def test_texts_follow_the_target_distribution_closely(
    world: World, drafter: str, options: dict[str, str], verifier: str, nodes: int
) -> None:
    """The same and more pairs, with six times the texts: sees a third of the deviation."""
    assert not holm(
        verdicts(
            world, make_decoder(world, drafter, VERIFIERS.load(verifier)(), options, nodes), 16_000
        )
    )


@pytest.mark.slow
def test_a_wrong_residual_is_noticed(world: World) -> None:
    """Catches a distribution test that cannot fail: resampling from p must be seen in every case."""
    p_values = verdicts(world, make_decoder(world, "draft-model", ResamplesFromTarget()), 1500)
    assert len(holm(p_values)) == len(p_values), p_values


@pytest.mark.parametrize(("num_texts", "num_cells", "tv"), [(2500, 45, 0.09), (16_000, 100, 0.04)])
def test_power_is_as_stated(num_texts: int, num_cells: int, tv: float) -> None:
    """Catches a docstring that promises more than the sample gives."""
    threshold = stats.chi2.isf(FALSE_ALARMS / 6, num_cells - 1)
    assert stats.ncx2.sf(threshold, num_cells - 1, 4 * num_texts * tv**2) > 0.95


# ---------------------------------------------------------------- acceptance identity


def accepted_in_first_step(world: World, verifier: str, case: Case, num_texts: int) -> np.ndarray:
    """(num_texts,) draft tokens accepted by the first step of each text."""
    decoder = make_decoder(world, "draft-model", VERIFIERS.load(verifier)())
    lengths: list[int] = []
    while len(lengths) < num_texts:
        for seed in range(ROWS):
            decoder.add(make_row(case.prompt, case.params, seed=len(lengths) + seed + 10**6))
        lengths += [taken - 1 for taken in decoder.step()]
        while len(decoder.rows):
            decoder.remove(0)
    return np.array(lengths[:num_texts])


def survival(
    world: World, case: Case, weigh: Callable[[np.ndarray, np.ndarray, float], float]
) -> list[float]:
    """Exact P(at least i draft tokens kept), i = 1 .. GAMMA, by enumeration of every draft.

    `weigh(p, q, rho)` is what a token's p, q and its prefix's weight rho make of the weight; 1 at
    the start.
    """
    # prefix -> (probability that it is drafted, its weight)
    alive: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 1.0)}
    result = []
    for _ in range(GAMMA):
        following = {}
        all_probs = (
            world.all_probs(model, case, list(alive)) for model in (world.target, world.draft)
        )
        for (prefix, (drafted, weight)), p, q in zip(alive.items(), *all_probs, strict=True):
            for token in np.flatnonzero(q):
                following[*prefix, token] = (drafted * q[token], weigh(p[token], q[token], weight))
        alive = following
        result.append(sum(drafted * weight for drafted, weight in alive.values()))
    return result


RULES: dict[str, Callable[[float, float, float], float]] = {
    "token": lambda p, q, weight: weight * min(1.0, p / q),  # so P(first kept) = sum of min(p, q)
    # Sun et al. 2403.10444: P(kept at least i | draft) = rho_i
    "block": lambda p, q, weight: min(1.0, weight * p / q),
}


# by day every case with one rule, and the other rule with one case
@pytest.mark.slow
@pytest.mark.parametrize(
    ("verifier", "case"),
    [
        pytest.param(
            verifier,
            case,
            id=f"{verifier}-{case.name}",
            marks=() if verifier == "block" or case is CASES[1] else pytest.mark.nightly,
        )
        for verifier in RULES
        for case in CASES
    ],
)
def test_acceptance_identity(world: World, verifier: str, case: Case) -> None:
    """Catches too FEW acceptances, which leave the text right and only the speed wrong.

    Measured P(at least i tokens kept) within 4.5 standard errors (odds 7e-6 each, 18 comparisons)
    of its exact value.
    """
    num_texts = 3000
    # longer prompts are fed row by row, which is most of the time
    case = replace(case, prompt=case.prompt[:1])
    accepted = accepted_in_first_step(world, verifier, case, num_texts)
    for position, exact in enumerate(survival(world, case, RULES[verifier]), start=1):
        measured = (accepted >= position).mean()
        error = np.sqrt(exact * (1 - exact) / num_texts)
        assert abs(measured - exact) <= 4.5 * error + 1e-6, (
            f"position {position}: {measured:.4f}, exact {exact:.4f}"
        )


@pytest.mark.slow
def test_shared_noise_accepts_within_its_bounds(world: World) -> None:
    """Catches a drafter that ignores the shared noise: then agreement falls to sum p q, below the
    guaranteed floor."""
    case = CASES[0]
    num_texts = 3000
    p, q = (world.probs(model, case, ()) for model in (world.target, world.draft))
    overlap = np.minimum(p, q).sum()
    measured = (accepted_in_first_step(world, "gumbel", case, num_texts) >= 1).mean()
    error = 4.5 * np.sqrt(0.25 / num_texts)
    assert overlap / (2 - overlap) - error <= measured <= overlap + error
    assert (p * q).sum() < overlap / (2 - overlap) - error, (
        "the floor proves nothing for these two distributions"
    )
