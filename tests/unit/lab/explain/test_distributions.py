"""Distributions computed afterwards are those that the steps saw: at every tested node, with every
sampling option and drafter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.lab.explain import distributions as module
from outrider.lab.explain.distributions import Distributions, forced_distributions
from outrider.lab.runner import Contender
from outrider.sampling.params import SamplingParams
from tests.helpers import tiny_llama
from tests.unit.lab.explain.pairs import PROMPTS, contender_of, finished, save_pair, spied

NUM_TOKENS = 40
SAMPLING = {
    "greedy": SamplingParams(max_tokens=NUM_TOKENS),
    "greedy with penalties": SamplingParams(
        max_tokens=NUM_TOKENS, repetition_penalty=1.3, presence_penalty=0.4
    ),
    "T=1": SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1),
    "T=0.7, top-k, top-p": SamplingParams(
        max_tokens=NUM_TOKENS, temperature=0.7, top_k=20, top_p=0.9, seed=2
    ),
    "min-p and penalties": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=1.2,
        min_p=0.02,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        seed=3,
    ),
    "bias and mask": SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=1.0,
        logit_bias={7: 2.0},
        allowed_token_ids=list(range(3, 120)),
        seed=4,
    ),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


def compare(
    contender: Contender, prompt: list[int], params: SamplingParams, tolerance: float = 2e-4
) -> list[Distributions]:
    """Run one prompt under a spy; hold every distribution that its steps saw on the kept path to
    the one that comes afterwards."""
    spy = spied(contender)
    trace = contender.run([prompt], params)[0]
    built = contender.built
    found = list(
        forced_distributions(
            built.target.lm, built.decoder.drafter, finished(contender, trace, params)
        )
    )
    assert [probs.token for probs in found] == list(trace.completion.token_ids)
    assert len(spy.seen) == len(trace.steps)
    for step, (draft, target, _) in zip(trace.steps, spy.seen, strict=True):
        for level, output in enumerate([0, *(node + 1 for node in step.path)][: step.taken]):
            probs = found[step.start + level]
            if params.is_greedy:  # a point mass there
                assert int(target[0, output].argmax()) == probs.token
            else:
                np.testing.assert_allclose(probs.p_soft, target[0, output].numpy(), atol=tolerance)
            has_children = bool(draft.children[0][output]) if output <= draft.num_nodes else False
            if draft.probs is not None and has_children and not params.is_greedy:
                assert probs.q is not None
                np.testing.assert_allclose(probs.q, draft.probs[0, output].numpy(), atol=tolerance)
            if params.is_greedy and has_children and draft.parents is None:
                assert probs.guess == step.tokens[output]
    assert (built.target.lm.kv.num_rows, len(built.decoder.rows)) == (0, 0)
    return found


@pytest.mark.parametrize("name", SAMPLING)
def test_chains_of_a_draft_model(
    pair: tuple[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches filters in another order, penalties that miss the path, a history off by one, chunks
    that lose their position."""
    monkeypatch.setattr(module, "CHUNK_NUMBERS", 257 * 7)  # several chunks, none as long as a step
    found = compare(contender_of(pair, "draft-model k=4"), PROMPTS[0], SAMPLING[name])
    assert all(
        (probs.p_open is probs.p_soft)
        == (name not in ("T=0.7, top-k, top-p", "min-p and penalties"))
        for probs in found
    )


