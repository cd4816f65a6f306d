"""Random trained heads for tests: small, and of every published shape. They guess badly, which is
all a drafter's test needs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outrider.models.heads.acceptance import AcceptanceConfig, AcceptanceHead
from outrider.models.heads.block import BlockHead
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_files import save_block
from outrider.models.heads.eagle import EagleConfig, EagleHead, Kind
from outrider.models.heads.eagle_files import default_signals, save_eagle
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads, save_medusa
from tests.mtp_heads import save_with_mtp


def random_eagle(
    kind: Kind, target: Any, *, draft_vocab: int | None = None, seed: int = 3, **changes: Any
) -> EagleHead:
    """A head for a target with this config. `draft_vocab`: it knows so many of the target's tokens;
    `changes`: of its config."""
    own = {"own_embedding": False, "own_output": kind == "eagle3"}
    config = EagleConfig(
        kind=kind,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=target.hidden_size // 4,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab or target.vocab_size,
        signals=default_signals(target.num_hidden_layers) if kind == "eagle3" else (-1,),
        **own,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = (
            None
            if draft_vocab is None
            else torch.randperm(target.vocab_size)[:draft_vocab].sort().values
        )
        head = EagleHead(replace(config, **changes), ids)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.normal_(1.0, 0.2)
    return head.eval().requires_grad_(False)


def medusa_heads(target: Any, folder: Path) -> None:
    """Random heads that still know a little: their output layers are the target's."""
    size = target.config.hidden_size
    heads = MedusaHeads.new(
        MedusaConfig(
            size, target.config.vocab_size, 3, accuracies=((0.5, 0.2), (0.4, 0.1), (0.3,))
        ),
        target,
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for head in heads.heads:
            head.layers[0].weight.copy_(torch.randn(size, size, generator=generator) * size**-0.5)
    save_medusa(heads, folder)


def random_block(target: Any, *, draft_vocab: int | None = None, **changes: Any) -> BlockHead:
    """A head, bound to this module, with everything that a head can have but for `changes` of its
    config. `draft_vocab`: it knows so many of the target's tokens, by an output layer of its own.
    """
    sizes = target.config
    config = BlockConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=sizes.vocab_size,
        block_size=6,
        target_hidden_size=sizes.hidden_size,
        target_layers=(0, 1, -1),
        num_target_layers=sizes.num_hidden_layers,
        mask_token_id=1,
        markov_rank=8,
        markov_gated=True,
        confidence=True,
    )
    if draft_vocab is not None:
        changes |= {"draft_vocab_size": draft_vocab, "own_output": True}
    generator = torch.Generator().manual_seed(6)
    ids = (
        None
        if draft_vocab is None
        else torch.randperm(sizes.vocab_size, generator=generator)[:draft_vocab].sort().values
    )
    head = BlockHead(replace(config, **changes), ids)
    with torch.no_grad():
        for weight in head.parameters():
            shape = weight.shape
            spread = 0.2 if weight.dim() == 1 else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(shape, generator=generator) * spread + (weight.dim() == 1))
    head.bind(target.get_input_embeddings(), target.get_output_embeddings())
    return head.eval().requires_grad_(False)


def block_head(target: Any, folder: Path) -> None:
    """A random head with everything that a head can have."""
    save_block(random_block(target, window=8, window_layers=(1,), causal_windows=True), folder)


def eagle_head(kind: Kind, draft_vocab: int | None) -> Callable[[Any, Path], None]:
    """Writes a random head; `draft_vocab`: it knows so many of the target's tokens."""
    return lambda target, folder: save_eagle(
        random_eagle(kind, target.config, draft_vocab=draft_vocab), folder
    )


def mtp_head(target: Any, folder: Path, num_layers: int = 1) -> None:
    """A random head alone, in Qwen's layout."""

    def make(seed: int) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return type(target)(copy.deepcopy(target.config)).eval() if seed else target

    save_with_mtp(folder, make, "qwen", num_layers=num_layers, alone=True)


def acceptance_head(target: Any, folder: Path) -> None:
    """A random head that lets drafts be short and long: its estimates lie on both sides of any
    threshold."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        vocab_size = target.get_output_embeddings().weight.shape[0]
        head = AcceptanceHead(AcceptanceConfig(token_size=4, vocab_size=vocab_size))
        head.tokens.weight.data.normal_()
    head.save(folder)


# Drafters that require a head: who writes an untrained head for the target into a folder.
HEADS: dict[str, Callable[[Any, Path], None]] = {
    "block": block_head,
    "eagle": eagle_head("eagle", None),
    "eagle3": eagle_head("eagle3", 200),
    "medusa": medusa_heads,
    "mtp": mtp_head,
}
# Further kinds of block heads, by a name for the folder.
DFLASH: dict[str, Any] = {
    "markov_rank": 0, "markov_gated": False, "confidence": False, "confidence_with_markov": False, "sample_from_anchor": False,
}  # fmt: skip
JETSPEC = {**DFLASH, "causal": True}
DFLASH2 = {
    **DFLASH,
    "conv_taps": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 12,
}
BLOCKS: dict[str, Callable[[Any, Path], None]] = {
    "jetspec": lambda target, folder: save_block(random_block(target, **JETSPEC), folder),
    "dflash2": lambda target, folder: save_block(random_block(target, **DFLASH2), folder),
    "rnn": lambda target, folder: save_block(
        random_block(target, markov_gated=False, markov_recurrent=True), folder
    ),
}
# Further kinds of EAGLE-3 heads: two layers that draft in one pass.
MASKED: dict[str, Callable[[Any, Path], None]] = {
    "peagle": lambda target, folder: save_eagle(
        random_eagle("eagle3", target.config, draft_vocab=200, num_layers=2, mask_token=256), folder
    )
}
# The same for stop=acceptance of drafter draft-model.
ACCEPTANCE: dict[str, Callable[[Any, Path], None]] = {"acceptance": acceptance_head}
