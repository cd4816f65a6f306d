"""The one place where logits become a distribution: against transformers' own processors, per path,
row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.errors import ConfigError, NumericalError
from outrider.sampling import distribution as distributions
from outrider.sampling.distribution import BatchSampling, History, distribution
from outrider.sampling.draft_filters import floor
from outrider.sampling.params import SamplingParams
from outrider.sampling.warpers import apply_top_p, apply_top_p_by_sorting
from outrider.types import Draft

VOCAB = 50


def probs_of(
    logits: Tensor,
    params: list[SamplingParams],
    texts: list[list[int]] | None = None,
    draft: Draft | None = None,
) -> Tensor:
    sampling = BatchSampling.of(params, logits.shape[2])
    history = None
    if sampling.needs_history:
        texts = texts or [[] for _ in params]
        history = History.start(texts, [[] for _ in params], logits.shape[2])
    return distribution(logits, sampling, history, draft)


def transformers_probs(logits: Tensor, params: SamplingParams, text: list[int]) -> Tensor:
    """(V,) fp32: transformers' processors in the order of its `generate`."""
    chain = LogitsProcessorList()
    if params.repetition_penalty != 1:
        chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1:
        chain.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        chain.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chain.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        chain.append(MinPLogitsWarper(params.min_p))
    return chain(torch.tensor([text]), logits[None].clone())[0].softmax(-1)


