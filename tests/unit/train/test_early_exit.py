"""Kind early-exit: untrained it is the plain exit, trained it is what the drafter computes,
mismatches are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.llm import LLM
from outrider.models.heads.exit import ExitConfig, ExitHead
from outrider.sampling.params import SamplingParams
from outrider.train.early_exit import EarlyExitRecipe, EarlyExitTraining, final_norm
from outrider.train.features import FeatureSource
from outrider.train.recipe import RecipeSetup
from outrider.train.run import run_training
from outrider.train.texts import collate
from tests.helpers import byte_tokenizer, tiny_llama
from tests.unit.train.material import save_target, spec_for, texts


def test_untrained_is_the_plain_exit() -> None:
    """Hidden states of the wrong layer, or a norm left out, would show here."""
    target = tiny_llama(257, num_hidden_layers=3).requires_grad_(False)
    setup = RecipeSetup(
        target, byte_tokenizer(), "t", EarlyExitTraining(exit_layer=2, rank=4), torch.zeros(257)
    )
    recipe = EarlyExitRecipe.build(setup)
    batch = FeatureSource(target, recipe.signals).features(
        collate(texts(), [0], torch.device("cpu"))
    )
    short = tiny_llama(257, num_hidden_layers=3)
    del short.model.layers[2]
    with torch.no_grad():
        ours = target.lm_head(recipe.module(target.model.norm(batch.hidden[2])))
        torch.testing.assert_close(ours, short(batch.tokens, use_cache=False).logits)


@pytest.mark.slow
def test_the_drafter_computes_what_was_trained(tmp_path: Path) -> None:
    """Greedy texts are the target's; the first draft's distribution is that of the head on the exit
    layer."""
    spec = spec_for(tmp_path, settings={"rank": "4", "exit_layer": "1"})
    run_training(spec)
    folder = spec.out / "drafter"
    plain = LLM(spec.options.target, drafter="none", runtime="eager").generate(
        [10, 11, 12], SamplingParams(max_tokens=20)
    )[0]
    llm = LLM(
        spec.options.target,
        drafter="early-exit",
        drafter_options={"head": str(folder)},
        runtime="eager",
    )
    assert llm.generate([10, 11, 12], SamplingParams(max_tokens=20))[0].token_ids == plain.token_ids
    assert any("trained head" in note for note in llm.notes)
    head = ExitHead.load(folder)
    target = tiny_llama(257, sharpness=3.0, num_hidden_layers=3)
    assert not torch.equal(head.up.weight, torch.zeros_like(head.up.weight))
    tokens = torch.tensor([[10, 11, 12]])
    with torch.no_grad():
        states = target(tokens, output_hidden_states=True).hidden_states[1]
        wanted = target.lm_head(head(target.model.norm(states)))
        model = llm._built.decoder.drafter.model
        assert model is not None
        target_lm = llm._built.target.lm
        target_lm.kv.add_row()
        found = model.twin().run  # the derived module itself
        assert found is model.run
        fresh = model.twin()
        fresh.kv.add_row()
        torch.testing.assert_close(fresh.forward(tokens).logits, wanted, atol=1e-4, rtol=1e-4)


def test_other_architectures() -> None:
    """GPT-2's norm has a bias and another name; Gemma 2 caps its logits, which the head would not
    see."""
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    ).eval()
    assert final_norm(gpt2) is gpt2.transformer.ln_f
    from transformers import Gemma2Config, Gemma2ForCausalLM

    gemma = Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            final_logit_softcapping=1e-4,
        )
    ).eval()
    with pytest.raises(CapabilityError, match="gemma2 are not its output head after a final norm"):
        final_norm(gemma)


@pytest.mark.slow
def test_mismatches_are_named(tmp_path: Path) -> None:
    """Another target, another exit, a folder of something else, a tensor of another shape."""
    spec = spec_for(tmp_path)
    run_training(spec)
    folder = spec.out / "drafter"
    wide = save_target(tmp_path / "wide", num_hidden_layers=4)

    def load(target: object, **options: object) -> None:
        LLM(
            str(target),
            drafter="early-exit",
            drafter_options={"head": str(folder), **options},
            runtime="eager",
        )

    with pytest.raises(
        CheckpointError, match=r"trained for tiny: 3 layers of width 64; .* has 4 of 64"
    ):
        load(wide)
    with pytest.raises(ConfigError, match="trained for exit_layer 1, got 2"):
        load(spec.options.target, exit_layer=2)
    with pytest.raises(ConfigError, match="leave skip_layers out"):
        load(spec.options.target, skip_layers="1")
    with pytest.raises(CheckpointError, match="no exit head"):
        ExitHead.load(Path(spec.options.target))
    with pytest.raises(ConfigError, match="rank 4; this run wants"):
        run_training(replace(spec, out=tmp_path / "more", init=folder, settings={"rank": "8"}))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"rank": 4', '"rank": 5'))
    with pytest.raises(
        CheckpointError, match=r"tensor 'down.weight' has shape \[4, 64\], expected \[5, 64\]"
    ):
        ExitHead.load(folder)


def test_a_target_without_the_needed_layer(tmp_path: Path) -> None:
    """The error comes before anything is trained."""
    with pytest.raises(ConfigError, match="exit_layer must be below the target's 3 layers"):
        run_training(spec_for(tmp_path, settings={"exit_layer": "3"}))
    assert run_training(spec_for(tmp_path)) is not None  # the corrected command may use the folder
    with pytest.raises(CheckpointError, match="0 < exit_layer < 3"):
        ExitConfig(8, 3, 3, 4, "t")


@pytest.mark.slow
def test_going_on_from_a_head(tmp_path: Path) -> None:
    """--init: the first point of the new curve is the last of the old run's best."""
    spec = spec_for(tmp_path)
    first = run_training(spec)
    second = run_training(replace(spec, out=tmp_path / "second", init=spec.out / "drafter"))
    assert first is not None
    assert second is not None
    assert second.curve[0].tau == pytest.approx(max(point.tau for point in first.curve))
