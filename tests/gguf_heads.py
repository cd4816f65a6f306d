"""GGUF files with an MTP head, written as llama.cpp's converter would from what
`tests/mtp_heads.py` makes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests.gguf_files import (
    Kind,
    add_tensor,
    add_value,
    finish,
    rounded,
    stored_tensors,
    write_model,
)
from tests.mtp_heads import MtpReference

PARTS = {
    "enorm": "embed_norm",
    "hnorm": "hidden_norm",
    "eh_proj": "projection",
    "shared_head_norm": "norm",
}
RAISED = ("qwen35", "qwen35moe", "qwen3next")  # norms, by one
# tensors that stay fp32
PLAIN = (
    "norm",
    "ffn_gate_inp",
    "ssm_",
    "attn_k_b",
    "attn_v_b",
    "attn_qkv",
    "attn_gate",
    "exp_probs_b",
)
ROUTERS = ("gate.weight", "router.weight", "shared_expert_gate.weight", "kv_b_proj.weight")


def round_matrices(module: Any, kind: Kind) -> None:
    """Round what files store in blocks, in place."""
    for name, value in module.named_parameters():
        if (
            value.ndim > 1
            and value.shape[-1] % 32 == 0
            and not name.endswith(ROUTERS)
            and ".linear_attn." not in name
        ):
            value.data.copy_(rounded(value.data.contiguous(), kind))


def write_with_head(
    path: Path,
    reference: MtpReference,
    head: Mapping[str, np.ndarray],
    architecture: str,
    *,
    kind: Kind = Kind.F32,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """The target of a reference with the tensors of its head. `tensors`: more of the target's."""
    count = reference.target.config.num_hidden_layers
    num_layers = len(reference.layers)
    metadata = {
        f"{architecture}.block_count": count + num_layers,
        f"{architecture}.nextn_predict_layers": num_layers,
    }
    kept = {
        name: value for name, value in {**(tensors or {}), **head}.items() if name not in leave_out
    }
    return write_model(
        path,
        reference.target,
        architecture,
        changes={**metadata, **(changes or {})},
        tensors=kept,
        leave_out=leave_out,
        kind=lambda name: Kind.F32 if any(part in name for part in PLAIN) else kind,
    )


def head_tensors(
    reference: MtpReference, donors: Sequence[Any], architecture: str
) -> dict[str, np.ndarray]:
    """A head's tensors by GGUF's names."""
    count = reference.target.config.num_hidden_layers
    found: dict[str, np.ndarray] = {}
    for index, (donor, parts) in enumerate(zip(donors, reference.layers, strict=True)):
        last = donor.config.num_hidden_layers - 1
        for name, value in stored_tensors(donor, architecture).items():
            if own := re.fullmatch(rf"blk\.{last}\.(.+)", name):
                found[f"blk.{count + index}.{own[1]}"] = value
        found |= parts_of_layer(parts, count + index, architecture)
    return found


def parts_of_layer(
    parts: Mapping[str, Any], block: int, architecture: str
) -> dict[str, np.ndarray]:
    """Norms and projection of a layer."""
    found: dict[str, np.ndarray] = {}
    for theirs, ours in PARTS.items():
        weight = parts[ours].weight.detach().float()
        raised = architecture in RAISED and theirs != "eh_proj"
        found[f"blk.{block}.nextn.{theirs}.weight"] = (weight + 1 if raised else weight).numpy()
    return found


def zeros_of_copies(reference: MtpReference, block: int) -> dict[str, np.ndarray]:
    """Copies of the target's tables, which nobody reads."""
    shape = tuple(reference.target.get_input_embeddings().weight.shape)
    return {
        f"blk.{block}.nextn.{name}.weight": torch.zeros(shape).numpy()
        for name in ("embed_tokens", "shared_head_head")
    }


