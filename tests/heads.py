"""Random trained heads for tests: small, and of every published shape. They guess badly, which is all a drafter's test needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from outrider.models.heads.eagle import EagleConfig, EagleHead, Kind
from outrider.models.heads.eagle_files import default_signals


def random_eagle(kind: Kind, target: Any, *, draft_vocab: int | None = None, seed: int = 3, **changes: Any) -> EagleHead:
    """A head for a target with this config. `draft_vocab`: it knows so many of the target's tokens; `changes`: of its config."""
    own = {"own_embedding": False, "own_output": kind == "eagle3"}
    config = EagleConfig(
        kind=kind, hidden_size=target.hidden_size, target_hidden_size=target.hidden_size, intermediate_size=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=target.hidden_size // 4, vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab or target.vocab_size,
        signals=default_signals(target.num_hidden_layers) if kind == "eagle3" else (-1,), **own,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = None if draft_vocab is None else torch.randperm(target.vocab_size)[:draft_vocab].sort().values
        head = EagleHead(replace(config, **changes), ids)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(0.0, 0.3) if parameter.dim() > 1 else parameter.normal_(1.0, 0.2)
    return head.eval().requires_grad_(False)
