"""A loss taken a few positions at a time is the loss of all positions at once, and so is its
gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.train import block, eagle, unrolled
from outrider.train.chunked import CHUNK_NUMBERS, Judged, chunk_size, judged_in_chunks
from outrider.train.losses import lk_hybrid, softmax_fp32, weighted_mean
from tests.unit.train.head_material import build_recipe, features, own_texts, target_module

NUM = 11
WIDTH = 6
VOCAB = 40


class Material:
    """Random states, an output layer, distributions to be learned and weights, one of them 0."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(NUM, WIDTH, generator=generator).requires_grad_()
        self.layer = nn.Linear(WIDTH, VOCAB, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(VOCAB, WIDTH, generator=generator))
        self.target_probs = softmax_fp32(torch.randn(NUM, VOCAB, generator=generator))
        self.weights = torch.rand(NUM, generator=generator)
        self.weights[4] = 0.0

    def output(self, part: Tensor, which: Tensor) -> Tensor:
        return self.layer(part)

    def judge(self, logits: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        return lk_hybrid(self.target_probs[which], logits), logits.detach().float().softmax(
            -1
        ).amax(-1)

    def judged(self, size: int, count: int = NUM) -> Judged:
        """The first `count` positions, judged `size` at a time."""
        states = self.states[:count]
        weights = self.weights[:count]
        return judged_in_chunks(self.output, self.judge, states, weights, [self.layer.weight], size)

    def gradients(self) -> list[Tensor]:
        found = [self.states.grad, self.layer.weight.grad]
        assert all(one is not None for one in found)
        return [one for one in found if one is not None]


@pytest.fixture
def at_once() -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """(sum, losses, acceptances, gradients of three times the sum), without chunks."""
    material = Material()
    losses, accepted = material.judge(material.layer(material.states), torch.arange(NUM))
    total = (losses * material.weights).sum()
    (3 * total).backward()
    return total.detach(), losses.detach(), accepted, material.gradients()


@pytest.mark.parametrize("size", [1, 4, NUM, 100])
def test_chunks_add_up(size: int, at_once: tuple[Tensor, Tensor, Tensor, list[Tensor]]) -> None:
    """Catches a chunk that is left out or counted twice, a gradient that is overwritten, and a
    scale that is lost."""
    material = Material()
    judged = material.judged(size)
    (3 * judged.total).backward()
    for found, wanted in zip(
        [*judged, *material.gradients()], [*at_once[:3], *at_once[3]], strict=True
    ):
        torch.testing.assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-6)


def test_frozen_parts_get_no_gradient_and_validation_makes_none() -> None:
    """A target's own output layer is read but not trained; under no_grad nothing is kept."""
    material = Material()
    material.layer.weight.requires_grad_(False)
    material.judged(4).total.backward()
    assert material.layer.weight.grad is None
    assert material.states.grad is not None
    with torch.no_grad():
        assert not material.judged(4).total.requires_grad


def test_nothing_to_judge_is_a_loss_of_zero() -> None:
    """Texts too short for the last drafting step leave it no position."""
    material = Material()
    judged = material.judged(4, count=0)
    judged.total.backward()
    assert judged.total.item() == 0.0
    assert not material.gradients()[1].any()