EAGLE_LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}, "self_attn.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}  # fmt: skip
BLOCK_LAYER = EAGLE_LAYER | {f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"}
EAGLE_TABLES = {
    "fc": "fc",
    "norm": "output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
}
BLOCK_TABLES = EAGLE_TABLES | {
    "hidden_norm": "enc.output_norm", "markov_head.markov_w1": "markov_w1", "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj", "candidate_selector.hidden_projection": "selector_hidden",
}  # fmt: skip
BARE = {  # which folders have no ending for
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
}


def write_draft_head(
    path: Path,
    head: Any,
    architecture: str,
    *,
    kind: Kind = Kind.F32,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """An EAGLE-3 or a block head as llama.cpp's converter writes it. `changes`, `tensors`: as of
    `write_model`."""
    writer = gguf.GGUFWriter(path, architecture)
    found = {
        **_head_metadata(head, architecture),
        **{f"{architecture}.{key}": value for key, value in (changes or {}).items()},
    }
    for key, value in found.items():
        add_value(writer, key, value)
    for name, value in head.state_dict().items():
        if name == "draft_ids":
            continue
        stored = value.float()
        if architecture == "eagle3" and (part := re.search(r"self_attn\.([qk])_proj", name)):
            heads = (
                head.config.num_attention_heads
                if part[1] == "q"
                else head.config.num_key_value_heads
            )
            stored = (
                stored.view(heads, 2, -1, stored.shape[1]).transpose(1, 2).reshape(stored.shape)
            )
        in_blocks = stored.ndim == 2 and stored.shape[-1] % 32 == 0 and "codebook" not in name
        add_tensor(
            writer, stored_name(name, architecture), stored.numpy(), kind if in_blocks else Kind.F32
        )
    ids = head.draft_ids if architecture == "eagle3" else head.token_ids
    if ids is not None:
        writer.add_tensor("d2t", ids.numpy().astype(np.int64), raw_dtype=Kind.I64)
    for name, array in (tensors or {}).items():
        add_tensor(writer, name, array, Kind.F32)
    return finish(writer, path)


def stored_name(name: str, architecture: str) -> str:
    """A tensor of a head by GGUF's name."""
    tables, layers = (
        (EAGLE_TABLES, EAGLE_LAYER) if architecture == "eagle3" else (BLOCK_TABLES, BLOCK_LAYER)
    )
    if name in BARE:
        return BARE[name]
    if conv := re.fullmatch(
        r"layers\.(\d+)\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)", name
    ):
        part = "base" if conv[3] == "base_kernel" else "proj.weight"
        return f"blk.{conv[1]}.{'attn' if conv[2] == 'attention' else 'ffn'}_conv_{part}"
    owner, _, end = name.rpartition(".")
    if layer := re.fullmatch(r"layers\.(\d+)\.(.+)", owner):
        return f"blk.{layer[1]}.{layers[layer[2]]}.{end}"
    return f"{tables[owner]}.{end}"


def _head_metadata(head: Any, architecture: str) -> dict[str, Any]:
    config = head.config
    is_eagle = architecture == "eagle3"
    found = {
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads if is_eagle else config.num_heads,
        "attention.head_count_kv": config.num_key_value_heads if is_eagle else config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "context_length": 512,
        "vocab_size": config.vocab_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps if is_eagle else config.norm_eps,
        "rope.freq_base": float(config.rope["rope_theta"]),
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_layers,
    }
    if is_eagle:
        found |= {
            "extract_layers": list(config.signals),
            "norm_before_residual": config.norm_before_residual,
        }
    else:
        inputs = [
            config.num_target_layers if layer < 0 else layer for layer in config.target_layers
        ]
        found |= {
            "target_layers": inputs,
            "block_size": config.block_size,
            "attention.causal": config.causal,
        }
        found |= {"sample_from_anchor": config.sample_from_anchor} if config.markov_rank else {}
        found |= {"selector_top_k": config.selector_top_k} if config.selector_rank else {}
    named = {f"{architecture}.{key}": value for key, value in found.items()}
    return named if is_eagle else {**named, "tokenizer.ggml.mask_token_id": config.mask_token_id}


ASSISTANT_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "pre_projection": "nextn.pre_projection",
    "post_projection": "nextn.post_projection",
}  # fmt: skip
ASSISTANT_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_proj": "attn_q", "self_attn.q_norm": "attn_q_norm",
    "self_attn.o_proj": "attn_output", **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "layer_scalar": "layer_output_scale",
}  # fmt: skip


def write_assistant(
    path: Path, module: Any, *, kind: Kind = Kind.F32, changes: Mapping[str, Any] | None = None
) -> Path:
    """Gemma 4's assistant as llama.cpp's converter writes it, clusters of tokens left out."""
    writer = gguf.GGUFWriter(path, "gemma4-assistant")
    text = module.config.get_text_config()
    slides = [one == "sliding_attention" for one in text.layer_types]
    rope = text.rope_parameters
    each = [text.per_layer_config[index] for index in range(len(slides))]
    full = each[slides.index(False)]
    short = each[slides.index(True)]
    found = {
        "embedding_length": text.hidden_size,
        "embedding_length_out": module.config.backbone_hidden_size,
        "block_count": len(slides),
        "nextn_predict_layers": len(slides),
        "context_length": text.max_position_embeddings,
        "feed_forward_length": text.intermediate_size,
        "attention.head_count": text.num_attention_heads,
        "attention.head_count_kv": [one.num_key_value_heads for one in each],
        "attention.key_length": full.head_dim,
        "attention.key_length_swa": short.head_dim,
        "attention.sliding_window": text.sliding_window,
        "attention.sliding_window_pattern": slides,
        "attention.layer_norm_rms_epsilon": text.rms_norm_eps,
        "rope.freq_base": float(rope["full_attention"]["rope_theta"]),
        "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        **(changes or {}),
    }
    for key, value in found.items():
        add_value(writer, f"gemma4-assistant.{key}", value)
    for name, value in module.state_dict().items():
        owner = name.removesuffix(".weight")
        if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", owner):
            stored = f"blk.{layer[1]}.{ASSISTANT_LAYER[layer[2]]}.weight"
        elif owner in ASSISTANT_NAMES:
            stored = f"{ASSISTANT_NAMES[owner]}.weight"
        else:
            continue  # the output head is the table of embeddings
        in_blocks = value.ndim == 2 and value.shape[-1] % 32 == 0
        add_tensor(writer, stored, value.float().numpy(), kind if in_blocks else Kind.F32)
    half = full.head_dim // 2
    share = rope["full_attention"].get("partial_rotary_factor", 1.0)
    divisors = np.array([1.0] * int(half * share) + [1e30] * (half - int(half * share)))
    add_tensor(writer, "rope_freqs.weight", divisors, Kind.F32)
    return finish(writer, path)
