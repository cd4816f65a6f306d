"""Configs of architectures that choose experts: what the tables of `architectures.py` do not say of them.

transformers has no class for two of them, whose layers are computed as another's are: Ling 2 (`bailingmoe2`) runs as GLM 4.5,
Ling (`bailingmoe`), whose files have their queries and keys in ERNIE's order, as ERNIE 4.5.
"""

from __future__ import annotations

from typing import Any

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.gguf.header import ORIGINAL, GgufFile

FULL, SLIDING = "full_attention", "sliding_attention"
SOFTMAX, SIGMOID = 1, 2  # functions that choose experts
ERNIE = {
    "expert_count": "moe_num_experts", "expert_used_count": "moe_k", "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "moe_layer_start_index",
}  # fmt: skip
UNNORMED = 128  # experts of Llama 4 Maverick
GROUPS = {256: (8, 4), 160: (8, 3)}  # of DeepSeek V3's and V2's experts, and how many are used: older files do not say
MILLION = 1 << 20  # tokens of a text, since GLM-5.2
ROUTED = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip


def glm_moe(file: GgufFile) -> dict[str, Any]:
    """Config values of GLM 4.5 to 4.7, Flash excepted. Raises CapabilityError for another function that chooses experts."""
    if file.of_model("expert_gating_func", SIGMOID) != SIGMOID:
        raise unknown_gate(file)
    norms = any(tensor.name == "blk.0.attn_q_norm.weight" for tensor in file.tensors)
    return {
        "use_qk_norm": norms, "norm_topk_prob": file.of_model("expert_weights_norm", True),
        "routed_scaling_factor": file.of_model("expert_weights_scale", 1.0),
    }  # fmt: skip


