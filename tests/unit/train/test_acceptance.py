"""Training the head that predicts acceptance: labels by hand, better than a constant, and drafts that waste less."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.errors import CheckpointError, ConfigError
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.train.acceptance import AcceptanceRecipe
from outrider.train.recipe import FeatureBatch
from tests.helpers import byte_tokenizer, disturbed, make_row, run_to_end, save_checkpoint
from tests.unit.train.head_material import build_recipe, features, own_texts, target_module, train


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, target = tmp_path_factory.mktemp("acceptance"), target_module()
    save_checkpoint(root / "target", target, byte_tokenizer())
    save_checkpoint(root / "draft", disturbed(target, 0.05), byte_tokenizer())
    return root


def decoder(root: Path, **options: object) -> Decoder:
    return build(
        Options(
            str(root / "target"), drafter="draft-model", draft=str(root / "draft"), drafter_options=options,
            num_draft_tokens=6, dtype="float32", compile="off", threads=1,
        )
    ).decoder  # fmt: skip


def run(one: Decoder, temperature: float) -> tuple[DecodeStats, list[list[int]]]:
    prompts = own_texts(target_module(), 4, 5, seed=9).tolist()
    for number, prompt in enumerate(prompts):
        one.add(make_row(prompt, SamplingParams(temperature=temperature, max_tokens=40), seed=number, number=number))
    rows = run_to_end(one)
    total = DecodeStats()
    for row in rows:
        total = total.merge(row.stats)
    return total, [row.output for row in rows]


def fit(recipe: AcceptanceRecipe, inputs: Tensor, labels: Tensor) -> None:
    """Many steps on examples that are there: the models need not run again."""
    optimizer = torch.optim.AdamW(recipe.module.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.binary_cross_entropy_with_logits(recipe.head(inputs), labels).backward()
        optimizer.step()


def examples(recipe: AcceptanceRecipe, batch: FeatureBatch) -> tuple[Tensor, Tensor]:
    """Positions inside a draft, and the first of a text."""
    seen = recipe.read(batch)
    return seen.examples(seen.is_first)


def test_labels_are_the_acceptance(models: Path) -> None:
    """Catches laws of neighbouring positions compared with one another, and labels in another order than the features."""
    module = target_module()
    recipe = build_recipe(AcceptanceRecipe, module, draft=str(models / "draft"), first_share=0.0)
    batch = features(module, (), own_texts(module, 3, 12))
    found, labels = examples(recipe, batch)
    with torch.no_grad():
        own = recipe._draft(input_ids=batch.tokens).logits
    p, q = batch.logits[batch.mask].softmax(-1), own[batch.mask].softmax(-1)
    num = int(batch.mask.sum())
    torch.testing.assert_close(labels[:num], torch.minimum(p, q).sum(-1))
    assert labels[num : 2 * num].tolist() == labels[3 * num :].tolist() == (p.argmax(-1) == q.argmax(-1)).float().tolist()
    kept, drawn = labels[2 * num : 3 * num], found[2 * num : 3 * num, -2].exp()
    ratios = torch.where((q - drawn[:, None]).abs() < 1e-6, (p / q).clamp(max=1) - kept[:, None], 1.0)
    assert ratios.abs().min(dim=1).values.max() < 1e-3  # of some token that has this probability
    torch.testing.assert_close(found[3 * num :, -2].exp(), q.max(-1).values)
    assert found[:, -3].view(4, num).sum(1).tolist() == [0, num, 0, num]
    assert found[:, -1].view(4, num).sum(1).tolist() == [0, 0, num, num]
    before = own.softmax(-1)[:, :-1].gather(2, batch.tokens[:, 1:, None])[..., 0]  # of token t, in the law at t - 1
    torch.testing.assert_close(found[:num, -5], before[batch.mask[:, 1:]].clamp(min=1e-6).log(), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_trained_it_estimates_and_saves_drafting(models: Path, tmp_path: Path) -> None:
    """Catches a head that never learns, one that loads otherwise, a rule that is never asked, and a text that changes."""
    module = target_module()
    recipe = build_recipe(AcceptanceRecipe, module, draft=str(models / "draft"))
    train(recipe, module, own_texts(module, 8, 16), 2, lr=1e-3)
    assert all(weight.grad is not None for weight in recipe.module.parameters())
    held_out = features(module, (), own_texts(module, 24, 24, seed=5))
    torch.manual_seed(2)  # as the trainer does before every batch: the same draws before and after
    untrained = recipe.head.eval() and recipe.loss(held_out)
    fit(recipe, *examples(recipe, features(module, (), own_texts(module, 96, 24))))
    torch.manual_seed(2)
    judged = recipe.loss(held_out)
    assert sum(judged.survival) > sum(untrained.survival) > 0  # what the best checkpoint is chosen by
    for name in ("sampled", "greedy"):
        found = {part: judged.parts[f"{part}_{name}"] for part in ("saved", "possible", "tau", "fixed_tau")}
        assert untrained.parts[f"saved_{name}"] < found["saved"] <= found["possible"] < 1
        assert found["tau"] > found["fixed_tau"] == untrained.parts[f"fixed_tau_{name}"]
    with torch.no_grad():
        found, labels = examples(recipe, held_out)
        error = (torch.sigmoid(recipe.head(found)) - labels).square().mean()
        constant = labels.var()
    assert float(error) < 0.9 * float(constant)
    recipe.save(tmp_path / "head")
    plain, text = run(decoder(models), 0.0)
    rule = {"stop": "acceptance", "acceptance_head": str(tmp_path / "head"), "stop_below": 0.15}
    stopped, same = run(decoder(models, **rule), 0.0)
    assert same == text
    assert stopped.drafted < 0.85 * plain.drafted
    assert stopped.accepted / stopped.drafted > 1.15 * plain.accepted / plain.drafted
    warm, _ = run(decoder(models, **rule), 1.0)
    assert 0 < warm.drafted < 6 * warm.steps
    again = build_recipe(AcceptanceRecipe, module, init=tmp_path / "head", draft=str(models / "draft"))
    assert torch.equal(again.head.leave.weight, recipe.head.leave.weight)


def test_what_does_not_fit_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match="needs the draft model"):
        build_recipe(AcceptanceRecipe, target_module())
    with pytest.raises(ConfigError, match="first_share"):
        build_recipe(AcceptanceRecipe, target_module(), draft="x", first_share=2.0)
    with pytest.raises(CheckpointError, match="no head folder"):
        decoder(models, stop="acceptance", acceptance_head="/nowhere")