options = st.builds(
    SamplingParams,
    temperature=st.sampled_from([1.0, 0.3, 0.7, 1.8]),
    top_k=st.sampled_from([0, 1, 3, 20, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.05]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(params=options, seed=st.integers(0, 10_000), is_tied=st.booleans())
def test_equals_transformers(params: SamplingParams, seed: int, is_tied: bool) -> None:
    """Order, edges and ties (coarse logits repeat values, so top-k and top-p cut through ties) as
    transformers has them.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(1, 1, VOCAB, generator=generator)
    logits = logits.round() if is_tied else logits
    text = torch.randint(VOCAB, (9,), generator=generator).tolist()
    ours = probs_of(logits, [params], [text])[0, 0]
    theirs = transformers_probs(logits[0, 0], params, text)
    # which of equals top-p drops is up to transformers' unstable sort
    if is_tied and params.top_p < 1:
        ours = ours.sort().values
        theirs = theirs.sort().values
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scale", [0.3, 3.0, 8.0])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("third", [0.5, 1.0])
def test_fast_top_p_equals_the_full_sort(scale: float, is_tied: bool, third: float) -> None:
    """Flat distributions (head too small), peaked ones, and ties across the edge; with a row with
    top-p off, and without."""
    generator = torch.Generator().manual_seed(1)
    scores = scale * torch.randn(4, 3, 900, generator=generator)
    scores = (scores * 2).round() / 2 if is_tied else scores
    top_p = torch.tensor([0.9, 0.3, third, 0.999])[:, None, None]
    assert torch.equal(apply_top_p(scores, top_p, head=64), apply_top_p_by_sorting(scores, top_p))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(params=options, seed=st.integers(0, 10_000), is_tied=st.booleans())
def test_drafts_are_filtered_as_the_target_is(
    params: SamplingParams, seed: int, is_tied: bool
) -> None:
    """But for equals at the edge of a nucleus, which all stay."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, 3, VOCAB, generator=generator)
    logits = logits.round() if is_tied else logits
    sampling = BatchSampling.of(
        [replace(params, repetition_penalty=1.0), SamplingParams(temperature=0.9)], VOCAB
    )
    exact = distribution(logits, sampling)
    ours = distribution(logits, sampling, drafting=True)
    torch.testing.assert_close(ours.sum(-1), torch.ones(2, 3))
    assert torch.equal(ours[1], exact[1]), "a row without filters is left alone to the last bit"
    if not is_tied:
        assert torch.equal(ours > 0, exact > 0)
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-7)
    edge = torch.where(exact > 0, logits, torch.inf).amin(-1, keepdim=True)
    assert torch.equal(ours > 0, (exact > 0) | ((logits == edge) & (ours > 0)))


def test_a_filter_that_keeps_more_than_the_head_does_nothing_to_a_draft() -> None:
    """Beside rows whose filters do: catches a nucleus cut off at the head, and a k that is clamped
    to it."""
    scores = torch.randn(4, 3, 900, generator=torch.Generator().manual_seed(1))
    scores[1] *= 8
    top_k, top_p = (
        torch.tensor(each)[:, None, None] for each in ([0, 0, 65, 64], [0.99, 0.9, 1.0, 1.0])
    )
    kept = scores >= floor(scores, top_k, top_p, torch.zeros(4, 1, 1), head=64)
    assert kept[0].all()
    assert kept[2].all()
    assert torch.equal(kept[1], apply_top_p_by_sorting(scores, top_p).isfinite()[1])
    assert kept[3].sum(-1).tolist() == [64] * 3


def test_greedy_is_a_point_mass_at_the_lowest_of_equals() -> None:
    """Long rows, so that vectorised and threaded reductions are covered; the tie crosses their
    blocks."""
    logits = torch.randn(2, 3, 70_000).clamp(max=4)
    logits[..., [317, 41_000, 69_999]] = 9.0
    probs = probs_of(logits, [SamplingParams()] * 2)
    assert (probs.argmax(-1) == 317).all()
    assert (probs.sum(-1) == 1).all()
    assert (probs.amax(-1) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_score_is_the_one_that_torch_finds(dtype: torch.dtype) -> None:
    scores = torch.randint(-9, 9, (3, 4, VOCAB)).to(dtype)  # ties everywhere
    scores[0, 0] = -torch.inf  # everything masked
    scores[0, 1, 7] = torch.nan
    scores[0, 2, 5], scores[0, 2, 6] = torch.inf, torch.nan  # NaN wins over everything
    scores[1, 0], scores[1, 0, 3] = -0.0, 0.0  # equal: the first
    expected = scores.max(dim=-1)
    found = distributions._first_max(scores)
    assert torch.equal(found[1], expected.indices)
    assert torch.equal(found[0].nan_to_num(nan=99.0), expected.values.nan_to_num(nan=99.0))
    assert found[0].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_logits_of_any_dtype_give_an_fp32_distribution(dtype: torch.dtype) -> None:
    logits = torch.randn(1, 2, VOCAB).to(dtype)
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        assert probs_of(logits, [params]).dtype == torch.float32
    torch.testing.assert_close(
        probs_of(logits, [SamplingParams(temperature=1.0)]),
        logits.float().softmax(-1),
        rtol=1e-6,
        atol=0,
    )


MANY = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0.9, top_p=0.4),
    SamplingParams(temperature=0.7, top_k=5, min_p=0.1),
    SamplingParams(temperature=1.0, top_k=3),
    SamplingParams(temperature=1.0, min_p=0.02),
    SamplingParams(presence_penalty=1.0),
    SamplingParams(temperature=1.0, presence_penalty=-0.5),
    SamplingParams(temperature=1.3, repetition_penalty=1.4, frequency_penalty=0.5),
    SamplingParams(temperature=0.8, repetition_penalty=0.9, frequency_penalty=1.5),
    SamplingParams(temperature=1.0, logit_bias={3: 2.5}),
    SamplingParams(temperature=1.0, logit_bias={3: -1.5, 4: 1.0}, repetition_penalty=1.2),
    SamplingParams(allowed_token_ids=[4, 5, 6]),
]


