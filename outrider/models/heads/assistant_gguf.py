"""Gemma 4's assistants in GGUF files: the config and the tensors that their folders have.

The tensors that choose clusters of tokens (`masked_embd_*`) are left out, because the metadata lacks how many clusters count: all
tokens are scored, as llama.cpp does.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CheckpointError
from outrider.models.gguf.architectures import ARCHITECTURES, own_config
from outrider.models.gguf.header import GgufFile
from outrider.models.gguf.loading import USED_ELSEWHERE, plain_values

ASSISTANT = "gemma4-assistant"
SHARED_LAYERS = f"{ASSISTANT}.attention.shared_kv_layers"
BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>.+)")
LAYER = {
    "attn_norm": "input_layernorm.weight", "post_attention_norm": "post_attention_layernorm.weight",
    "ffn_norm": "pre_feedforward_layernorm.weight", "post_ffw_norm": "post_feedforward_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight", "attn_q_norm": "self_attn.q_norm.weight", "attn_output": "self_attn.o_proj.weight",
    **{f"ffn_{part}": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}, "layer_output_scale": "layer_scalar",
}  # fmt: skip
TABLES = {
    "token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight",
    "nextn.pre_projection": "pre_projection.weight", "nextn.post_projection": "post_projection.weight",
}  # fmt: skip
LEFT_OUT = ("masked_embd_", *USED_ELSEWHERE)  # beginnings of names


def assistant_config(file: GgufFile) -> dict[str, Any]:
    """What config.json would hold. Raises CheckpointError where the metadata lacks something."""
    size, count = file.of_model("embedding_length_out"), file.of_model("block_count")
    if size is None:
        raise CheckpointError(f"'{file.path}' lacks '{ASSISTANT}.embedding_length_out' of its metadata. Convert it again.")
    whole = replace(file, metadata={SHARED_LAYERS: count, **file.metadata})
    text = own_config(whole, ARCHITECTURES["gemma4"]) | {"final_logit_softcapping": None, "attention_bias": False}
    rows = next((tensor.shape[0] for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    text |= {"vocab_size": rows or text.get("vocab_size"), "num_kv_shared_layers": count, "tie_word_embeddings": True}
    return {"model_type": "gemma4_assistant", "backbone_hidden_size": size, "text_config": text}


def assistant_tensors(file: GgufFile) -> dict[str, Tensor]:
    """The tensors by the names of transformers' module, in plain numbers. Raises CheckpointError for one that is no part."""
    found: dict[str, Tensor] = {}
    for tensor in file.tensors:
        if tensor.name.startswith(LEFT_OUT):
            continue
        name, block = tensor.name.removesuffix(".weight"), BLOCK.fullmatch(tensor.name.removesuffix(".weight"))
        own = TABLES.get(name) if block is None else LAYER.get(block["name"])
        if own is None:
            raise CheckpointError(f"'{file.path}' has '{tensor.name}', which is no part of an assistant.")
        found[own if block is None else f"model.layers.{block['layer']}.{own}"] = torch.from_numpy(plain_values(tensor).copy())
    return found
