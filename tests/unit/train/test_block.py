"""Training block heads: the same numbers as at work, anchors that count what they should, and heads
that get better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import ConfigError
from outrider.models.heads.block_files import load_block
from outrider.sampling.params import SamplingParams
from outrider.train.block import BlockRecipe, draw_anchors
from outrider.train.block_settings import spread_layers
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

SMALL = {
    "num_layers": 1,
    "block_size": 4,
    "markov_rank": 8,
    "num_anchors": 16,
    "intermediate_size": 64,
    "warm_up": 0.5,
}
SHAPES: list[dict[str, Any]] = [
    {},
    {"markov_gated": True},
    {"sample_from_anchor": False, "markov_rank": 0, "confidence": False},
    {"num_layers": 2, "target_layers": "0,1"},
    {
        "sample_from_anchor": False,
        "markov_rank": 0,
        "confidence": False,
        "causal": True,
        "num_layers": 2,
    },
]


def test_anchors_that_count_by_hand() -> None:
    """Catches guesses that count beyond the response or behind a gap, and an anchor outside it."""
    mask = torch.tensor([[False, True, True, True, False], [False, False, False, True, False]])
    anchors = draw_anchors(mask, 8, 2)
    assert anchors.starts.shape == (2, 3)
    assert sorted(anchors.starts[0].tolist()) == [1, 2, 3]
    for start, counts in zip(anchors.starts[0].tolist(), anchors.counts[0].tolist(), strict=True):
        assert counts == [True, start < 3]
    assert anchors.counts[1].sum() == 1  # the only anchor of the second row, and its first guess


def disturbed_recipe(**settings: Any) -> tuple[Any, BlockRecipe]:
    module = target_module()
    recipe = build_recipe(BlockRecipe, module, **{**SMALL, **settings})
    with torch.no_grad():
        for weight in recipe.module.parameters():
            weight.add_(torch.randn(weight.shape) * 0.2)
    return module, recipe


@pytest.mark.slow
@pytest.mark.parametrize("settings", SHAPES, ids=str)
def test_training_sees_what_drafting_sees(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Catches training with another context, position, mask, slot or previous token than drafting.

    Several steps in, so that the cache holds context from the prompt and from passes with rejected
    tokens."""
    module, recipe = disturbed_recipe(**settings)
    recipe.save(tmp_path / "head")
    decoder = engine(tmp_path, module, "block", tmp_path / "head", 4)
    for number in range(2):
        params = SamplingParams(temperature=1.0, max_tokens=30)
        decoder.add(make_row(own_texts(module, 2, 9)[number].tolist(), params, seed=number))
    for _ in range(3):
        decoder.step()
    with torch.inference_mode():
        decoder.catch_up()
        draft = decoder.drafter.propose(decoder.rows, [4, 4])
    num = recipe.head.config.num_guesses
    assert draft.lengths.tolist() == [num, num]
    for index, row in enumerate(decoder.rows):
        text = torch.tensor([[*row.tokens, *draft.tokens[index].tolist()]])
        with torch.inference_mode():
            batch = features(module, recipe.signals, text)
            block = recipe.run(batch, torch.tensor([[len(row.tokens) - 1]]))
            logits = recipe.head.corrected(
                recipe.head.logits(block.states), block.states, block.before
            )[0, 0]
        torch.testing.assert_close(
            draft.probs[index, :num], logits.softmax(-1), rtol=2e-3, atol=1e-5
        )


def test_blocks_do_not_see_one_another() -> None:
    """Catches a mask that lets a block look at another block, or at what follows its anchor."""
    module, recipe = disturbed_recipe()
    tokens = own_texts(module, 1, 20)
    batch = features(module, recipe.signals, tokens)
    with torch.no_grad():
        together = recipe.run(batch, torch.tensor([[6, 12, 9]])).states[0, 0]
        alone = recipe.run(batch, torch.tensor([[6]])).states[0, 0]
        for states in batch.hidden.values():
            states[:, 6:] = 7.0
        blind = recipe.run(batch, torch.tensor([[6]])).states[0, 0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(blind, alone, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, SHAPES[2]], ids=str)
def test_a_few_steps_raise_expected_acceptance_and_real_tau(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Catches a gradient that does not arrive, labels of other tokens than the drafter guesses, a
    head that loads otherwise."""
    module = target_module()
    tokens = own_texts(module, 12, 28)
    recipe = build_recipe(BlockRecipe, module, **{**SMALL, **settings})
    batch = features(module, recipe.signals, tokens)
    recipe.save(tmp_path / "before")
    with torch.no_grad():
        before = recipe.loss(batch)
    train(recipe, module, tokens, 60, lr=5e-3)
    with torch.no_grad():
        after = recipe.loss(batch)
        recipe.calibrate([batch])
    assert sum(after.survival) > sum(before.survival) + 0.3
    recipe.save(tmp_path / "after")
    loaded = load_block(tmp_path / "after", 64, VOCAB, 3)
    assert len(loaded.config.temperatures) == (
        recipe.head.config.num_guesses if recipe.head.config.confidence else 0
    )
    gamma = recipe.head.config.num_guesses
    before_tau, after_tau = (
        tau(engine(tmp_path, module, "block", tmp_path / name, gamma), tokens[:4, :PROMPT], 24)
        for name in ("before", "after")
    )
    assert after_tau > before_tau + 0.3


def test_a_batch_without_anchors_costs_nothing() -> None:
    """Catches NaN from a mean over nothing: short texts happen."""
    module, recipe = disturbed_recipe()
    batch = features(module, recipe.signals, own_texts(module, 2, 8))
    batch.mask[:] = False
    report = recipe.loss(batch)
    report.loss.backward()
    assert report.loss.item() == 0
    assert report.survival == []


def test_going_on_from_a_saved_head(tmp_path: Path) -> None:
    """--init continues what was saved, and refuses a head of another shape by name."""
    module, recipe = disturbed_recipe()
    recipe.save(tmp_path)
    again = build_recipe(BlockRecipe, module, init=tmp_path, **SMALL)
    for name, weight in recipe.head.state_dict().items():
        assert torch.equal(weight, again.head.state_dict()[name]), name
    with pytest.raises(ConfigError, match="markov_rank=8"):
        build_recipe(BlockRecipe, module, init=tmp_path, **{**SMALL, "markov_rank": 4})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 1}, "block_size"),
        ({"target_layers": "0,0"}, "different"),
        ({"target_layers": "9"}, "among 0..1"),
        ({"mask_token": 999}, "below 257"),
        ({"decay": 0.0}, "decay"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_recipe(BlockRecipe, target_module(), **settings)


def test_layers_are_spread_like_the_published_ones() -> None:
    assert spread_layers(36) == [1, 9, 17, 25, 33]
    assert spread_layers(2) == [0]
    assert spread_layers(4) == [1, 2]
