"""The EAGLE recipes: unrolled training must compute what drafting computes, and a few steps of it
must help."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.heads.eagle_files import TargetSizes, load_eagle
from outrider.models.heads.head_lm import HeadLM
from outrider.models.signals import Listening
from outrider.settings import parse_settings
from outrider.train import eagle
from outrider.train.eagle import Eagle3Recipe, EagleRecipe
from outrider.train.recipe import FeatureBatch, RecipeSetup
from outrider.train.unrolled import unrolled
from tests.heads import random_eagle
from tests.helpers import tiny_llama

VOCAB = 40
RECIPES = {"eagle": EagleRecipe, "eagle3": Eagle3Recipe}
UNROLLS = 4


def target() -> Any:
    return tiny_llama(VOCAB, sharpness=3.0, num_hidden_layers=3).requires_grad_(False)


def setup_of(kind: str, module: Any, init: Path | None = None, **settings: Any) -> RecipeSetup:
    recipe = RECIPES[kind]
    counts = torch.arange(VOCAB).flip(0)
    return RecipeSetup(
        module, None, "tiny", parse_settings(recipe.Settings, settings, kind), counts, init
    )


@torch.no_grad()
def batch_of(
    module: Any, signals: tuple[int, ...], tokens: Tensor, lengths: list[int] | None = None
) -> FeatureBatch:
    """The target's features of texts whose prompts are two tokens long."""
    heard: dict[int, Tensor] = {}
    with Listening(module, signals).during(heard):
        logits = module(input_ids=tokens, use_cache=False).logits
    counted = torch.tensor(lengths or [tokens.shape[1]] * len(tokens))
    positions = torch.arange(tokens.shape[1])
    mask = (positions >= 1) & (positions < counted[:, None] - 1)
    return FeatureBatch(tokens, mask, heard, logits, counted)


def texts(module: Any, count: int, length: int, seed: int = 0) -> Tensor:
    """Texts drawn from the target at temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, VOCAB, (count, 2), generator=generator)
    with torch.no_grad():
        for _ in range(length - 2):
            probs = module(input_ids=tokens, use_cache=False).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=generator)], dim=1)
    return tokens


FLAGS: list[dict[str, Any]] = [
    {}, {"norm_before_residual": True, "fc_norm": True, "norm_output": True}, {"norm_before_fc": True, "num_layers": 2},
    {"draft_vocab": 20, "qk_norm": True},
]  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        {"kind": "eagle"},
        {"kind": "eagle", "num_layers": 2, "fc_bias": True},
        *({"kind": "eagle3", **flags} for flags in FLAGS),
    ],
    ids=str,
)
@torch.inference_mode()
def test_unrolled_training_computes_what_drafting_computes(flags: dict[str, Any]) -> None:
    """The classic bug: shifted tokens, positions, masks or states that differ between training and
    drafting. Every chain of every position, drafted for real on its own cache with the text's
    tokens, gives the logits of the unrolled forward."""
    module = target()
    head = random_eagle(**{"target": module.config, **flags})
    head.bind(module.get_input_embeddings().weight, module.get_output_embeddings())
    tokens = texts(module, 2, 9, seed=1)
    batch = batch_of(module, head.config.signals, tokens)
    features = head.features(batch.hidden)
    trained = [
        head.in_full(head.logits(states)) for states in unrolled(head, tokens, features, UNROLLS)
    ]
    checked = 0
    for row in range(2):
        # the last known feature is that of position `start`
        for start in range(tokens.shape[1] - 2):
            lm = HeadLM(head, VOCAB, 128)
            lm.kv.add_row()
            lm.give([features[row, : start + 1]])
            logits = lm.forward(tokens[row : row + 1, 1 : start + 2]).logits[:, start]
            lm.kv.advance(0, start + 1)
            for step in range(min(UNROLLS, tokens.shape[1] - 1 - start)):
                if step:
                    logits = lm.forward(
                        tokens[row : row + 1, start + 1 + step : start + 2 + step]
                    ).logits[:, 0]
                    lm.kv.advance(0, 1)
                wanted = trained[step][row, start]
                # logits of random heads are large
                scale = float(wanted[wanted.isfinite()].abs().max())
                torch.testing.assert_close(wanted, logits[0], rtol=1e-4, atol=1e-4 * scale)
                checked += 1
    assert checked > 40


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle", {"unrolls": 2, "loss_weight": 1.0}),
        ("eagle3", {"unrolls": 2}),
        ("eagle3", {"unrolls": 2, "draft_vocab": 25, "loss": "kl"}),
    ],
)
def test_training_raises_the_expected_acceptance(
    kind: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few dozen steps on the target's own texts beat random weights, and the saved head computes
    what the trained one does."""
    module = target()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        with monkeypatch.context() as patched:
            patched.setattr(eagle, "_begin_as_deepest_state", lambda head: None)
            random = RECIPES[kind].build(setup_of(kind, module, **settings))
        held_out = batch_of(module, random.signals, texts(module, 8, 16, seed=9))
        random.module.eval()
        with torch.no_grad():
            before = random.loss(held_out)
        torch.manual_seed(0)
        recipe = RECIPES[kind].build(setup_of(kind, module, **settings))
        recipe.module.train()
        trainable = [
            parameter for parameter in recipe.module.parameters() if parameter.requires_grad
        ]
        optimizer = torch.optim.AdamW(trainable, lr=3e-3)
        batches = [
            batch_of(module, recipe.signals, texts(module, 16, 16, seed=seed)) for seed in range(4)
        ]
        for step in range(32):
            report = recipe.loss(batches[step % 4])
            optimizer.zero_grad()
            report.loss.backward()
            optimizer.step()
        recipe.module.eval()
        with torch.no_grad():
            after = recipe.loss(held_out)
    assert len(after.per_position) == settings["unrolls"]
    assert sum(after.survival) > 1.5 * sum(before.survival), (
        before.per_position,
        after.per_position,
    )
    assert after.per_position[-1] > before.per_position[-1] * 0.9
    recipe.save(tmp_path)
    head = load_eagle(tmp_path, kind, TargetSizes.of(module.config))  # type: ignore[arg-type]
    head.bind(module.get_input_embeddings().weight, module.get_output_embeddings())
    again = RECIPES[kind](head, parse_settings(RECIPES[kind].Settings, settings, kind))
    with torch.no_grad():
        assert float(again.loss(held_out).loss) == pytest.approx(float(after.loss), rel=1e-4)
    assert head.config.trained_for == "tiny"


