"""Draft heads in GGUF files of their own, as llama.cpp's converter writes them: their names and
configs in the words of folders.

    eagle3    an EAGLE-3 head of one layer; queries and keys lie in Llama's order
    dflash    a block head: DFlash, DFlash2, DSpark

Layers of the target are counted by their inputs, and `d2t` has the target's token ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.gguf.config import rope_factors, rope_scaling
from outrider.models.gguf.header import Count, GgufFile
from outrider.models.heads.names import Names, Pair

LAYER: tuple[Pair, ...] = (
    ("blk.{n}.attn_norm.weight", "layers.{n}.input_layernorm.weight"),
    ("blk.{n}.ffn_norm.weight", "layers.{n}.post_attention_layernorm.weight"),
    *((f"blk.{{n}}.attn_{part}.{{rest}}", f"layers.{{n}}.self_attn.{part}_proj.{{rest}}") for part in "qkv"),
    ("blk.{n}.attn_output.weight", "layers.{n}.self_attn.o_proj.weight"),
    *((f"blk.{{n}}.ffn_{part}.weight", f"layers.{{n}}.mlp.{part}_proj.weight") for part in ("gate", "up", "down")),
    ("output_norm.weight", "norm.weight"), ("output.weight", "lm_head.weight"), ("token_embd.weight", "embed_tokens.weight"),
)  # fmt: skip
CONVOLVED = (("attn", "attention"), ("ffn", "mlp"))
EAGLE3 = Names(*LAYER, ("blk.{n}.attn_norm_2.weight", "layers.{n}.hidden_norm.weight"))
DFLASH = Names(
    *LAYER,
    *(
        (f"blk.{{n}}.attn_{part}_norm.weight", f"layers.{{n}}.self_attn.{part}_norm.weight")
        for part in "qk"
    ),
    *(
        (f"blk.{{n}}.{there}_conv_base", f"layers.{{n}}.{here}_conv.base_kernel")
        for there, here in CONVOLVED
    ),
    *(
        (
            f"blk.{{n}}.{there}_conv_proj.weight",
            f"layers.{{n}}.{here}_conv.kernel_projection.weight",
        )
        for there, here in CONVOLVED
    ),
    ("enc.output_norm.weight", "hidden_norm.weight"),
    ("markov_{rest}", "markov_head.markov_{rest}"),
    ("conf_proj.{rest}", "confidence_head.proj.{rest}"),
    ("selector_hidden.weight", "candidate_selector.hidden_projection.weight"),
    ("selector_predecessor.weight", "candidate_selector.predecessor_codebook"),
    ("selector_successor.weight", "candidate_selector.successor_codebook"),
)
QUERIES_AND_KEYS = re.compile(r"layers\.0\.self_attn\.(?P<kind>[qk])_proj\.")
# the only ones that published models have
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_LENGTH = 8192  # and the length that theirs were extended from


@dataclass(frozen=True)
class GgufLayout:
    """How the converter writes one kind of heads."""

    drafter: str
    names: Names
    config: Callable[[GgufFile], dict[str, Any]]
    permutes: bool = False  # rows of queries and keys lie in Llama's order

    def rearranged(self, name: str, values: Tensor, config: dict[str, Any]) -> Tensor:
        """A tensor as its folder has it."""
        if name == "d2t":
            return values - torch.arange(len(values))
        permuted = QUERIES_AND_KEYS.match(name) if self.permutes else None
        if permuted is None:
            return values
        heads = config["num_attention_heads" if permuted["kind"] == "q" else "num_key_value_heads"]
        return values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def gguf_head_kind(file: GgufFile) -> str | None:
    """The drafter that drafts with the head in a file; None: the file holds no such head."""
    layout = LAYOUTS.get(file.architecture)
    return None if layout is None else layout.drafter


def gguf_layout(file: GgufFile) -> GgufLayout:
    """The layout of the head in a file. Raises CheckpointError where the file holds no such head."""
    layout = LAYOUTS.get(file.architecture)
    if layout is None:
        raise CheckpointError(
            f"'{file.path}' is a model of architecture '{file.architecture}' and no draft head; "
            f"of those {' and '.join(LAYOUTS)} "
            "are read."
        )
    return layout


def _layer_config(file: GgufFile) -> dict[str, Any]:
    """The layer settings that both kinds share."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    size = _needed(file, "embedding_length")
    heads = _needed(file, "attention.head_count")
    layer_config = {
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_key_value_heads": file.of_model("attention.head_count_kv", heads),
        "head_dim": file.of_model("attention.key_length")
        or file.of_model("rope.dimension_count")
        or size // heads,
        # an fp32 1e-6 is meant as 1e-6
        "rms_norm_eps": float(f"{_needed(file, 'attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": file.of_model("rope.freq_base", 10000.0),
        "max_position_embeddings": file.of_model("context_length"),
        "vocab_size": file.of_model("vocab_size")
        or (int(tokens) if isinstance(tokens, Count) else len(tokens or ()))
        or None,
    }
    scaling = rope_scaling(file) or _llama3(
        file, layer_config["rope_theta"], layer_config["head_dim"]
    )
    if scaling is not None:
        layer_config["rope_parameters"] = {"rope_theta": layer_config["rope_theta"], **scaling}
    return {name: value for name, value in layer_config.items() if value is not None}


def _llama3(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaled positions, of which a file has the divisors. Raises CapabilityError where
    these follow no such rule."""
    factors = rope_factors(file)
    if factors is None or bool((factors == 1).all()):
        return None
    factor = float(factors.max())
    length = int(file.of_model("rope.scaling.original_context_length") or LLAMA3_LENGTH)
    waves = 2 * torch.pi * theta ** (torch.arange(0, head_dim, 2) / head_dim)
    smooth = (length / waves - LLAMA3["low_freq_factor"]) / (
        LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"]
    )
    expected = 1 / ((1 - smooth.clamp(0, 1)) / factor + smooth.clamp(0, 1))
    if expected.shape != factors.shape or not torch.allclose(expected, factors, rtol=1e-3):
        raise CapabilityError(
            f"'{file.path}' divides its rotary frequencies (rope_freqs) by a rule that is not "
            "Llama 3's."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": length,
        **LLAMA3,
    }


def _eagle3(file: GgufFile) -> dict[str, Any]:
    layers = file.of_model("extract_layers") or _needed(file, "target_layers")
    return _layer_config(file) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_residual": bool(file.of_model("norm_before_residual", False)),
    }


def _dflash(file: GgufFile) -> dict[str, Any]:
    if file.of_model("hyper_connection_count"):
        raise CapabilityError(
            f"'{file.path}' is a DSpark head whose layers have hyper-connections, which is not "
            "read."
        )
    mask = file.metadata.get("tokenizer.ggml.mask_token_id", file.of_model("mask_token_id"))
    slides = file.of_model("attention.sliding_window_pattern")
    settings = {
        # llama.cpp's, where a file does not say
        "block_size": file.of_model("block_size", 16),
        "mask_token_id": mask,
        "target_layer_ids": [int(layer) - 1 for layer in _needed(file, "target_layers")],
        "causal": bool(file.of_model("attention.causal", False)),
        "sliding_window": file.of_model("attention.sliding_window"),
        "sample_from_anchor": file.of_model("sample_from_anchor"),
        "selector_top_k": file.of_model("selector_top_k"),
        "output_multiplier": file.of_model("logit_scale"),
        "final_logit_softcapping": file.of_model("final_logit_softcapping"),
        "layer_types": slides
        and ["sliding_attention" if slide else "full_attention" for slide in slides],
    }
    return _layer_config(file) | {
        "dflash_config": {name: value for name, value in settings.items() if value is not None}
    }


def _needed(file: GgufFile, key: str) -> Any:
    value = file.of_model(key)
    if value is None:
        what = f"'{file.path}' lacks '{file.architecture}.{key}' of its metadata"
        raise CheckpointError(f"{what}: incomplete. Convert the head again.")
    return value


LAYOUTS = {  # by architecture
    "eagle3": GgufLayout("eagle3", EAGLE3, _eagle3, permutes=True), "dflash": GgufLayout("block", DFLASH, _dflash),
}  # fmt: skip