def deepseek(file: GgufFile) -> dict[str, Any]:
    """Config values of DeepSeek V2 and V3, GLM 4.7 Flash and Kimi.

    A bias of the gate tells V3 from V2. Files from before April 2025 name the sizes of whole heads.
    """
    biased = any(".exp_probs_b." in tensor.name for tensor in file.tensors)
    if file.of_model("expert_gating_func", SIGMOID if biased else SOFTMAX) != (SIGMOID if biased else SOFTMAX):
        raise unknown_gate(file)
    key, value = (
        file.of_model(f"attention.{part}_length_mla", file.of_model(f"attention.{part}_length")) for part in ("key", "value")
    )
    rotated, (groups, used) = file.of_model("rope.dimension_count"), GROUPS.get(file.of_model("expert_count"), (1, 1))
    groups, used = file.of_model("expert_group_count", groups), file.of_model("expert_group_used_count", used)
    return {
        "model_type": "deepseek_v3" if biased else "deepseek_v2", "q_lora_rank": file.of_model("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rotated, "v_head_dim": value, "head_dim": rotated, "n_group": groups, "topk_group": used,
        "num_key_value_heads": file.of_model("attention.head_count"),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "routed_scaling_factor": file.of_model("expert_weights_scale", 1.0),
        "norm_topk_prob": file.of_model("expert_weights_norm", False),
    }  # fmt: skip


def glm_sparse(file: GgufFile) -> dict[str, Any]:
    """Config values of GLM-5, whose indexers pick the keys of each token.

    Since GLM-5.2 some layers share the choice of a layer before them.
    """
    if file.of_model("expert_gating_func", SIGMOID) != SIGMOID:
        raise unknown_gate(file)
    count, shares = _num_layers(file), file.of_model("context_length") >= MILLION
    full = file.of_model("attention.indexer.types")  # older files do not say
    if not isinstance(full, list):
        full = [not shares or max(number - 2, 0) % 4 == 0 for number in range(count)]
    found = deepseek(file)
    return found | {
        "model_type": "glm_moe_dsa", "mlp_layer_types": None, "n_group": file.of_model("expert_group_count", 1),
        "topk_group": file.of_model("expert_group_used_count", 1),
        "indexer_types": ["full" if own else "shared" for own in full[:count]],
    }  # fmt: skip


def deepseek_sparse(file: GgufFile) -> dict[str, Any]:
    """Config values of DeepSeek V3.2, which is V3 with an indexer in each layer."""
    return deepseek(file) | {"model_type": "deepseek_v32"}


def ling(file: GgufFile) -> dict[str, Any]:
    """Config values with which Ling 2 and Ring 2 run as GLM 4.5."""
    if file.of_model("expert_gating_func") != SIGMOID:
        raise unknown_gate(file)
    groups, used = GROUPS.get(file.of_model("expert_count"), (1, 1))
    return {
        "use_qk_norm": True, "norm_topk_prob": file.of_model("expert_weights_norm", False),
        "routed_scaling_factor": file.of_model("expert_weights_scale", 1.0),
        "n_group": file.of_model("expert_group_count", groups), "topk_group": file.of_model("expert_group_used_count", used),
        "attention_bias": any(tensor.name == "blk.0.attn_qkv.bias" for tensor in file.tensors),
    }  # fmt: skip


def ling_lite(file: GgufFile) -> dict[str, Any]:
    """Config values with which Ling-lite and Ling-plus run as ERNIE 4.5.

    Raises CapabilityError where the shares of the chosen experts are not made to sum to one, as ERNIE always does.
    """
    if not file.of_model("expert_weights_norm") or file.of_model("expert_weights_scale", 1.0) != 1.0:
        raise CapabilityError(
            f"'{file.path}' scales the shares of its experts in a way that its architecture 'bailingmoe' is not known with. "
            f"{ORIGINAL}"
        )
    return ernie_moe(file)


def ernie_moe(file: GgufFile) -> dict[str, Any]:
    """Config values of ERNIE 4.5 with experts. The tensors tell which layers have experts, and how many of them are shared."""
    rows = {tensor.name: tensor.shape[0] for tensor in file.tensors}
    routed = [int(name.split(".")[1]) for name in rows if name.endswith(".ffn_gate_inp.weight")]
    if not routed:
        raise CheckpointError(f"'{file.path}' has no 'ffn_gate_inp.weight' in any layer: incomplete. Convert the model again.")
    shared = rows.get(f"blk.{routed[0]}.ffn_up_shexp.weight", 0)
    return {
        "moe_layer_end_index": max(routed), "moe_num_shared_experts": shared // file.of_model("expert_feed_forward_length"),
        "use_bias": "blk.0.attn_q.bias" in rows,
    }  # fmt: skip


def exaone_moe(file: GgufFile) -> dict[str, Any]:
    """Config values of EXAONE with experts. Most of its layers have a window; the others have no rotary positions."""
    if file.of_model("expert_gating_func") != SIGMOID:
        raise unknown_gate(file)
    count, dense = _num_layers(file), file.of_model("leading_dense_block_count", 0)
    slides = file.of_model("attention.sliding_window_pattern") or [(number + 1) % 4 != 0 for number in range(count)]
    return {
        "layer_types": _kinds(slides[:count]), "sliding_window": file.of_model("attention.sliding_window"),
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (count - dense),
        "num_shared_experts": file.of_model("expert_shared_count", 1),
        "norm_topk_prob": file.of_model("expert_weights_norm", False),
        "routed_scaling_factor": file.of_model("expert_weights_scale", 1.0),
        "n_group": file.of_model("expert_group_count", 1), "topk_group": file.of_model("expert_group_used_count", 1),
    }  # fmt: skip


def hunyuan(file: GgufFile) -> dict[str, Any]:
    """Config values of Hunyuan 3. Tensors tell which layers have experts, and sizes how many experts are shared."""
    if file.of_model("expert_gating_func", SIGMOID) != SIGMOID or not file.of_model("expert_weights_norm", True):
        raise unknown_gate(file)
    size = file.of_model("expert_feed_forward_length")
    return {
        "mlp_layer_types": _networks(file), "router_scaling_factor": file.of_model("expert_weights_scale", 1.0),
        "num_shared_experts": file.of_model("expert_shared_feed_forward_length", size) // size,
    }  # fmt: skip


def mimo(file: GgufFile) -> dict[str, Any]:
    """Config values of MiMo-V2, whose layers with a window have twice as many key heads as the others.

    The window of the file leaves out the token itself, which transformers' window counts.
    """
    count, rotated, size = _num_layers(file), file.of_model("rope.dimension_count"), file.of_model("attention.key_length")
    kinds, kept = _kinds(file.of_model("attention.sliding_window_pattern")[:count]), file.of_model("attention.head_count_kv")
    full = kept[kinds.index(FULL)] if FULL in kinds else kept[0] // 2
    if any(heads != full * (1 if kind == FULL else 2) for heads, kind in zip(kept, kinds, strict=False)):
        raise CapabilityError(
            f"'{file.path}' has {kept[:count]} key heads in its layers, and transformers' MiMo-V2 has twice as many where there "
            f"is a window. {ORIGINAL}"
        )
    bases = {FULL: "rope.freq_base", SLIDING: "rope.freq_base_swa"}
    return {
        "layer_types": kinds, "num_key_value_heads": full, "sliding_window": file.of_model("attention.sliding_window") + 1,
        "mlp_layer_types": _networks(file), "norm_topk_prob": True,
        "attention_value_scale": file.of_model("attention.value_scale"),
        "routed_scaling_factor": file.of_model("expert_weights_scale", 1.0),
        "n_group": file.of_model("expert_group_count", 1), "topk_group": file.of_model("expert_group_used_count", 1),
        "rope_parameters": {
            kind: {
                "rope_type": "default", "rope_theta": file.of_model(base, file.of_model("rope.freq_base")),
                "partial_rotary_factor": (rotated + 0.5) / size,  # of which the code takes the whole part
            } for kind, base in bases.items()
        },
    }  # fmt: skip


def _num_layers(file: GgufFile) -> int:
    """Layers of the model, without those that predict further tokens."""
    return int(file.of_model("block_count")) - int(file.of_model("nextn_predict_layers", 0) or 0)


def _networks(file: GgufFile) -> list[str]:
    names = {tensor.name for tensor in file.tensors}
    return ["sparse" if f"blk.{number}.ffn_gate_inp.weight" in names else "dense" for number in range(_num_layers(file))]


def _kinds(slides: list[Any]) -> list[str]:
    return [SLIDING if slide else FULL for slide in slides]


def llama4(file: GgufFile) -> dict[str, Any]:
    """Config values of Llama 4. The one with 128 experts has no norms of queries and keys."""
    found: dict[str, Any] = {"use_qk_norm": file.of_model("expert_count") != UNNORMED}
    if file.of_model("attention.sliding_window") == 0:
        count = file.of_model("block_count")
        found |= {"no_rope_layers": [1] * count, "layer_types": ["full_attention"] * count}
    return found


def unknown_gate(file: GgufFile) -> CapabilityError:
    """The error for a file whose experts are chosen by a function that its architecture does not have."""
    return CapabilityError(
        f"'{file.path}' chooses its experts by function {file.of_model('expert_gating_func')}, which its architecture "
        f"'{file.architecture}' is not known with. {ORIGINAL}"
    )
