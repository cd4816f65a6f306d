"""Draft heads in GGUF files of their own, as llama.cpp's converter writes them, by the names and in the words of their originals.

    eagle3    an EAGLE-3 head of one layer; queries and keys lie in Llama's order
    dflash    a block head: DFlash, DFlash2, DSpark

Layers of the target are counted by their inputs, and `d2t` has the target's token ids. Weights in blocks are widened.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.gguf.config import DTYPES, rope_factors, rope_scaling
from outrider.models.gguf.header import Count, GgufFile, TensorInfo
from outrider.models.gguf.loading import USED_ELSEWHERE, plain_values

BLOCK = re.compile(r"blk\.(?P<layer>\d+)\.(?P<name>.+)")
LAYER = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"attn_{theirs}.{end}": f"self_attn.{ours}_proj.{end}" for theirs, ours in zip("qkv", "qkv", strict=True)
       for end in ("weight", "bias")},
    "attn_output.weight": "self_attn.o_proj.weight",
    **{f"ffn_{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}  # fmt: skip
TABLES = {
    "fc.weight": "fc.weight", "output_norm.weight": "norm.weight", "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight", "d2t": "d2t",
}  # fmt: skip
QUERIES_AND_KEYS = re.compile(r"layers\.0\.self_attn\.(?P<kind>[qk])_proj\.")
CONVOLUTIONS = {
    f"{theirs}_conv_{part}": f"{ours}_conv.{name}"
    for theirs, ours in (("attn", "attention"), ("ffn", "mlp"))
    for part, name in (("base", "base_kernel"), ("proj.weight", "kernel_projection.weight"))
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # the only ones that published models have
LLAMA3_LENGTH = 8192  # and the length that theirs were extended from


@dataclass(frozen=True)
class _Kind:
    """What the converter of one kind of heads calls things."""

    drafter: str
    layer: dict[str, str]
    tables: dict[str, str]
    config: Callable[[GgufFile], dict[str, Any]]


def gguf_head_kind(file: GgufFile) -> str | None:
    """The drafter that drafts with the head in a file; None: the file holds no such head."""
    kind = KINDS.get(file.architecture)
    return None if kind is None else kind.drafter


def read_gguf_head(file: GgufFile, *, outline: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a head as its folder would have them. `outline`: of weights the shapes alone.

    Raises CheckpointError where the metadata lacks something, CapabilityError for a part that is not read.
    """
    kind = KINDS.get(file.architecture)
    if kind is None:
        raise CheckpointError(
            f"'{file.path}' is a model of architecture '{file.architecture}' and no draft head; of those {' and '.join(KINDS)} "
            "are read."
        )
    config, tensors = kind.config(file), dict[str, Tensor]()
    for tensor in file.tensors:
        if tensor.name in USED_ELSEWHERE:
            continue
        name = _named(tensor.name, kind)
        values = _values(tensor, outline=outline and name != "d2t")
        permuted = None if outline or file.architecture != "eagle3" else QUERIES_AND_KEYS.match(name)
        if permuted is not None:
            heads = config["num_attention_heads" if permuted["kind"] == "q" else "num_key_value_heads"]
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
        tensors[name] = values
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return config, tensors


def _named(name: str, kind: _Kind) -> str:
    """A tensor's name in a folder; one that is not known keeps its own, and is refused as no part of the head."""
    block = BLOCK.fullmatch(name)
    if block is None:
        return kind.tables.get(name, name)
    own = kind.layer.get(block["name"])
    return name if own is None else f"layers.{block['layer']}.{own}"


def _values(tensor: TensorInfo, *, outline: bool) -> Tensor:
    if tensor.kind.name == "I64":
        return torch.from_numpy(tensor.read().view(np.int64).reshape(tensor.shape).copy())
    dtype = DTYPES.get(tensor.kind.name, torch.float32)
    if outline:
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return torch.from_numpy(plain_values(tensor).copy()).to(dtype)


# ------------------------------------------------ configs