def test_padding_and_prompts_do_not_count() -> None:
    """Catches a loss over padding, over the prompt, or one where a chain runs past the end of its
    text."""
    module = target()
    recipe = Eagle3Recipe.build(setup_of("eagle3", module, unrolls=3))
    recipe.module.eval()
    tokens = texts(module, 1, 12, seed=4)
    with torch.no_grad():
        alone = recipe.loss(batch_of(module, recipe.signals, tokens[:, :8]))
        padded = recipe.loss(batch_of(module, recipe.signals, tokens, lengths=[8]))
    assert float(padded.loss) == pytest.approx(float(alone.loss), rel=1e-4)
    assert padded.per_position == pytest.approx(alone.per_position, rel=1e-4)
    assert padded.count == alone.count == 8 - 2 - 2, (
        "x_2 .. x_7 are the response: chains of 3 begin at x_2 .. x_5"
    )


def test_reduced_vocabulary_holds_the_frequent_tokens_and_counts_the_others_as_rejections() -> None:
    module = target()
    recipe = Eagle3Recipe.build(setup_of("eagle3", module, draft_vocab=10, unrolls=1))
    assert recipe.head.draft_ids.tolist() == list(range(10))
    batch = batch_of(module, recipe.signals, texts(module, 4, 12))
    recipe.module.eval()
    with torch.no_grad():
        report = recipe.loss(batch)
    inside = batch.logits.softmax(-1)[..., :10].sum(-1)[batch.mask].mean()
    assert report.per_position[0] <= float(inside) + 0.05


def test_a_new_head_begins_as_the_deepest_state_it_reads() -> None:
    """Catches random beginnings, which are sure of nonsense: its first guesses are the output
    layer's on that state."""
    module = target()
    recipe = Eagle3Recipe.build(
        setup_of("eagle3", module, layers="1,3,2", fc_norm=False, norm_before_residual=False)
    )
    batch = batch_of(module, recipe.signals, texts(module, 2, 8))
    states = next(unrolled(recipe.head, batch.tokens, recipe.head.features(batch.hidden), 1))
    torch.testing.assert_close(recipe.head.logits(states), batch.logits[:, :-1])


def test_heads_of_keys_and_values_of_its_own() -> None:
    module = target()
    heads = module.config.num_attention_heads
    recipe = Eagle3Recipe.build(setup_of("eagle3", module, kv_heads=heads))
    assert recipe.head.layers[0].self_attn.v_proj.out_features == module.config.hidden_size
    with pytest.raises(ConfigError, match=f"kv_heads must divide the {heads} heads, got 3"):
        Eagle3Recipe.build(setup_of("eagle3", module, kv_heads=3))


def test_going_on_from_a_saved_head(tmp_path: Path) -> None:
    """--init takes the weights; a head of other settings is refused by what differs."""
    module = target()
    first = Eagle3Recipe.build(setup_of("eagle3", module))
    first.save(tmp_path)
    again = Eagle3Recipe.build(setup_of("eagle3", module, tmp_path))
    for name, tensor in first.head.state_dict().items():
        assert torch.equal(again.head.state_dict()[name], tensor), name
    assert all(parameter.requires_grad for parameter in again.module.parameters())
    with pytest.raises(ConfigError, match="norm_output=True"):
        Eagle3Recipe.build(setup_of("eagle3", module, tmp_path, norm_output=False))
    with pytest.raises(ConfigError, match="intermediate_size="):
        Eagle3Recipe.build(setup_of("eagle3", module, tmp_path, intermediate_size=24))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("eagle3", {"loss": "kll"}, "kll"),
        ("eagle3", {"layers": "9"}, "0..3"),
        ("eagle3", {"draft_vocab": 99}, "99"),
        ("eagle3", {"unrolls": 0}, "at least 1"),
        ("eagle", {"step_decay": 0}, "step_decay"),
        ("eagle", {"noise": -1}, "noise"),
        ("eagle3", {"draft_vocab": 5, "own_output": False}, "own_output"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    kind: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RECIPES[kind].build(setup_of(kind, target(), **settings))


def test_no_parameter_of_the_target_is_trained_or_saved(tmp_path: Path) -> None:
    module = target()
    recipe = EagleRecipe.build(setup_of("eagle", module))
    own = {id(parameter) for parameter in recipe.module.parameters()}
    assert not own & {id(parameter) for parameter in module.parameters()}
    assert not [name for name in recipe.module.state_dict() if "embed" in name or "lm_head" in name]
    assert replace(recipe.head.config, own_output=True) != recipe.head.config
