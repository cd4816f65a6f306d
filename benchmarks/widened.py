"""The demo target as a mixture of experts: every expert is its MLP, so that any choice computes what
the MLP did, and passes cost what those of a mixture cost.

A router of random directions spreads tokens over the experts by their hidden states; the directions
have no part along the mean state, for else some experts would be everybody's. Attention gets heads
that are zero, until its share of a plain pass is that of a published model. A larger mixture has more
heads and wider experts, zero as well: what a step costs beside its pass is then a smaller share of it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from outrider.demo import DEMO_PROMPTS, demo_paths

SPREAD = 1.5  # deviation of a router's scores
GROUP = 3  # query heads of the demo that share keys and values


@dataclass(frozen=True)
class Shape:
    """How a mixture is cut: experts, those of each token, query heads, and how many times as wide as
    the demo's MLP an expert is."""

    experts: int
    active: int
    heads: int
    times: int = 1

    @property
    def name(self) -> str:
        size = "" if self.times == 1 else f", {self.times} times as wide"
        return f"{self.experts} experts, {self.active} active{size}"


def widened(shape: Shape, folder: Path, seed: int = 0) -> Path:
    """The checkpoint of this shape, written to `folder` where it is not there yet."""
    if (folder / "config.json").exists():
        return folder
    source = demo_paths().target
    small = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = mixture_config(small.config, shape)
    with torch.device("meta"):
        wide = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = mixture_weights(small, shape, mean_states(small), seed)
    wide.load_state_dict(state, assign=True)
    wide.tie_weights()
    wide.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / file, folder / file)
    return folder


def mixture_config(small: Any, shape: Shape) -> MixtralConfig:
    """The demo's own config with experts."""
    same = (
        "vocab_size hidden_size num_hidden_layers head_dim rms_norm_eps "
        "max_position_embeddings rope_parameters bos_token_id eos_token_id tie_word_embeddings"
    )
    return MixtralConfig(
        **{name: getattr(small, name) for name in same.split()},
        intermediate_size=shape.times * small.intermediate_size,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads // GROUP,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.active,
        sliding_window=None,
        pad_token_id=None,
    )


@torch.inference_mode()
def mean_states(small: Any) -> list[Tensor]:
    """Of each layer the mean (H,) and the deviation of what its MLP reads, over some texts."""
    tokenizer = AutoTokenizer.from_pretrained(demo_paths().target)
    read: list[list[Tensor]] = [[] for _ in small.model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, given, kept=kept: kept.append(given[0].float().flatten(0, -2))
        )
        for layer, kept in zip(small.model.layers, read, strict=True)
    ]
    for text in DEMO_PROMPTS:
        small.generate(
            **tokenizer(text, return_tensors="pt", return_token_type_ids=False),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
        )
    for hook in hooks:
        hook.remove()
    return [torch.cat(each).mean(0) for each in read]


def mixture_weights(small: Any, shape: Shape, means: list[Tensor], seed: int) -> dict[str, Tensor]:
    """The state of the mixture."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, weight in small.state_dict().items():
        part = name.rsplit(".", 2)[1] if name.count(".") > 2 else ""
        if part in ("q_proj", "k_proj", "v_proj"):  # new heads add nothing
            heads = shape.heads if part == "q_proj" else shape.heads // GROUP
            wide = weight.new_zeros(heads * small.config.head_dim, weight.shape[1])
            wide[: len(weight)] = weight
            state[name] = wide
        elif part == "o_proj":
            wide = weight.new_zeros(len(weight), shape.heads * small.config.head_dim)
            wide[:, : weight.shape[1]] = weight
            state[name] = wide
        elif ".mlp." not in name:
            state[name] = weight
    for number, (layer, mean) in enumerate(zip(small.model.layers, means, strict=True)):
        prefix = f"model.layers.{number}.mlp."
        mlp = layer.mlp
        more = (shape.times - 1) * small.config.intermediate_size
        gate, up = (F.pad(one.weight, (0, 0, 0, more)) for one in (mlp.gate_proj, mlp.up_proj))
        down = F.pad(mlp.down_proj.weight, (0, more))
        state[prefix + "experts.gate_up_proj"] = torch.cat([gate, up]).repeat(shape.experts, 1, 1)
        state[prefix + "experts.down_proj"] = down.repeat(shape.experts, 1, 1)
        direction = mean / mean.norm()
        router = torch.randn(shape.experts, len(mean), generator=generator)
        router -= torch.outer(router @ direction, direction)
        router *= SPREAD / layer.post_attention_layernorm.weight.float().norm()
        state[prefix + "gate.weight"] = router.bfloat16()
    return state