def _layer_config(file: GgufFile) -> dict[str, Any]:
    """What both kinds say of their layers."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    size, heads = _needed(file, "embedding_length"), _needed(file, "attention.head_count")
    found = {
        "hidden_size": size, "num_attention_heads": heads,
        "num_key_value_heads": file.of_model("attention.head_count_kv", heads),
        "head_dim": file.of_model("attention.key_length") or file.of_model("rope.dimension_count") or size // heads,
        "rms_norm_eps": float(f"{_needed(file, 'attention.layer_norm_rms_epsilon'):.6g}"),  # an fp32 1e-6 is meant as 1e-6
        "rope_theta": file.of_model("rope.freq_base", 10000.0), "max_position_embeddings": file.of_model("context_length"),
        "vocab_size": file.of_model("vocab_size") or (int(tokens) if isinstance(tokens, Count) else len(tokens or ())) or None,
    }  # fmt: skip
    scaling = rope_scaling(file) or _llama3(file, found["rope_theta"], found["head_dim"])
    if scaling is not None:
        found["rope_parameters"] = {"rope_theta": found["rope_theta"], **scaling}
    return {name: value for name, value in found.items() if value is not None}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaled positions, of which a file has the divisors. Raises CapabilityError where these follow no such rule."""
    factors = rope_factors(file)
    if factors is None or bool((factors == 1).all()):
        return None
    factor = float(factors.max())
    length = int(file.of_model("rope.scaling.original_context_length") or LLAMA3_LENGTH)
    waves = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim)
    smooth = (length / waves - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"])
    expected = 1 / ((1 - smooth.clamp(0, 1)) / factor + smooth.clamp(0, 1))
    if expected.shape != factors.shape or not torch.allclose(expected, factors, rtol=1e-3):
        raise CapabilityError(f"'{file.path}' divides its rotary frequencies (rope_freqs) by a rule that is not Llama 3's.")
    return {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": length, **LLAMA3}


def _eagle3(file: GgufFile) -> dict[str, Any]:
    layers = file.of_model("extract_layers") or _needed(file, "target_layers")
    return _layer_config(file) | {
        "architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": bool(file.of_model("norm_before_residual", False)),
    }  # fmt: skip


def _dflash(file: GgufFile) -> dict[str, Any]:
    if file.of_model("hyper_connection_count"):
        raise CapabilityError(
            f"'{file.path}' is a DSpark head with DeepSeek V4's layers (hyper-connections), which is not read."
        )
    mask = file.metadata.get("tokenizer.ggml.mask_token_id", file.of_model("mask_token_id"))
    slides = file.of_model("attention.sliding_window_pattern")
    own = {
        "block_size": file.of_model("block_size", 16), "mask_token_id": mask,  # llama.cpp's, where a file does not say
        "target_layer_ids": [int(layer) - 1 for layer in _needed(file, "target_layers")],
        "causal": bool(file.of_model("attention.causal", False)), "sliding_window": file.of_model("attention.sliding_window"),
        "sample_from_anchor": file.of_model("sample_from_anchor"), "selector_top_k": file.of_model("selector_top_k"),
        "output_multiplier": file.of_model("logit_scale"), "final_logit_softcapping": file.of_model("final_logit_softcapping"),
        "layer_types": slides and ["sliding_attention" if slide else "full_attention" for slide in slides],
    }  # fmt: skip
    return _layer_config(file) | {"dflash_config": {name: value for name, value in own.items() if value is not None}}


def _needed(file: GgufFile, key: str) -> Any:
    value = file.of_model(key)
    if value is None:
        what = f"'{file.path}' lacks '{file.architecture}.{key}' of its metadata"
        raise CheckpointError(f"{what}: incomplete. Convert the head again.")
    return value


KINDS = {  # by architecture
    "eagle3": _Kind("eagle3", LAYER | {"attn_norm_2.weight": "hidden_norm.weight"}, TABLES, _eagle3),
    "dflash": _Kind("block", LAYER | CONVOLUTIONS | {
        f"attn_{kind}_norm.weight": f"self_attn.{kind}_norm.weight" for kind in "qk"
    }, TABLES | {
        "enc.output_norm.weight": "hidden_norm.weight", "markov_w1.weight": "markov_head.markov_w1.weight",
        "markov_w2.weight": "markov_head.markov_w2.weight", "conf_proj.weight": "confidence_head.proj.weight",
        "conf_proj.bias": "confidence_head.proj.bias", "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
        "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
        "selector_successor.weight": "candidate_selector.successor_codebook",
    }, _dflash),
}  # fmt: skip
