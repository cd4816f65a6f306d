"""Passes of a mixture of experts in bytes: each distinct expert of a pass is read once.

With E experts of which a token names a, and D(n) distinct ones among n tokens,

    v(n) = (rest + experts D(n) / E) / (rest + experts a / E)

in bytes of weights. Nothing is known of a text here, so its tokens name experts independently of
one another: D(n) = E (1 - (1 - a / E)^n). Tokens of one text share more, so passes cost less than
this; a result of `bench` has what they took.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.build import model_source
from outrider.lab.estimate.estimate_result import Mixture
from outrider.models.loading.load import load_config
from outrider.models.loading.multimodal import auto_classes
from outrider.models.quantised.scheme import EXPERTS, has_experts

# what configs call the experts of a token
NAMED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")  # fmt: skip


def mixture_of(name: str) -> Mixture | None:
    """The experts of a model, from its config alone; None where it is no mixture, or where its
    config does not tell. Raises CheckpointError, CapabilityError."""
    config = load_config(model_source(name, "target"))
    return mixture_in(config) if has_experts(config) else None


def mixture_in(config: Any) -> Mixture | None:
    """The experts that a config describes; the model is built without storage."""
    text = config.get_text_config()
    active = next((count for key in NAMED if (count := getattr(text, key, None))), None)
    counts = [count for key in EXPERTS if (count := getattr(text, key, None) or 1) > 1]
    if not counts or active is None or not 0 < active <= counts[0]:
        return None
    try:
        with torch.device("meta"):
            model = auto_classes(config)[0].from_config(config)
    except Exception:  # noqa: BLE001  code of a config's own, as in `memory.config_weights_bytes`
        return None
    parameters = dict(model.named_parameters())
    experts = sum(each.numel() for name, each in parameters.items() if ".experts." in name)
    table = model.get_input_embeddings().weight
    is_read = model.get_output_embeddings().weight is table
    rest = sum(each.numel() for each in parameters.values()) - experts
    rest -= 0 if is_read else table.numel()
    return Mixture(experts=counts[0], active=active, expert_share=experts / (experts + rest))
