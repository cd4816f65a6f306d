"""Config values that no table says, by family: they are computed from a file's metadata and its
tensors.

transformers has no class for two families, whose layers are computed as another's are: Ling 2
(`bailingmoe2`) runs as GLM 4.5, Ling (`bailingmoe`), whose files have their queries and keys in
ERNIE's order, as ERNIE 4.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import erf, sqrt
from typing import Any

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.gguf import library
from outrider.models.gguf.header import ORIGINAL, GgufFile

FULL = "full_attention"
SLIDING = "sliding_attention"
# functions that choose experts
SOFTMAX = 1
SIGMOID = 2
# of DeepSeek V3's and V2's experts, and how many are used: older files do not say
GROUPS = {256: (8, 4), 160: (8, 3)}
# layers of the 27B models, whose queries are scaled by another number
LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}


def theta(file: GgufFile, key: str = "rope.freq_base") -> float:
    """The base of rotary positions; llama.cpp's where a file does not say."""
    return file.of_model(key, 10000.0)


def unknown_gate(file: GgufFile) -> CapabilityError:
    """The error for a file whose experts are chosen by a function that its architecture does not
    have."""
    return CapabilityError(
        f"'{file.path}' chooses its experts by function {file.of_model('expert_gating_func')}, "
        "which its architecture "
        f"'{file.architecture}' is not known with. {ORIGINAL}"
    )


def llama(file: GgufFile) -> dict[str, Any]:
    """Llama and Mistral, and Mixtral, which has experts."""
    if experts := file.of_model("expert_count"):
        used = file.of_model("expert_used_count")
        return {
            "model_type": "mixtral",
            "num_local_experts": experts,
            "num_experts_per_tok": used,
            "sliding_window": None,
        }
    return {"mlp_bias": "blk.0.ffn_up.bias" in file.tensor_names}


def ministral(file: GgufFile) -> dict[str, Any]:
    """Ministral 3 and what else scales its queries by their positions; others of this architecture
    are Mistral."""
    factors = {
        "mscale": 1.0,
        "mscale_all_dim": file.of_model("rope.scaling.yarn_log_multiplier", 1.0),
    }
    beta = file.of_model("attention.temperature_scale")
    if not beta:
        window = file.of_model("attention.sliding_window")
        return {"model_type": "mistral", "sliding_window": window, "rope_scaling": factors}
    original = file.of_model("rope.scaling.original_context_length") or file.of_model(
        "context_length"
    )
    steps = {
        name: file.of_model(f"rope.scaling.yarn_{name}", of)
        for name, of in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    return {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": theta(file),
            "factor": file.of_model("rope.scaling.factor"),
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": beta,
            **factors,
            **steps,
        }
    }


def gemma(file: GgufFile) -> dict[str, Any]:
    """Gemma 2 and 3: what queries are scaled by."""
    per_head = file.of_model("embedding_length") // file.of_model("attention.head_count")
    is_largest = file.of_model("block_count") == LARGEST_GEMMA[file.architecture]
    return {
        "query_pre_attn_scalar": per_head
        if is_largest
        else file.of_model("attention.key_length", per_head)
    }


def gemma3n(file: GgufFile) -> dict[str, Any]:
    """Gemma 3n: activations are cut off at a number of deviations, of which transformers names the
    share of a normal distribution."""
    rows = {tensor.name: tensor.shape[0] for tensor in file.tensors}
    deviations = file.of_model("activation_sparsity_scale")
    return {
        "activation_sparsity_pattern": [
            round((1 + erf(deviation / sqrt(2))) / 2, 6) for deviation in deviations
        ],
        "layer_types": _kinds(file.of_model("attention.sliding_window_pattern")),
        "intermediate_size": _each(file, "feed_forward_length"),
        "vocab_size": rows["token_embd.weight"],
        "vocab_size_per_layer_input": rows["per_layer_token_embd.weight"],
        "laurel_rank": rows["blk.0.laurel_l.weight"],
        # llama.cpp's, where a file has none
        "final_logit_softcapping": file.of_model("final_logit_softcapping", 30.0),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": theta(file, "rope.freq_base_swa")},
            FULL: {"rope_type": "default", "rope_theta": theta(file)},
        },
    }


