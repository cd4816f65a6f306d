"""Draft models: a transformers folder goes out as it is, and is checked where it will draft: in
assisted generation there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.errors import CheckpointError
from outrider.models.loading.load import load_config, load_module, load_tokenizer
from outrider.models.source import resolve
from outrider.models.tokens.vocabulary import check_same_vocabulary

CPU = torch.device("cpu")
NUM_PROMPT = 8  # tokens of the text that the checks begin with
NUM_NEW = 24  # tokens that are drafted for
NUM_DRAFT = 4  # per pass


def export_draft(source: Path, out: Path, target: str, tokenizer: Any) -> None:
    """Copied when it can be loaded and speaks the target's language. Raises CheckpointError,
    CapabilityError."""
    check_same_vocabulary(tokenizer, load_tokenizer(resolve(str(source))), target, str(source))
    _load(source)
    shutil.copytree(source, out, dirs_exist_ok=True)


def check_draft(source: Path, out: Path, target: Any) -> list[str]:
    """The findings, a line each. Raises CheckpointError when the copy computes something else."""
    models = [_load(source), _load(out)]
    tokens = torch.arange(NUM_PROMPT)[None]
    with torch.no_grad():
        logits = [model(input_ids=tokens, use_cache=False).logits for model in models]
    if not torch.equal(*logits):
        raise CheckpointError(f"{out} computes other logits than {source}")
    text, passes = assisted(target, models[1], tokens)
    return [
        f"{out} loads in transformers as {type(models[1]).__name__} and computes the logits of {source}",
        f"transformers' assisted generation: {text} tokens in {passes} passes of the target",
    ]


def assisted(target: Any, draft: Any, tokens: torch.Tensor) -> tuple[int, int]:
    """Tokens that transformers generates, greedily, with `draft` as its assistant model, and the
    target's passes for them."""
    draft.generation_config.num_assistant_tokens = NUM_DRAFT
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0
    with _counted(target) as passes:
        text = target.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            assistant_model=draft.to(target.dtype),
            do_sample=False,
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
        )
    return text.shape[1] - tokens.shape[1], len(passes)


@contextmanager
def _counted(module: nn.Module) -> Iterator[list[None]]:
    """One entry for every pass."""
    passes: list[None] = []
    hook = module.register_forward_hook(lambda *call: passes.append(None))
    try:
        yield passes
    finally:
        hook.remove()


def _load(folder: Path) -> Any:
    source = resolve(str(folder))
    return load_module(source, load_config(source), torch.float32, CPU)
