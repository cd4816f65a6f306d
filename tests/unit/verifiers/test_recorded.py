"""Recorded verdicts against the verifiers whose code they replay, on a simulated CUDA device."""

from __future__ import annotations

import pytest
import torch

from outrider.sampling.distribution import BatchSampling, distribution
from outrider.sampling.params import SamplingParams
from outrider.sampling.rng import KeyedStreams
from outrider.types import Draft
from outrider.verifiers.base import Verifier
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.coupled import CoupledVerifier
from outrider.verifiers.recorded import RecordedVerdicts
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traversal import TraversalVerifier
from tests.simulated_cuda import SimulatedCuda

ROWS = 3
NODES = 4
VOCAB = 19
DEVICE = torch.device("cuda", 0)


def _case(number: int, *, drawn: bool) -> tuple[torch.Tensor, Draft, list[int]]:
    torch.manual_seed(number)
    scores = torch.randn(ROWS, NODES + 1, VOCAB) * 2
    probs = (torch.randn(ROWS, NODES + 1, VOCAB) * 2).softmax(-1)
    tokens = probs[:, :-1].flatten(0, 1).multinomial(1).view(ROWS, NODES)
    lengths = torch.tensor([NODES, 2, 0])
    return scores, Draft(tokens, lengths, probs=probs if drawn else None), [5 + number, 70, 3]


def _moved(draft: Draft) -> Draft:
    return Draft(
        draft.tokens.to(DEVICE),
        draft.lengths.to(DEVICE),
        probs=None if draft.probs is None else draft.probs.to(DEVICE),
    )


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(
    "rule", [TokenVerifier(), BlockVerifier(), TraversalVerifier()], ids=lambda rule: rule.name
)
def test_a_replay_decides_what_the_verifier_does(rule: Verifier, drawn: bool) -> None:
    """Catches coins of another position, a temperature or draft that the recording froze, a row's
    padding that counts."""
    params = [SamplingParams(temperature=temperature) for temperature in (1.0, 0.7, 1.3)]
    sampling = BatchSampling.of(params, VOCAB)
    with SimulatedCuda():
        recorded = RecordedVerdicts()
        for number in range(6):
            scores, draft, starts = _case(number, drawn=drawn)
            rng, other = (KeyedStreams([1, 2, 3]) for _ in range(2))
            probs = distribution(scores, sampling, None, draft)
            expected = rule.verify(draft, probs, other, torch.tensor(starts)).lists
            there = _moved(draft)
            assert recorded.serve(rule, there, scores.to(DEVICE))
            found = recorded.verdict(rule, there, scores.to(DEVICE), rng, starts, sampling.options)
            assert found is not None
            assert found.lists == expected
        assert len(recorded.graphs) == 1


def test_what_is_not_recorded_is_left_to_the_reference() -> None:
    with SimulatedCuda():
        recorded = RecordedVerdicts()
        scores, draft, starts = _case(0, drawn=True)
        there = _moved(draft)
        tree = Draft(
            there.tokens,
            there.lengths,
            parents=torch.zeros_like(there.tokens) - 1,
            probs=there.probs,
        )
        assert not recorded.serve(TraversalVerifier(), tree, scores.to(DEVICE))
        assert not recorded.serve(CoupledVerifier(), there, scores.to(DEVICE))
        rng = KeyedStreams([1, 2, 3])
        for params in (
            SamplingParams(),
            SamplingParams(temperature=1.0, top_p=0.9),
            SamplingParams(temperature=1.0, top_k=3),
        ):
            options = BatchSampling.of([params] * ROWS, VOCAB).options
            assert (
                recorded.verdict(TokenVerifier(), there, scores.to(DEVICE), rng, starts, options)
                is None
            )


def test_scores_that_are_no_numbers_are_left_to_the_reference() -> None:
    """The reference names the row with invalid scores; a padding output may be anything."""
    options = BatchSampling.of([SamplingParams(temperature=1.0)] * ROWS, VOCAB).options
    scores, draft, starts = _case(0, drawn=True)
    with SimulatedCuda():
        recorded = RecordedVerdicts()
        rng = KeyedStreams([1, 2, 3])
        padded = scores.clone()
        padded[1, 3] = torch.nan
        assert (
            recorded.verdict(
                TokenVerifier(), _moved(draft), padded.to(DEVICE), rng, starts, options
            )
            is not None
        )
        scores[1, 2] = torch.nan
        assert (
            recorded.verdict(
                TokenVerifier(), _moved(draft), scores.to(DEVICE), rng, starts, options
            )
            is None
        )