def gemma4(file: GgufFile) -> dict[str, Any]:
    """Gemma 4: what its two kinds of layers and its last layers, which reuse keys, say layer by
    layer or by their tensors."""
    slides = file.of_model("attention.sliding_window_pattern")
    full = slides.index(False)
    widths = _each(file, "feed_forward_length")
    heads = _each(file, "attention.head_count_kv")
    factors = next((tensor for tensor in file.tensors if tensor.name == "rope_freqs.weight"), None)
    if factors is None:
        raise CheckpointError(
            f"'{file.path}' lacks 'rope_freqs.weight', which says what it rotates. Convert the "
            "model again."
        )
    rotated = float((library.dequantize(factors.read(), factors.kind) == 1).mean())
    experts = {
        "num_experts": file.of_model("expert_count"),
        "top_k_experts": file.of_model("expert_used_count"),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length"),
    }
    return {
        "layer_types": _kinds(slides),
        "final_logit_softcapping": file.of_model("final_logit_softcapping"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "num_key_value_heads": heads[slides.index(True)],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensor_names,
        "head_dim": file.of_model("attention.key_length_swa"),
        "enable_moe_block": bool(experts["num_experts"]),
        **(experts if experts["num_experts"] else {}),
        "hidden_size_per_layer_input": file.of_model("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": sum(
            tensor.shape[0]
            for tensor in file.tensors
            if tensor.name == "per_layer_token_embd.weight"
        ),
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": theta(file, "rope.freq_base_swa")},
            FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": rotated,
                "rope_theta": theta(file),
            },
        },
    }


def olmo(file: GgufFile) -> dict[str, Any]:
    """OLMo 2, and OLMo 3, which has a window in some of its layers and scales positions in the
    others."""
    if not (window := file.of_model("attention.sliding_window")):
        return {}
    rope = {"rope_type": "default", "rope_theta": theta(file)}
    return {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _three_in_four(file),
        "rope_parameters": {SLIDING: dict(rope), FULL: dict(rope)},
    }


def exaone(file: GgufFile) -> dict[str, Any]:
    """EXAONE 4, whose large model has a window in three of four layers."""
    window = file.of_model("attention.sliding_window")
    kinds = _three_in_four(file)
    return {
        "sliding_window": window or None,
        "layer_types": kinds if window else [FULL] * len(kinds),
    }


def stablelm(file: GgufFile) -> dict[str, Any]:
    """StableLM: its tensors tell the 1.6B and the 12B model from others."""
    names = file.tensor_names
    return {
        "use_qkv_bias": "blk.0.attn_q.bias" in names,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in names,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in names,
    }


def glm(file: GgufFile) -> dict[str, Any]:
    """GLM-4; the text part of its vision models has its heads in another order."""
    if file.of_model("rope.dimension_sections"):
        raise CapabilityError(
            f"'{file.path}' is the text part of a GLM-4 that sees, which cannot be read from "
            f"GGUF. {ORIGINAL}"
        )
    return {}


def glm_moe(file: GgufFile) -> dict[str, Any]:
    """GLM 4.5 to 4.7, Flash excepted."""
    return {
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensor_names,
        **_shares(file, norm=True),
    }


def ling(file: GgufFile) -> dict[str, Any]:
    """Ling 2 and Ring 2 as GLM 4.5."""
    bias = "blk.0.attn_qkv.bias" in file.tensor_names
    return {
        "use_qk_norm": True,
        "attention_bias": bias,
        **_shares(file, norm=False),
        **_groups(file),
    }


