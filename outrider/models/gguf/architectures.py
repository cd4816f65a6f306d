"""Architectures of GGUF files that transformers does not read, or not in all versions that we support.

For each: what transformers calls the model, and where its config stands in the metadata. The keys are those that llama.cpp's
converter writes; what an architecture means without saying so is what llama.cpp's graphs do. How its tensors differ from
transformers' is in `rearranging.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import erf, sqrt
from typing import Any

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.gguf import library
from outrider.models.gguf.header import ORIGINAL, Count, GgufFile
from outrider.models.gguf.routed import (
    ERNIE,
    ROUTED,
    SIGMOID,
    deepseek,
    deepseek_sparse,
    ernie_moe,
    exaone_moe,
    glm_moe,
    glm_sparse,
    hunyuan,
    ling,
    ling_lite,
    llama4,
    mimo,
    unknown_gate,
)

TOKENS = "tokenizer.ggml.tokens"
COMMON = {  # keys below the architecture's name -> what configs call them
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps", "vocab_size": "vocab_size",
}  # fmt: skip
EXPERTS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
NEEDED = ("context_length", "block_count", "embedding_length", "attention.head_count")
MARKED = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}  # tokens, and what configs call them
THETA = 10000.0  # llama.cpp's, where a file does not say


@dataclass(frozen=True)
class Architecture:
    """How a config is made of the metadata. `more`: what no table says."""

    model_type: str  # transformers'
    values: Mapping[str, str] = field(default_factory=dict)  # beside `COMMON`, and never missing
    needed: tuple[str, ...] = ()  # other keys that are never missing
    always: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[GgufFile], dict[str, Any]] | None = None


def own_config(file: GgufFile, found: Architecture) -> dict[str, Any]:
    """What transformers' class for it is made of, but for what files of all architectures say alike.

    Raises CheckpointError where the metadata lacks something.
    """
    if missing := [key for key in (*NEEDED, *found.values, *found.needed) if file.of_model(key) is None]:
        raise CheckpointError(
            f"'{file.path}' lacks {len(missing)} values of its metadata, first '{file.architecture}.{missing[0]}': incomplete. "
            "Convert the model again."
        )
    names = {tensor.name for tensor in file.tensors}
    keys = COMMON | dict(found.values)
    values = {ours: value for theirs, ours in keys.items() if (value := file.of_model(theirs)) is not None}
    tokens = file.metadata.get(TOKENS)
    if "vocab_size" not in values and tokens is not None:
        values["vocab_size"] = int(tokens) if isinstance(tokens, Count) else len(tokens)
    marked = {f"{ours}_token_id": file.metadata.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in MARKED.items()}
    head = file.of_model("attention.key_length") or values["hidden_size"] // values["num_attention_heads"]
    return {
        "model_type": found.model_type, "tie_word_embeddings": "output.weight" not in names, "rope_theta": THETA,
        "head_dim": head, "attention_bias": "blk.0.attn_q.bias" in names, **marked, **values, **found.always,
        **(found.more(file) if found.more else {}),
    }  # fmt: skip


def _ministral(file: GgufFile) -> dict[str, Any]:
    """Ministral 3 and what else scales its queries by their positions; others of this architecture are Mistral."""
    beta = file.of_model("attention.temperature_scale")
    if not beta:
        return {"model_type": "mistral"}
    original = file.of_model("rope.scaling.original_context_length") or file.of_model("context_length")
    scales = {"mscale": 1.0, "mscale_all_dim": file.of_model("rope.scaling.yarn_log_multiplier", 1.0)}
    steps = {name: file.of_model(f"rope.scaling.yarn_{name}", of) for name, of in (("beta_fast", 32.0), ("beta_slow", 1.0))}
    return {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": file.of_model("rope.freq_base", THETA), "factor": file.of_model("rope.scaling.factor"),
        "original_max_position_embeddings": original, "llama_4_scaling_beta": beta, **scales, **steps,
    }}  # fmt: skip


def _olmo(file: GgufFile) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has a window in some of its layers and scales positions in the others."""
    if not (window := file.of_model("attention.sliding_window")):
        return {}
    slides = file.of_model("attention.sliding_window_pattern") or [(number + 1) % 4 != 0 for number in _layers(file)]
    rope = {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base", THETA)}
    return {
        "model_type": "olmo3", "sliding_window": window,
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "rope_parameters": {kind: dict(rope) for kind in ("sliding_attention", "full_attention")},
    }  # fmt: skip


def _exaone(file: GgufFile) -> dict[str, Any]:
    """EXAONE 4, whose large model has a window in three of four layers."""
    window = file.of_model("attention.sliding_window")
    slides = file.of_model("attention.sliding_window_pattern") or [(number + 1) % 4 != 0 for number in _layers(file)]
    kinds = ["sliding_attention" if slide and window else "full_attention" for slide in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _layers(file: GgufFile) -> range:
    return range(file.of_model("block_count") - file.of_model("nextn_predict_layers", 0))


def _granite_hybrid(file: GgufFile) -> dict[str, Any]:
    """Granite 4's hybrids, with experts or without."""
    if file.of_model("rope.scaling.finetuned"):
        raise CapabilityError(
            f"'{file.path}' is a hybrid with rotary positions (Bamba), which cannot be read from GGUF. {ORIGINAL}"
        )
    kept, inner = file.of_model("attention.head_count_kv"), file.of_model("ssm.inner_size")
    names = [tensor.name for tensor in file.tensors]
    return {
        "layer_types": ["attention" if heads else "mamba" for heads in kept], "num_key_value_heads": max(kept),
        "num_local_experts": file.of_model("expert_count", 0), "num_experts_per_tok": file.of_model("expert_used_count", 0),
        "shared_intermediate_size": file.of_model("expert_shared_feed_forward_length") or file.of_model("feed_forward_length"),
        "mamba_d_head": inner // file.of_model("ssm.time_step_rank"), "mamba_expand": inner // file.of_model("embedding_length"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in names), "position_embedding_type": None,
        "mamba_proj_bias": any(name.endswith("ssm_in.bias") for name in names),
    }  # fmt: skip


def _delta_net(file: GgufFile) -> dict[str, Any]:
    """Qwen3.5: layers of linear attention, with full attention in between."""
    rope = {
        "rope_theta": file.of_model("rope.freq_base", THETA), "mrope_interleaved": True,
        "partial_rotary_factor": file.of_model("rope.dimension_count") / file.of_model("attention.key_length"),
        "mrope_section": [section for section in file.of_model("rope.dimension_sections") if section],
    }  # fmt: skip
    return _value_heads(file) | {"rope_parameters": rope}


def _value_heads(file: GgufFile) -> dict[str, Any]:
    return {"linear_value_head_dim": file.of_model("ssm.inner_size") // file.of_model("ssm.time_step_rank")}


def _gemma4(file: GgufFile) -> dict[str, Any]:
    """Gemma 4: what its two kinds of layers and its last layers, which reuse keys, say layer by layer or by their tensors."""
    names, slides = {tensor.name for tensor in file.tensors}, file.of_model("attention.sliding_window_pattern")
    full = slides.index(False)
    widths, kept = _each(file, "feed_forward_length"), _each(file, "attention.head_count_kv")
    factors = next((tensor for tensor in file.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is None:
        raise CheckpointError(f"'{file.path}' lacks 'rope_freqs.weight', which says what it rotates. Convert the model again.")
    rotated = float((library.dequantize(factors.read(), factors.kind) == 1).mean())
    experts = {
        "num_experts": file.of_model("expert_count"), "top_k_experts": file.of_model("expert_used_count"),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length"),
    }  # fmt: skip
    return {
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "intermediate_size": widths[0], "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_key_value_heads": kept[slides.index(True)], "num_global_key_value_heads": kept[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in names, "head_dim": file.of_model("attention.key_length_swa"),
        "enable_moe_block": bool(experts["num_experts"]), **(experts if experts["num_experts"] else {}),
        "hidden_size_per_layer_input": file.of_model("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": sum(one.shape[0] for one in file.tensors if one.name == "per_layer_token_embd.weight"),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base_swa", THETA)},
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": rotated, "rope_theta": file.of_model("rope.freq_base"),
            },
        },
    }  # fmt: skip


def _gemma3n(file: GgufFile) -> dict[str, Any]:
    """Gemma 3n: activations are cut off at so many deviations, of which transformers names the share of a normal distribution."""
    rows = {tensor.name: tensor.shape[0] for tensor in file.tensors}
    deviations, slides = file.of_model("activation_sparsity_scale"), file.of_model("attention.sliding_window_pattern")
    return {
        "activation_sparsity_pattern": [round((1 + erf(one / sqrt(2))) / 2, 6) for one in deviations],
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "intermediate_size": _each(file, "feed_forward_length"), "vocab_size": rows["token_embd.weight"],
        "vocab_size_per_layer_input": rows["per_layer_token_embd.weight"], "laurel_rank": rows["blk.0.laurel_l.weight"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base_swa", THETA)},
            "full_attention": {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base")},
        },
    }  # fmt: skip


def _each(file: GgufFile, key: str) -> list[Any]:
    """A value of each layer."""
    found = file.of_model(key)
    return found if isinstance(found, list) else [found] * int(file.of_model("block_count"))


def _qwen3_next(file: GgufFile) -> dict[str, Any]:
    return _value_heads(file) | {"norm_topk_prob": True}


def _lfm_moe(file: GgufFile) -> dict[str, Any]:
    """LFM 2 with experts: layers without keys are convolutions."""
    if file.of_model("expert_gating_func", SIGMOID) != SIGMOID:
        raise unknown_gate(file)
    kept = file.of_model("attention.head_count_kv")
    names = {tensor.name for tensor in file.tensors}
    return {
        "layer_types": ["full_attention" if heads else "conv" for heads in kept], "num_key_value_heads": max(kept),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in names),
        "use_expert_bias": any(".exp_probs_b" in name for name in names),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.of_model("rope.freq_base", THETA)},
    }  # fmt: skip


def _nemotron_h(file: GgufFile) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3: each layer is one of Mamba 2, attention, or a network, which lists by layer tell."""
    count = file.of_model("block_count") - file.of_model("nextn_predict_layers", 0)
    kept, widths = _each(file, "attention.head_count_kv")[:count], _each(file, "feed_forward_length")[:count]
    names, experts = [tensor.name for tensor in file.tensors], file.of_model("expert_count")
    network = "moe" if experts else "mlp"
    routed = {
        "n_routed_experts": experts, "num_experts_per_tok": file.of_model("expert_used_count"),
        "n_shared_experts": file.of_model("expert_shared_count", 1),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": file.of_model("expert_shared_feed_forward_length"),
        "norm_topk_prob": file.of_model("expert_weights_norm", True),
        "routed_scaling_factor": file.of_model("expert_weights_scale", 1.0),
        "n_group": file.of_model("expert_group_count", 1), "topk_group": file.of_model("expert_group_used_count", 1),
    }  # fmt: skip
    return {
        "layers_block_type": [
            "attention" if heads else network if width else "mamba" for heads, width in zip(kept, widths, strict=True)
        ],
        "num_key_value_heads": max(kept), "intermediate_size": max(widths), **(routed if experts else {}),
        "mamba_head_dim": file.of_model("ssm.inner_size") // file.of_model("ssm.time_step_rank"),
        **{ours: any(name.endswith(theirs) for name in names) for ours, theirs in (
            ("use_conv_bias", "ssm_conv1d.bias"), ("mamba_proj_bias", "ssm_in.bias"), ("attention_bias", "attn_q.bias"),
            ("mlp_bias", "ffn_up.bias"),
        )},
    }  # fmt: skip


def _glm4(file: GgufFile) -> dict[str, Any]:
    """GLM-4; the text part of its vision models has its heads in another order."""
    if file.of_model("rope.dimension_sections"):
        raise CapabilityError(
            f"'{file.path}' is the text part of a GLM-4 that sees, which cannot be read from GGUF. {ORIGINAL}"
        )
    return {}


DELTA_NET = {
    "full_attention_interval": "full_attention_interval", "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
POSITIONS = ("ssm.inner_size", "rope.dimension_count", "rope.dimension_sections", "attention.key_length")
GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
LATENTS = {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"}
INDEXER = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}  # fmt: skip
NEMOTRON_H = Architecture("nemotron_h", {
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size", "ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads",
}, ("attention.head_count_kv", "feed_forward_length", "ssm.inner_size"), more=_nemotron_h)  # fmt: skip
ARCHITECTURES = {
    "arcee": Architecture("arcee"),
    "bailingmoe": Architecture("ernie4_5_moe", ERNIE, ("expert_weights_norm",), {"moe_layer_interval": 1}, more=ling_lite),
    "bailingmoe2": Architecture("glm4_moe", ROUTED, ("rope.dimension_count", "expert_gating_func"), more=ling),
    "cohere2": Architecture("cohere2", {"logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"}),
    "command-r": Architecture("cohere", {"logit_scale": "logit_scale"}),
    "deepseek2": Architecture(
        "deepseek_v3", ROUTED | LATENTS, ("attention.key_length", "attention.value_length"), more=deepseek,
    ),
    "deepseek32": Architecture("deepseek_v32", ROUTED | LATENTS | INDEXER, more=deepseek_sparse),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", ERNIE | {"interleave_moe_layer_step": "moe_layer_interval"}, more=ernie_moe
    ),
    "exaone-moe": Architecture("exaone_moe", EXPERTS, ("expert_gating_func",), more=exaone_moe),
    "exaone4": Architecture("exaone4", more=_exaone),
    "gemma": Architecture("gemma"),
    "gemma3n": Architecture(
        "gemma3n_text", {
            "attention.sliding_window": "sliding_window", "attention.shared_kv_layers": "num_kv_shared_layers",
            "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        }, ("activation_sparsity_scale", "attention.sliding_window_pattern", "feed_forward_length", "rope.freq_base"),
        more=_gemma3n,
    ),
    "gemma4": Architecture(
        "gemma4_text", {
            "attention.key_length": "global_head_dim", "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
        }, ("attention.key_length_swa", "attention.sliding_window_pattern", "feed_forward_length", "attention.head_count_kv",
            "rope.freq_base"), more=_gemma4,
    ),
    "glm4": Architecture("glm4", more=_glm4),
    "glm-dsa": Architecture("glm_moe_dsa", ROUTED | LATENTS | INDEXER, more=glm_sparse),
    "glm4moe": Architecture("glm4_moe", ROUTED, more=glm_moe),
    "granite": Architecture("granite", GRANITE),
    "granitehybrid": Architecture("granitemoehybrid", GRANITE | {
        "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
        "ssm.time_step_rank": "mamba_n_heads",
    }, ("attention.head_count_kv", "ssm.inner_size", "feed_forward_length"), more=_granite_hybrid),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "hy_v3": Architecture("hy_v3", EXPERTS, more=hunyuan),
    "lfm2moe": Architecture("lfm2_moe", EXPERTS | {
        "attention.layer_norm_rms_epsilon": "norm_eps", "leading_dense_block_count": "num_dense_layers",
        "shortconv.l_cache": "conv_L_cache",
    }, ("attention.head_count_kv",), more=_lfm_moe),
    "llama4": Architecture("llama4_text", {
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size", "feed_forward_length": "intermediate_size_mlp",
        "interleave_moe_layer_step": "interleave_moe_layer_step",
    }, more=llama4),
    "mimo2": Architecture("mimo_v2_flash", {
        "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size", "attention.value_length": "v_head_dim",
    }, ("attention.sliding_window", "attention.sliding_window_pattern", "attention.head_count_kv", "attention.key_length",
        "rope.dimension_count", "rope.freq_base"), more=mimo),
    "mistral3": Architecture("ministral3", more=_ministral),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
    "olmo2": Architecture("olmo2", more=_olmo),
    "olmoe": Architecture("olmoe", {key: EXPERTS[key] for key in ("expert_count", "expert_used_count")}),
    "phi2": Architecture("phi"),
    "qwen2vl": Architecture("qwen2"),  # the text part, whose positions are a text's
    "qwen35": Architecture("qwen3_5_text", DELTA_NET, POSITIONS, more=_delta_net),
    "qwen35moe": Architecture("qwen3_5_moe_text", DELTA_NET | EXPERTS | SHARED_EXPERT, POSITIONS, more=_delta_net),
    "qwen3next": Architecture("qwen3_next", DELTA_NET | EXPERTS | SHARED_EXPERT, ("ssm.inner_size",), more=_qwen3_next),
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", EXPERTS, always={"norm_topk_prob": True}),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3"),
}  # fmt: skip
