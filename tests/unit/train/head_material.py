"""What the tests of trained heads share: a tiny target, its own texts, their features, and the
engine on a saved head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.models.signals import Listening
from outrider.sampling.params import SamplingParams
from outrider.settings import parse_settings
from outrider.train.recipe import FeatureBatch, Recipe, RecipeSetup
from tests.helpers import byte_tokenizer, make_row, save_checkpoint, tiny_llama

VOCAB = 257
PROMPT = 4


def target_module(**changes: Any) -> LlamaForCausalLM:
    return tiny_llama(VOCAB, sharpness=3.0, **{"num_hidden_layers": 3, **changes}).requires_grad_(
        False
    )


def own_texts(module: LlamaForCausalLM, count: int, length: int, seed: int = 0) -> Tensor:
    """(count, length): prompts from a few tokens, continued by the target's own choice, so that
    there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(10, 18, (count, PROMPT), generator=generator)
    with torch.inference_mode():
        while tokens.shape[1] < length:
            tokens = torch.cat(
                [tokens, module(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)], dim=1
            )
    return tokens.clone()


@torch.no_grad()
def features(
    module: LlamaForCausalLM, signals: tuple[int, ...], tokens: Tensor, progress: float = 1.0
) -> FeatureBatch:
    heard: dict[int, Tensor] = {}
    with Listening(module, signals).during(heard):
        logits = module(input_ids=tokens, use_cache=False).logits
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[:, PROMPT - 1 : -1] = True
    return FeatureBatch(
        tokens, mask, heard, logits, torch.full((len(tokens),), tokens.shape[1]), progress
    )


def build_recipe(
    kind: Any, module: LlamaForCausalLM, init: Path | None = None, **settings: Any
) -> Any:
    chosen = parse_settings(kind.Settings, settings, "recipe")
    torch.manual_seed(0)
    return kind.build(
        RecipeSetup(module, None, "tiny", chosen, torch.ones(VOCAB, dtype=torch.int64), init)
    )


def train(recipe: Recipe, module: LlamaForCausalLM, tokens: Tensor, steps: int, lr: float) -> None:
    optimizer = torch.optim.AdamW([p for p in recipe.module.parameters() if p.requires_grad], lr=lr)
    torch.manual_seed(1)
    for step in range(steps):
        optimizer.zero_grad()
        recipe.loss(features(module, recipe.signals, tokens, step / steps)).loss.backward()
        optimizer.step()


def engine(
    folder: Path, module: LlamaForCausalLM, drafter: str, head: Path, gamma: int, **options: Any
) -> Decoder:
    """The real one, with this head."""
    if not (folder / "target").exists():
        save_checkpoint(folder / "target", module, byte_tokenizer())
    return build(
        Options(
            str(folder / "target"),
            drafter=drafter,
            draft=str(head),
            drafter_options=options,
            num_draft_tokens=gamma,
            dtype="float32",
            runtime="eager",
            threads=1,
        )
    ).decoder


def tau(decoder: Decoder, prompts: Tensor, num_tokens: int) -> float:
    """Tokens per target pass, greedy."""
    steps = emitted = 0
    for prompt in prompts.tolist():
        decoder.add(make_row(prompt, SamplingParams(max_tokens=num_tokens), seed=0))
        while not decoder.rows[0].finish_reason:
            decoder.step()
        row = decoder.remove(0)
        steps = steps + row.stats.steps
        emitted = emitted + row.stats.emitted
    return emitted / steps