def test_a_row_does_not_depend_on_its_neighbours_to_the_bit() -> None:
    """Batch invariance: what a neighbour asks for must not touch, reorder or re-round a row. Every
    option has two values here."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(len(MANY), 4, 700, generator=generator)
    texts = torch.randint(700, (len(MANY), 12), generator=generator).tolist()
    tokens = torch.randint(700, (len(MANY), 3), generator=generator)
    draft = Draft(tokens, torch.full((len(MANY),), 3))
    together = probs_of(logits, MANY, texts, draft)
    for row, params in enumerate(MANY):
        alone = probs_of(
            logits[row : row + 1],
            [params],
            [texts[row]],
            Draft(tokens[row : row + 1], torch.tensor([3])),
        )
        assert torch.equal(together[row], alone[0]), f"row {row}: {params}"


def plain_scores(
    logits: Tensor, params: SamplingParams, prompt: list[int], output: list[int]
) -> Tensor:
    """The bias's and the penalties' definition, token by token: (V,) -> (V,)."""
    scores = logits.clone()
    for token in range(len(scores)):
        scores[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            rate = params.repetition_penalty
            scores[token] = scores[token] * rate if scores[token] < 0 else scores[token] / rate
        scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] -= params.presence_penalty * (token in output)
    return scores


@pytest.mark.parametrize("parents", [None, [-1, -1, 0, 0, 1, 3]])
def test_penalties_follow_the_path(parents: list[int] | None) -> None:
    """Output m sees prompt, committed output and ONLY the nodes that lead to it, in chains and in
    trees."""
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4
    )
    tokens = [2, 5, 2, 7, 5, 2]
    chain = [-1, 0, 1, 2, 3, 4]
    logits = torch.randn(1, 7, 10, dtype=torch.float64)
    prompt = [1, 5]
    output = [8, 8]
    draft = Draft(
        torch.tensor([tokens]),
        torch.tensor([6]),
        parents=None if parents is None else torch.tensor([parents]),
    )
    sampling = BatchSampling.of([params], 10)
    history = History.start([prompt], [output], 10)
    probs = distribution(logits, sampling, history, draft, dtype=torch.float64)
    for m in range(7):
        path = []
        node = m - 1
        while node >= 0:
            path.append(tokens[node])
            node = (parents or chain)[node]
        expected = plain_scores(logits[0, m], params, prompt, output + path).softmax(-1)
        torch.testing.assert_close(probs[0, m], expected, rtol=1e-12, atol=1e-15)
        one = distribution(
            logits[:, m : m + 1], sampling, history, draft, dtype=torch.float64, first_node=m
        )
        assert torch.equal(one[0, 0], probs[0, m])


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("ban", [{}, {"allowed_token_ids": [1, 2, 7]}])
def test_bias_comes_before_penalties(penalty: str, ban: dict[str, list[int]]) -> None:
    """A bias that changes a score's sign decides which way a repetition penalty works; a banned
    token's brings it not back."""
    params = SamplingParams(
        temperature=1.0, logit_bias={1: -3.0, 2: 3.0, 5: 0.5}, **{penalty: 1.7}, **ban
    )
    logits = torch.tensor([[[0.5, 1.0, -1.0, 2.0, 0.1, -0.2, 1.5, 0.3]]], dtype=torch.float64)
    history = History.start([[1, 2]], [[5, 5, 1]], 8)
    ours = distribution(logits, BatchSampling.of([params], 8), history, dtype=torch.float64)[0, 0]
    scores = plain_scores(logits[0, 0], params, [1, 2], [5, 5, 1])
    for token in range(8):
        if ban and token not in ban["allowed_token_ids"]:
            scores[token] = -torch.inf
    torch.testing.assert_close(ours, scores.softmax(-1), rtol=1e-12, atol=0)


def test_history_kept_incrementally_equals_a_fresh_one() -> None:
    history = History.start([[1, 2], [3]], [[], [4]], 9)
    history.append(0, [5, 5, 6])
    history.add_row([7])
    history.append(2, [8])
    history.swap_remove(0)
    fresh = History.start([[7], [3]], [[8], [4]], 9)
    assert torch.equal(history.prompt_mask, fresh.prompt_mask)
    assert torch.equal(history.output_counts, fresh.output_counts)
    history.swap_remove(1)
    assert history.prompt_mask.shape == (1, 9)


