"""The first token's distribution, exactly: what is added up must be what the verifier does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.lab.certify import first_token as module
from outrider.lab.certify.first_token import LIMIT, UnfamiliarError, emitted_probs
from outrider.verifiers import VERIFIERS
from outrider.verifiers.base import Verifier
from tests.unit.lab.certify import broken

V = 80


def random_distributions(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(2, V, generator=generator) * 2).softmax(-1)
    return p, q


def excess(verifier: Verifier, p: Tensor, q: Tensor | None, token: int = 3) -> float:
    _, probs = emitted_probs(verifier, p, q, token, as_tree=verifier.shape == "tree")
    return float((probs - p.double()).clamp(min=0).sum())


@pytest.mark.parametrize("name", [name for name in VERIFIERS.names() if VERIFIERS.load(name).lossless])
@pytest.mark.parametrize("kind", ["drawn", "placed"])
def test_sound_verifiers_emit_p(name: str, kind: str) -> None:
    p, q = random_distributions()
    verifier = VERIFIERS.load(name)()
    covered, probs = emitted_probs(verifier, p, q if kind == "drawn" else None, 3, as_tree=verifier.shape == "tree")
    assert covered == pytest.approx(1, abs=1e-6)
    assert torch.allclose(probs, p.double(), atol=1e-6)


def test_the_classic_bug_in_closed_form() -> None:
    """min(p, q) + (1 - sum min(p, q)) p, to the last digit that fp32 has."""
    p, q = random_distributions()
    kept = torch.minimum(p, q).double()
    expected = kept + (1 - kept.sum()) * p.double()
    _, probs = emitted_probs(broken.ResamplesFromTarget(), p, q, 0, as_tree=False)
    assert torch.allclose(probs, expected, atol=1e-6)
    assert excess(broken.ResamplesFromTarget(), p, q) > 0.05


def test_clipping_of_rare_tokens_is_seen_exactly() -> None:
    """The mass below the floor, no more and no less: a verifier that is exact on small vocabularies."""
    p, q = random_distributions()
    rare = float(p[p < broken.ClipsRare.floor].sum())
    assert rare > 10 * LIMIT
    assert excess(broken.ClipsRare(), p, q) == pytest.approx(rare, rel=1e-3)


def test_what_is_left_out_cannot_accuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """With only the likeliest draft tokens the covered share is reported, and a sound verifier stays innocent."""
    monkeypatch.setattr(module, "MAX_WORK", 10 * V)
    p, q = random_distributions()
    covered, probs = emitted_probs(VERIFIERS.load("block")(), p, q, 0, as_tree=False)
    assert covered == pytest.approx(float(q.topk(10).values.sum()), abs=1e-6)
    assert float(probs.sum()) == pytest.approx(covered)
    assert excess(VERIFIERS.load("block")(), p, q) < 1e-6
    assert excess(broken.ResamplesFromTarget(), p, q) > 0.01


@pytest.mark.parametrize("verifier", [broken.OwnDice(), VERIFIERS.load("typical")()])
def test_rules_without_coins_are_refused_not_judged(verifier: Verifier) -> None:
    p, q = random_distributions()
    with pytest.raises(UnfamiliarError):
        emitted_probs(verifier, p, q, 0, as_tree=False)


def test_batches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch or many: the same distribution."""
    p, q = random_distributions()
    whole = emitted_probs(VERIFIERS.load("block")(), p, q, 0, as_tree=False)[1]
    monkeypatch.setattr(module, "MAX_NUMBERS", 7 * V)
    assert torch.allclose(whole, emitted_probs(VERIFIERS.load("block")(), p, q, 0, as_tree=False)[1], atol=1e-12)