def test_mixed_precision_has_the_same_gradients() -> None:
    """Under autocast the layer's weights are cast once and kept: each chunk's gradient must still
    reach them."""
    found = []
    for size in (2, 100):
        material = Material()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = material.judged(size).total
        total.backward()
        found.append([total.detach(), *material.gradients()])
    for few, all_ in zip(*found, strict=True):
        torch.testing.assert_close(few, all_, rtol=2e-2, atol=2e-2)
    assert found[0][2].abs().max() > 0


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (eagle.EagleRecipe, {"unrolls": 2, "noise": 0.0, "loss": "0.1*ce+0.9*tv"}),
        (eagle.Eagle3Recipe, {"unrolls": 3}),
        (eagle.Eagle3Recipe, {"unrolls": 3, "draft_vocab": 25}),
    ],
    ids=str,
)
def test_a_recipe_in_chunks_has_the_loss_of_the_formula(
    kind: Any, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weighted mean of every drafting step, written out with all logits at once, is the
    reference, with its gradient."""
    module = target_module()
    recipe = build_recipe(kind, module, **settings)
    batch = features(module, recipe.signals, own_texts(module, 3, 12))
    mask = batch.mask.clone()
    mask[1, 7:] = False  # rows of different lengths
    batch = replace(batch, mask=mask)
    monkeypatch.setattr(unrolled, "chunk_size", lambda vocab_size, device: 4)
    report = recipe.loss(batch)
    report.loss.backward()
    names = [
        name for name, parameter in recipe.module.named_parameters() if parameter.requires_grad
    ]
    found = {name: recipe.module.get_parameter(name).grad.clone() for name in names}
    recipe.module.zero_grad()
    expected = _by_the_formula(recipe, batch)
    expected.backward()
    torch.testing.assert_close(report.loss.detach(), expected.detach(), rtol=1e-5, atol=1e-6)
    for name in names:
        wanted = recipe.module.get_parameter(name).grad
        torch.testing.assert_close(
            found[name], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()), msg=name
        )


@pytest.mark.parametrize(
    "settings", [{}, {"markov_gated": True}, {"markov_rank": 0, "confidence": False}], ids=str
)
def test_a_block_recipe_in_chunks_is_the_one_at_once(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a distribution of another position, a token before another guess, and a Markov head
    without its gradient."""
    module = target_module()
    recipe = build_recipe(
        block.BlockRecipe,
        module,
        **{"num_layers": 1, "block_size": 4, "markov_rank": 8, **settings},
    )
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.add_(
                torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
                * 0.1
            )
    batch = features(module, recipe.signals, own_texts(module, 3, 12))
    found = []
    for size in (3, 10_000):
        monkeypatch.setattr(block, "chunk_size", lambda vocab_size, device, size=size: size)
        torch.manual_seed(1)  # the anchors
        report = recipe.loss(batch)
        report.loss.backward()
        found.append(
            (report, {name: one.grad.clone() for name, one in recipe.module.named_parameters()})
        )
        recipe.module.zero_grad()
    (few, few_gradients), (whole, gradients) = found
    torch.testing.assert_close(few.loss.detach(), whole.loss.detach())
    assert few.survival == pytest.approx(whole.survival, rel=1e-4)
    assert {name for name, one in gradients.items() if one.any()} == set(gradients)
    for name, wanted in gradients.items():
        torch.testing.assert_close(
            few_gradients[name], wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()), msg=name
        )


def _by_the_formula(recipe: Any, batch: Any) -> Tensor:
    settings = recipe._settings
    head = recipe.head
    terms = []
    for step, states in enumerate(
        unrolled.unrolled(head, batch.tokens, head.features(batch.hidden), settings.unrolls)
    ):
        rows, positions = unrolled._ahead(batch.mask, step).nonzero(as_tuple=True)
        wanted = batch.logits[rows, positions + 1 + step]
        logits = head.logits(states[rows, positions])
        ids = torch.arange(wanted.shape[-1]) if head.draft_ids is None else head.draft_ids
        counts = torch.isin(wanted.argmax(-1), ids).float()
        loss = weighted_mean(recipe._loss(softmax_fp32(wanted[:, ids]), logits), counts) * getattr(
            settings, "loss_weight", 1.0
        )
        terms.append(
            loss + recipe._feature_loss(batch, rows, positions + 1 + step, states[rows, positions])
        )
    decay = [settings.step_decay**step for step in range(len(terms))]
    return sum(
        (share * term for share, term in zip(decay, terms, strict=True)), torch.zeros(())
    ) / sum(decay)


def test_a_chunk_is_bounded_by_its_logits() -> None:
    """Catches a bound in positions, which a larger vocabulary would make of any size; and one below
    a single position."""
    cpu = torch.device("cpu")
    assert chunk_size(1000, cpu) * 1000 <= CHUNK_NUMBERS < (chunk_size(1000, cpu) + 1) * 1000
    assert chunk_size(10 * CHUNK_NUMBERS, cpu) == 1


def test_chunks_on_a_device_follow_its_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches chunks of a CPU's cache there: a step of a head over 49,152 tokens was then 10,000
    launches."""
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 << 30, 80 << 30))
    assert 5000 < chunk_size(49_152, device) < 6000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 80 << 30))
    assert chunk_size(49_152, device) == chunk_size(49_152, torch.device("cpu"))