@pytest.mark.parametrize("name", ["greedy", "T=1", "T=0.7, top-k, top-p"])
@pytest.mark.parametrize("tree", ["2x2", "best-first", "parallel:2"])
def test_trees(pair: tuple[str, str], name: str, tree: str) -> None:
    compare(contender_of(pair, f"draft-model k=6 tree={tree}"), PROMPTS[1], SAMPLING[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    ["quantised k=4 bits=8", "early-exit k=4 exit_layer=1", "early-exit k=4 skip_layers=0"],
)
@pytest.mark.parametrize("name", ["greedy", "T=1"])
def test_drafts_from_the_targets_own_weights(
    pair: tuple[str, str], drafter: str, name: str
) -> None:
    """Catches a draft on the target's cache that reads keys the target has not written, or leaves
    its own behind."""
    compare(contender_of(pair, drafter), PROMPTS[0], SAMPLING[name])


def test_a_drafter_without_model_is_asked(pair: tuple[str, str]) -> None:
    """`universal` speaks the draft's tokens: the distribution in the target's comes from the
    drafter itself."""
    found = compare(
        contender_of(pair, "universal k=3 method=shared"),
        PROMPTS[0],
        SAMPLING["T=0.7, top-k, top-p"],
    )
    assert all(probs.q is not None for probs in found)


def test_lookups_have_no_distribution(pair: tuple[str, str]) -> None:
    found = compare(contender_of(pair, "ngram k=4"), PROMPTS[0], SAMPLING["T=1"])
    assert all(probs.q is None and probs.guess is None and probs.outside is None for probs in found)


def test_shared_noise_is_known_again(pair: tuple[str, str]) -> None:
    """The guess is the draft's own winner of the race, at every position: what was drafted there."""
    params = SAMPLING["T=1"]
    contender = contender_of(pair, "draft-model k=4 verifier=gumbel")
    trace = contender.run([PROMPTS[0]], params)[0]
    text = finished(contender, trace, params)
    found = list(
        forced_distributions(contender.built.target.lm, contender.built.decoder.drafter, text)
    )
    for step in trace.steps:
        tested = min(len(step.path) + 1, len(step.tokens), step.taken)
        assert [probs.guess for probs in found[step.start : step.start + tested]] == step.tokens[
            :tested
        ]


@pytest.mark.slow
def test_a_narrower_draft_cannot_say_everything(tmp_path: Path) -> None:
    pair = save_pair(tmp_path, draft=tiny_llama(200, sharpness=2.0))
    found = compare(contender_of(pair, "draft-model k=3"), PROMPTS[2], SAMPLING["T=1"])
    for probs in found:
        assert probs.outside is not None
        assert np.flatnonzero(probs.outside).tolist() == list(range(200, 257))


def test_opened_distributions_are_those_without_filters(pair: tuple[str, str]) -> None:
    params = SAMPLING["T=0.7, top-k, top-p"]
    contender = contender_of(pair, "draft-model k=4")
    trace = contender.run([PROMPTS[0]], params)[0]
    text = finished(contender, trace, params)
    probs = list(
        forced_distributions(contender.built.target.lm, contender.built.decoder.drafter, text)
    )[5]
    assert (probs.p_soft > 0).sum() <= 20
    assert (probs.p_open > 0).all()
    kept = probs.p_soft > 0
    np.testing.assert_allclose(
        probs.p_soft[kept], probs.p_open[kept] / probs.p_open[kept].sum(), rtol=1e-4
    )


@pytest.mark.slow
def test_the_demo_pair(demo_contender: Contender) -> None:
    """The embedded pair, bfloat16: the bits of a chunk are those of a step."""
    prompt = demo_contender.built.target.tokenizer(
        "Question: Tom has 3 apples and buys 5 more. How many?\nAnswer:"
    )["input_ids"]
    for params in (
        SamplingParams(max_tokens=30),
        SamplingParams(max_tokens=30, temperature=1.0, seed=5),
    ):
        compare(demo_contender, prompt, params, tolerance=2e-2)


@pytest.fixture(scope="module")
def demo_contender() -> Contender:
    from outrider.build import Options
    from outrider.configuration import Configuration
    from outrider.lab.runner import Runner

    threads = torch.get_num_threads()
    configuration = Configuration.parse("draft-model k=5")
    made = Runner(Options("demo", threads=1), [configuration]).open(configuration)
    torch.set_num_threads(threads)
    return made
