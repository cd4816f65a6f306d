"""Training the head that predicts acceptance: labels by hand, better than a constant, and drafts
that waste less."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.errors import CheckpointError, ConfigError
from outrider.models.heads.acceptance import AcceptanceHead
from outrider.sampling.params import SamplingParams
from outrider.stats import DecodeStats
from outrider.train.acceptance import AcceptanceRecipe
from outrider.train.recipe import FeatureBatch
from tests.helpers import byte_tokenizer, disturbed, make_row, run_to_end, save_checkpoint
from tests.unit.train.head_material import (
    VOCAB,
    build_recipe,
    features,
    own_texts,
    target_module,
    train,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("acceptance")
    target = target_module()
    save_checkpoint(root / "target", target, byte_tokenizer())
    save_checkpoint(root / "draft", disturbed(target, 0.05), byte_tokenizer())
    return root


def decoder(root: Path, **options: object) -> Decoder:
    return build(
        Options(
            str(root / "target"),
            drafter="draft-model",
            draft=str(root / "draft"),
            drafter_options=options,
            num_draft_tokens=6,
            dtype="float32",
            threads=1,
        )
    ).decoder


def run(
    one: Decoder, temperature: float, ends: Sequence[int] = ()
) -> tuple[DecodeStats, list[list[int]]]:
    prompts = own_texts(target_module(), 4, 5, seed=9).tolist()
    for number, prompt in enumerate(prompts):
        params = SamplingParams(temperature=temperature, max_tokens=40, stop_token_ids=list(ends))
        one.add(make_row(prompt, params, seed=number, number=number))
    rows = run_to_end(one)
    total = DecodeStats()
    for row in rows:
        total = total.merge(row.stats)
    return total, [row.output for row in rows]


def fit(recipe: AcceptanceRecipe, batch: FeatureBatch) -> None:
    """Many steps on what was read once: the models need not run again."""
    seen = recipe.read(batch)
    optimizer = torch.optim.AdamW(recipe.module.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        logits, labels = recipe.examples(seen, seen.draft_positions.first)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
        optimizer.step()


def test_labels_are_the_acceptance(models: Path) -> None:
    """Catches distributions of neighbouring positions compared with one another, and labels in
    another order than the estimates."""
    module = target_module()
    recipe = build_recipe(AcceptanceRecipe, module, draft=str(models / "draft"), first_share=0.0)
    batch = features(module, (), own_texts(module, 3, 12))
    seen = recipe.read(batch)
    asked = []
    recipe.head.register_forward_hook(lambda _, inputs, output: asked.append(inputs))
    _, labels = recipe.examples(seen, seen.draft_positions.first)
    with torch.no_grad():
        own = recipe._draft(input_ids=batch.tokens).logits
    p = batch.logits[batch.mask].softmax(-1)
    q = own[batch.mask].softmax(-1)
    num = int(batch.mask.sum())
    torch.testing.assert_close(seen.draft_positions.probs, q)
    torch.testing.assert_close(labels[:num], torch.minimum(p, q).sum(-1))
    assert (
        labels[num : 2 * num].tolist()
        == labels[3 * num :].tolist()
        == (p.argmax(-1) == q.argmax(-1)).float().tolist()
    )
    drawn = seen.drawn[:, None]
    torch.testing.assert_close(
        labels[2 * num : 3 * num], (p / q).gather(1, drawn)[:, 0].clamp(max=1), rtol=1e-3, atol=1e-4
    )
    assert (
        [bool(greedy.all()) for _, greedy, _ in asked]
        == [bool(greedy.any()) for _, greedy, _ in asked]
        == [False, True] * 2
    )
    assert [None if tokens is None else tokens.tolist() for *_, tokens in asked] == [
        None,
        None,
        seen.drawn.tolist(),
        q.argmax(-1).tolist(),
    ]
    assert seen.draft_positions.previous.tolist() == batch.tokens[batch.mask].tolist()
    # of token t, in the distribution at t - 1
    before = own.softmax(-1)[:, :-1].gather(2, batch.tokens[:, 1:, None])[..., 0]
    torch.testing.assert_close(
        seen.draft_positions.before, before[batch.mask[:, 1:]], rtol=1e-3, atol=1e-5
    )


@pytest.mark.slow
def test_trained_it_estimates_and_saves_drafting(models: Path, tmp_path: Path) -> None:
    """Catches a head that never learns, one that loads otherwise, a rule that is never asked, and a
    text that changes."""
    module = target_module()
    recipe = build_recipe(AcceptanceRecipe, module, draft=str(models / "draft"), token_size=0)
    train(recipe, module, own_texts(module, 8, 16), 2, lr=1e-3)
    assert all(weight.grad is not None for weight in recipe.module.parameters())
    held_out = features(module, (), own_texts(module, 24, 24, seed=5))
    torch.manual_seed(2)  # as the trainer does before every batch: the same draws before and after
    untrained = recipe.head.eval() and recipe.loss(held_out)
    fit(recipe, features(module, (), own_texts(module, 96, 24)))
    torch.manual_seed(2)
    judged = recipe.loss(held_out)
    # what the best checkpoint is chosen by
    assert sum(judged.survival) > sum(untrained.survival) > 0
    for name in ("sampled", "greedy"):
        found = {
            part: judged.parts[f"{part}_{name}"]
            for part in ("saved", "possible", "tau", "fixed_tau")
        }
        assert untrained.parts[f"saved_{name}"] < found["saved"] <= found["possible"] < 1
        assert found["tau"] > found["fixed_tau"] == untrained.parts[f"fixed_tau_{name}"]
    with torch.no_grad():
        seen = recipe.read(held_out)
        logits, labels = recipe.examples(seen, seen.draft_positions.first)
        error = (torch.sigmoid(logits) - labels).square().mean()
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
    again = build_recipe(
        AcceptanceRecipe, module, init=tmp_path / "head", draft=str(models / "draft"), token_size=0
    )
    assert torch.equal(again.head.leave.weight, recipe.head.leave.weight)
    with pytest.raises(ConfigError, match=r"token_size=0; this run wants 4"):
        build_recipe(
            AcceptanceRecipe,
            module,
            init=tmp_path / "head",
            draft=str(models / "draft"),
            token_size=4,
        )


@pytest.mark.slow
def test_it_learns_which_tokens_are_hard(models: Path, tmp_path: Path) -> None:
    """Catches a table that is not trained, or not saved: on the texts it read, it tells more than
    the distributions alone."""
    module = target_module()
    errors = []
    batch = features(module, (), own_texts(module, 32, 16))
    for token_size in (0, 4):
        recipe = build_recipe(
            AcceptanceRecipe, module, draft=str(models / "draft"), token_size=token_size
        )
        fit(recipe, batch)
        recipe.save(tmp_path / str(token_size))
        recipe.head = AcceptanceHead.load(tmp_path / str(token_size), VOCAB)
        seen = recipe.read(batch)
        logits, _ = recipe.examples(seen, seen.draft_positions.first)
        errors.append(float((torch.sigmoid(logits.view(4, -1)[3]) - seen.agree).square().mean()))
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.slow
def test_nothing_is_drafted_behind_the_end(models: Path) -> None:
    """Catches a rule that does not know what ends a text, one that drops the end itself, and drafts
    that continue after it."""
    _, texts = run(decoder(models), 0.0)
    ends = [texts[0][9]]
    plain, text = run(decoder(models), 0.0, ends)
    stopped, same = run(decoder(models, stop="product", stop_below=0.0), 0.0, ends)
    assert same == text
    assert text != texts
    assert (stopped.steps, stopped.accepted, stopped.tested) == (
        plain.steps,
        plain.accepted,
        plain.tested,
    )
    assert stopped.drafted < plain.drafted


def test_what_does_not_fit_is_refused(models: Path) -> None:
    with pytest.raises(ConfigError, match="needs the draft model"):
        build_recipe(AcceptanceRecipe, target_module())
    with pytest.raises(ConfigError, match="first_share"):
        build_recipe(AcceptanceRecipe, target_module(), draft="x", first_share=2.0)
    with pytest.raises(ConfigError, match="token_size"):
        build_recipe(AcceptanceRecipe, target_module(), draft="x", token_size=-1)
    with pytest.raises(CheckpointError, match="no head folder"):
        decoder(models, stop="acceptance", acceptance_head="/nowhere")
