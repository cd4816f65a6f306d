"""Training Medusa heads: the same numbers as at work, and heads that get better."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.errors import ConfigError
from outrider.models.heads.medusa import load_medusa
from outrider.models.signals import AFTER_NORM
from outrider.sampling.params import SamplingParams
from outrider.train.medusa import MedusaRecipe, chain_starts
from tests.helpers import make_row
from tests.unit.train.head_material import (
    PROMPT,
    VOCAB,
    build_recipe,
    engine,
    features,
    own_texts,
    target_module,
    tau,
    train,
)


def test_guesses_that_count_by_hand() -> None:
    """Catches an offset: the first feature is that of the token before the last of the prompt,
    where serving begins."""
    mask = torch.tensor([[False, False, True, True, True, False]])  # prompt of 3, response of 3
    (rows, positions), counts = chain_starts(mask, 3)
    assert rows.tolist() == [0, 0, 0]
    assert positions.tolist() == [1, 2, 3]
    assert counts.tolist() == [[True, True, True], [True, True, False], [True, False, False]]


@pytest.mark.slow
def test_training_sees_what_drafting_sees(tmp_path: Path) -> None:
    """Catches features of another position, heads in another order, an output layer that is not the
    target's."""
    module = target_module()
    recipe = build_recipe(MedusaRecipe, module, num_heads=3, num_layers=2)
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.add_(torch.randn(weight.shape) * 0.05)
    recipe.save(tmp_path / "head")
    tokens = own_texts(module, 1, 20)
    decoder = engine(tmp_path, module, "medusa", tmp_path / "head", 3)
    decoder.add(
        make_row(tokens[0, :13].tolist(), SamplingParams(temperature=1.0, max_tokens=9), seed=3)
    )
    with torch.inference_mode():
        decoder.catch_up()
        draft = decoder.drafter.propose(decoder.rows, [3])
        wanted = recipe.heads(features(module, recipe.signals, tokens).hidden[AFTER_NORM][0, 11])
    assert draft.lengths.tolist() == [3]
    torch.testing.assert_close(draft.probs[0, :3], wanted.softmax(-1), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("own_output", [False, True])
def test_a_few_steps_raise_expected_acceptance_and_real_tau(
    tmp_path: Path, own_output: bool
) -> None:
    """Catches a gradient that does not arrive, a loss about other tokens than the drafter's, a head
    that loads otherwise."""
    module = target_module()
    tokens = own_texts(module, 12, 28)
    recipe = build_recipe(MedusaRecipe, module, num_heads=2, own_output=own_output)
    batch = features(module, recipe.signals, tokens)
    recipe.save(tmp_path / "before")
    with torch.no_grad():
        before = recipe.loss(batch)
    train(recipe, module, tokens, 60, lr=1e-2)
    with torch.no_grad():
        after = recipe.loss(batch)
        measured = recipe.calibrate([batch])
    assert float(after.loss) < 0.7 * float(before.loss)
    assert sum(after.survival) > sum(before.survival) + 0.3
    assert len(after.per_position) == 2
    recipe.save(tmp_path / "after")
    loaded = load_medusa(tmp_path / "after", 64, VOCAB)
    assert loaded.config.accuracies[0][0] == pytest.approx(measured["accuracy@0"], abs=1e-3)
    assert loaded.config.trained_for == "tiny"
    taus = [
        tau(engine(tmp_path, module, "medusa", tmp_path / name, 2), tokens[:4, :PROMPT], 24)
        for name in ("before", "after")
    ]
    assert taus[1] > taus[0] + 0.3
    assert (
        tau(
            engine(tmp_path, module, "medusa", tmp_path / "after", 8, tree="medusa"),
            tokens[:4, :PROMPT],
            24,
        )
        >= taus[1]
    )


def test_going_on_from_saved_heads(tmp_path: Path) -> None:
    """--init continues what was saved, and refuses heads of another shape by name."""
    module = target_module()
    recipe = build_recipe(MedusaRecipe, module, num_heads=2)
    train(recipe, module, own_texts(module, 4, 16), 3, lr=1e-2)
    recipe.save(tmp_path)
    again = build_recipe(MedusaRecipe, module, init=tmp_path, num_heads=2)
    batch = features(module, recipe.signals, own_texts(module, 4, 16))
    assert again.loss(batch).loss.item() == pytest.approx(recipe.loss(batch).loss.item(), rel=1e-5)
    assert all(weight.requires_grad for weight in again.module.parameters())
    with pytest.raises(ConfigError, match="num_heads=2"):
        build_recipe(MedusaRecipe, module, init=tmp_path, num_heads=3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"num_heads": 0}, "num_heads"), ({"head_decay": 2.0}, "head_decay"), ({"loss": "kll"}, "kl")],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_recipe(MedusaRecipe, target_module(), **settings)