def deepseek(file: GgufFile) -> dict[str, Any]:
    """DeepSeek V2 and V3, GLM 4.7 Flash and Kimi.

    A bias of the gate tells V3 from V2. Files from before April 2025 name the sizes of whole heads.
    """
    gate = SIGMOID if any(".exp_probs_b." in name for name in file.tensor_names) else SOFTMAX
    if file.of_model("expert_gating_func", gate) != gate:
        raise unknown_gate(file)
    key, value = (
        file.of_model(f"attention.{part}_length_mla", file.of_model(f"attention.{part}_length"))
        for part in ("key", "value")
    )
    rotated = file.of_model("rope.dimension_count")
    groups = _groups(file)
    multiplier = file.of_model("rope.scaling.yarn_log_multiplier")  # stored as a tenth of it
    return {
        "model_type": "deepseek_v3" if gate == SIGMOID else "deepseek_v2",
        "q_lora_rank": file.of_model("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "head_dim": rotated,
        "num_key_value_heads": file.of_model("attention.head_count"),
        **_shares(file, norm=False),
        **groups,
        "topk_method": "group_limited_greedy" if groups["n_group"] > 1 else "greedy",
        "rope_scaling": {"mscale": 10 * multiplier, "mscale_all_dim": 10 * multiplier}
        if multiplier
        else {},
    }


def ernie_moe(file: GgufFile) -> dict[str, Any]:
    """ERNIE 4.5 with experts. The tensors tell which layers have experts, and how many of them are
    shared."""
    rows = {tensor.name: tensor.shape[0] for tensor in file.tensors}
    routed = [int(name.split(".")[1]) for name in rows if name.endswith(".ffn_gate_inp.weight")]
    if not routed:
        raise CheckpointError(
            f"'{file.path}' has no 'ffn_gate_inp.weight' in any layer: incomplete. Convert the "
            "model again."
        )
    shared = rows.get(f"blk.{routed[0]}.ffn_up_shexp.weight", 0)
    return {
        "moe_layer_end_index": max(routed),
        "moe_num_shared_experts": shared // file.of_model("expert_feed_forward_length"),
        "use_bias": "blk.0.attn_q.bias" in rows,
    }


def ling_lite(file: GgufFile) -> dict[str, Any]:
    """Ling-lite and Ling-plus as ERNIE 4.5.

    Raises CapabilityError where the shares of the chosen experts are not made to sum to one, as
    ERNIE always does.
    """
    if (
        not file.of_model("expert_weights_norm")
        or file.of_model("expert_weights_scale", 1.0) != 1.0
    ):
        raise CapabilityError(
            f"'{file.path}' scales the shares of its experts in a way that its architecture "
            "'bailingmoe' is not known with. "
            f"{ORIGINAL}"
        )
    return ernie_moe(file)


def granite_hybrid(file: GgufFile) -> dict[str, Any]:
    """Granite 4's hybrids, with experts or without."""
    if file.of_model("rope.scaling.finetuned"):
        raise CapabilityError(
            f"'{file.path}' is a hybrid with rotary positions (Bamba), which cannot be read from "
            f"GGUF. {ORIGINAL}"
        )
    heads = file.of_model("attention.head_count_kv")
    inner = file.of_model("ssm.inner_size")
    return {
        "layer_types": ["attention" if count else "mamba" for count in heads],
        "num_key_value_heads": max(heads),
        "num_local_experts": file.of_model("expert_count", 0),
        "num_experts_per_tok": file.of_model("expert_used_count", 0),
        "shared_intermediate_size": file.of_model("expert_shared_feed_forward_length")
        or file.of_model("feed_forward_length"),
        "mamba_d_head": inner // file.of_model("ssm.time_step_rank"),
        "mamba_expand": inner // file.of_model("embedding_length"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "position_embedding_type": None,
    }


def nemotron_h(file: GgufFile) -> dict[str, Any]:
    """Nemotron-H and Nemotron 3: each layer is one of Mamba 2, attention, or a network, which lists
    by layer tell."""
    count = _num_layers(file)
    heads = _each(file, "attention.head_count_kv")[:count]
    widths = _each(file, "feed_forward_length")[:count]
    experts = file.of_model("expert_count")
    network = "moe" if experts else "mlp"
    routed = {
        "n_routed_experts": experts,
        "num_experts_per_tok": file.of_model("expert_used_count"),
        "n_shared_experts": file.of_model("expert_shared_count", 1),
        "moe_intermediate_size": file.of_model("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": file.of_model("expert_shared_feed_forward_length"),
        **_shares(file, norm=True),
        **_groups(file),
    }
    return {
        "layers_block_type": [
            "attention" if head else network if width else "mamba"
            for head, width in zip(heads, widths, strict=True)
        ],
        "num_key_value_heads": max(heads),
        "intermediate_size": max(widths),
        **(routed if experts else {}),
        "mamba_head_dim": file.of_model("ssm.inner_size") // file.of_model("ssm.time_step_rank"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "attention_bias": _has(file, "attn_q.bias"),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }


def delta_net(file: GgufFile) -> dict[str, Any]:
    """Qwen3.5: layers of linear attention, with full attention in between."""
    rope = {
        "rope_theta": theta(file),
        "mrope_interleaved": True,
        "partial_rotary_factor": file.of_model("rope.dimension_count")
        / file.of_model("attention.key_length"),
        "mrope_section": [
            section for section in file.of_model("rope.dimension_sections") if section
        ],
    }
    return {"linear_value_head_dim": _value_size(file), "rope_parameters": rope}


def qwen3_next(file: GgufFile) -> dict[str, Any]:
    """Qwen3-Next."""
    return {"linear_value_head_dim": _value_size(file), "norm_topk_prob": True}


def lfm(file: GgufFile) -> dict[str, Any]:
    """LFM 2, with experts or without: layers without keys are convolutions."""
    heads = file.of_model("attention.head_count_kv")
    return {
        "layer_types": [FULL if count else "conv" for count in heads],
        "num_key_value_heads": max(heads),
        "conv_bias": _has(file, "shortconv.conv.bias"),
        "use_expert_bias": _has(file, "exp_probs_b.bias"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta(file)},
    }


def _shares(file: GgufFile, *, norm: bool) -> dict[str, Any]:
    """How much the chosen experts count. `norm`: whether their shares sum to one, where the file
    does not say."""
    return {
        "norm_topk_prob": file.of_model("expert_weights_norm", norm),
        "routed_scaling_factor": file.of_model("expert_weights_scale", 1.0),
    }


def _groups(file: GgufFile) -> dict[str, Any]:
    """The groups of experts, and how many of them are used."""
    groups, used = GROUPS.get(file.of_model("expert_count"), (1, 1))
    groups = file.of_model("expert_group_count", groups)
    used = file.of_model("expert_group_used_count", used)
    return {"n_group": groups, "topk_group": used}


def _num_layers(file: GgufFile) -> int:
    """Layers of the model, without those that predict further tokens."""
    return int(file.of_model("block_count")) - int(file.of_model("nextn_predict_layers", 0) or 0)


def _three_in_four(file: GgufFile) -> list[str]:
    """Kinds of layers; every fourth is a full one, where the file does not say."""
    slides = file.of_model("attention.sliding_window_pattern")
    return _kinds(slides or [(number + 1) % 4 != 0 for number in range(_num_layers(file))])


def _kinds(slides: Sequence[Any]) -> list[str]:
    return [SLIDING if slide else FULL for slide in slides]


def _each(file: GgufFile, key: str) -> list[Any]:
    """A value of each layer."""
    values = file.of_model(key)
    return values if isinstance(values, list) else [values] * int(file.of_model("block_count"))


def _value_size(file: GgufFile) -> int:
    return file.of_model("ssm.inner_size") // file.of_model("ssm.time_step_rank")


def _has(file: GgufFile, end: str) -> bool:
    """Whether some layer has a tensor of this name."""
    return any(name.endswith(end) for name in file.tensor_names)