def test_mask_and_bias() -> None:
    logits = torch.zeros(1, 1, 6)
    probs = probs_of(
        logits, [SamplingParams(temperature=1.0, allowed_token_ids=[1, 4], logit_bias={4: 1.0})]
    )[0, 0]
    expected = torch.tensor([0, 1, 0, 0, torch.e, 0]) / (1 + torch.e)
    torch.testing.assert_close(probs, expected)
    assert probs_of(logits, [SamplingParams(allowed_token_ids=[4, 2])])[0, 0].argmax() == 2


@pytest.mark.parametrize("options", [{"logit_bias": {6: 1.0}}, {"allowed_token_ids": [2, 6]}])
def test_ids_outside_the_vocabulary_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match="names token 6, but the vocabulary has 6 tokens"):
        BatchSampling.of([SamplingParams(**options)], 6)


@pytest.mark.parametrize("drafting", [False, True])
@pytest.mark.parametrize(
    ("options", "num_kept"),
    [
        ([{"top_k": 3}, {"top_k": 1}, {"top_k": 5}, {}], [3, 1, 5, 8]),
        ([{"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.98}, {}], [1, 3, 5, 8]),
        ([{"min_p": 0.5}, {"min_p": 0.1}, {"min_p": 0.02}, {}], [1, 3, 5, 8]),
    ],
)
def test_each_row_is_filtered_by_its_own_value(
    options: list[dict], num_kept: list[int], drafting: bool
) -> None:
    """Laws that fall by more than half from token to token. Catches a value of a neighbour, and a
    bound that is one too large."""
    logits = -0.9 * torch.arange(8.0).expand(len(options), 2, 8)
    sampling = BatchSampling.of([SamplingParams(temperature=1.0, **each) for each in options], 8)
    law = distribution(logits, sampling, drafting=drafting)
    assert (law > 0).sum(-1).tolist() == [[count] * 2 for count in num_kept]


def test_a_top_k_that_no_number_of_the_batch_holds_keeps_the_whole_vocabulary() -> None:
    """A client may send whole numbers of any size."""
    logits = torch.randn(1, 1, 6)
    huge, off = (
        BatchSampling.of([SamplingParams(temperature=1.0, top_k=k)], 6) for k in (10**400, 0)
    )
    assert torch.equal(distribution(logits, huge), distribution(logits, off))


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, top_k=3)]
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_logits_are_refused_by_row_but_not_in_padding(
    params: SamplingParams, value: float
) -> None:
    """NaN must stop generation with an error, yet padding nodes of a short row may hold anything."""
    logits = torch.randn(2, 3, 600)
    logits[1, 2, 17] = value
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(NumericalError, match="row 1, output 2"):
        probs_of(logits, [params] * 2, draft=Draft(tokens, torch.tensor([2, 2])))
    probs = probs_of(logits, [params] * 2, draft=Draft(tokens, torch.tensor([2, 1])))
    assert torch.isfinite(probs).all()
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3))


def test_everything_masked_is_refused() -> None:
    logits = torch.full((1, 1, 5), -torch.inf)
    for params in (SamplingParams(), SamplingParams(temperature=1.0)):
        with pytest.raises(NumericalError, match="row 0, output 0"):
            probs_of(logits, [params])


def test_wrong_shapes_and_missing_history_are_named() -> None:
    with pytest.raises(ValueError, match=r"must be \(1, M, 5\), got \(2, 1, 5\)"):
        distribution(torch.zeros(2, 1, 5), BatchSampling.of([SamplingParams()], 5))
    with pytest.raises(ValueError, match="needs the History"):
        distribution(
            torch.zeros(1, 1, 5), BatchSampling.of([SamplingParams(presence_penalty=1.0)], 5)
        )
