"""The MTP recipe: unrolled training must compute what drafting computes, a few steps must help, a
head is saved in its layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from outrider.errors import CapabilityError, ConfigError
from outrider.models.heads.mtp_files import load_mtp
from outrider.models.loading.multimodal import text_part
from outrider.models.source import resolve
from outrider.settings import parse_settings
from outrider.train.mtp import MtpRecipe
from outrider.train.recipe import RecipeSetup
from outrider.train.unrolled import unrolled
from tests.contract.multimodal_families import make_whole
from tests.helpers import tiny_llama
from tests.mtp_heads import MTP_LAYOUTS, WEIGHTS, MtpReference, save_with_mtp
from tests.unit.drafters.heads.test_mtp import random_model
from tests.unit.train.test_eagle import VOCAB, batch_of, texts

UNROLLS = 3


def setup_of(
    target: Any, name: str = "tiny", init: Path | None = None, **settings: Any
) -> RecipeSetup:
    chosen = parse_settings(MtpRecipe.Settings, {"unrolls": UNROLLS, **settings}, "mtp")
    return RecipeSetup(target, None, name, chosen, torch.ones(VOCAB), init, torch.float32)


@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3_5_text", "qwen"), ("deepseek_v3", "deepseek")]
)
def test_unrolled_training_computes_what_drafting_computes(
    tmp_path: Path, family: str, layout: str
) -> None:
    """Every chain of every position gives the logits that the head drafts with behind it, by a loop
    without a cache."""
    reference: MtpReference = save_with_mtp(tmp_path, partial(random_model, family), layout)
    recipe = MtpRecipe.build(setup_of(reference.target, str(tmp_path)))
    head: Any = recipe.head
    text = reference.draft([5, 6, 7, 8, 9], 1)[0] + [5, 6, 7, 8]
    batch = batch_of(reference.target, recipe.signals, torch.tensor([text]))
    with torch.no_grad():
        made = [
            head.logits(states)[0]
            for states in unrolled(head, batch.tokens, head.features(batch.hidden), 2)
        ]
        # the last known state is that of position `start - 1`
        for start in range(1, len(text) - 1):
            first, scores = reference.draft(text[: start + 1], 1)
            torch.testing.assert_close(made[0][start - 1], scores[0], rtol=1e-4, atol=1e-4)
            if first[0] == text[start + 1]:
                _, scores = reference.draft(text[: start + 1], 2)
                torch.testing.assert_close(made[1][start - 1], scores[1], rtol=1e-4, atol=1e-4)
    report = recipe.loss(batch)
    report.loss.backward()
    assert all(parameter.grad is not None for parameter in head.layer(0).projection.parameters())
    assert report.per_position == []
    recipe.module.eval()
    with torch.no_grad():
        assert len(recipe.loss(batch).per_position) == UNROLLS


def test_training_raises_the_expected_acceptance(tmp_path: Path) -> None:
    """A few dozen steps from a new head on; the saved head computes what the trained one does, and
    can be tuned further."""
    target = tiny_llama(VOCAB, sharpness=3.0).requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        recipe = MtpRecipe.build(setup_of(target))
        held_out = batch_of(target, recipe.signals, texts(target, 8, 16, seed=9))
        batches = [
            batch_of(target, recipe.signals, texts(target, 16, 16, seed=seed)) for seed in range(4)
        ]
        optimizer = torch.optim.AdamW(recipe.module.parameters(), lr=3e-3)
        recipe.module.eval()
        with torch.no_grad():
            before = recipe.loss(held_out)
        recipe.module.train()
        for step in range(24):
            optimizer.zero_grad()
            recipe.loss(batches[step % 4]).loss.backward()
            optimizer.step()
        recipe.module.eval()
        with torch.no_grad():
            after = recipe.loss(held_out)
    assert sum(after.survival) > 1.3 * sum(before.survival), (before.survival, after.survival)
    recipe.save(tmp_path)
    again = MtpRecipe.build(setup_of(target, init=tmp_path))
    with torch.no_grad():
        assert float(again.loss(held_out).loss) == pytest.approx(float(after.loss), rel=1e-4)
    assert (
        load_mtp(
            resolve(str(tmp_path)), target.config, torch.float32, torch.device("cpu")
        ).config.trained_for
        == "tiny"
    )


@pytest.mark.parametrize("layout", MTP_LAYOUTS)
def test_a_tuned_head_keeps_its_layout(tmp_path: Path, layout: str) -> None:
    """Catches a tensor that is saved by another name, or not at all."""
    save_with_mtp(tmp_path / "target", partial(random_model, "llama"), layout)
    target = random_model("llama", 0)
    MtpRecipe.build(setup_of(target, str(tmp_path / "target"))).save(tmp_path / "head")
    saved = load_file(tmp_path / "head" / WEIGHTS)
    there = load_file(tmp_path / "target" / WEIGHTS)
    assert all(torch.equal(tensor, there[name]) for name, tensor in saved.items())
    load_mtp(
        resolve(str(tmp_path / "head")),
        AutoConfig.from_pretrained(tmp_path / "target"),
        torch.float32,
        torch.device("cpu"),
    )


def test_a_tuned_head_of_several_blocks_is_read_again(tmp_path: Path) -> None:
    reference = save_with_mtp(tmp_path / "target", partial(random_model, "nemotron_h"), "nemotron")
    recipe = MtpRecipe.build(setup_of(reference.target, str(tmp_path / "target")))
    recipe.save(tmp_path / "head")
    head = load_mtp(
        resolve(str(tmp_path / "head")), reference.target.config, torch.float32, torch.device("cpu")
    )
    own = recipe.head.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_moe_text", "qwen3_vl"])
def test_a_new_head_is_one_more_layer_of_the_target(tmp_path: Path, family: str) -> None:
    """With its experts, or of a family whose class is a model that takes pictures, too; saved in a
    form that is read again."""
    target: Any = (
        text_part(make_whole(family)).requires_grad_(False)
        if family == "qwen3_vl"
        else random_model(family, 0)
    )
    recipe = MtpRecipe.build(setup_of(target))
    recipe.save(tmp_path)
    head = load_mtp(resolve(str(tmp_path)), target.config, torch.float32, torch.device("cpu"))
    last = target.get_decoder().layers[-1].state_dict()
    own: Any = head.layer(0).body
    assert all(
        torch.equal(tensor, last[name]) for name, tensor in own.layers[0].state_dict().items()
    )


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unrolls must be at least 1"):
        setup_of(None, unrolls=0)
    save_with_mtp(tmp_path, partial(random_model, "llama"), "deepseek", num_layers=2)
    with pytest.raises(CapabilityError, match="has 2 layers; heads of one are tuned"):
        MtpRecipe.build(setup_of(random_model("llama", 0), str(tmp_path)))
    save_with_mtp(tmp_path / "sparse", partial(random_model, "deepseek_v32"), "deepseek")
    for there in (str(tmp_path / "sparse"), "tiny"):  # the head that is there, and a new one
        with pytest.raises(
            CapabilityError,
            match="the head's attention is sparse: an indexer picks the keys of each token",
        ):
            MtpRecipe.build(setup_of(random_model("deepseek_v32", 0), there))
