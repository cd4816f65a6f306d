"""Tiny random models of many families, with the quirks that lowering must see."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.models import attention
from outrider.models.loading.older_code import hand_over
from outrider.models.signals import AFTER_NORM
from tests.older_transformers import skip_unless_lowered

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
GROUPS = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {  # attention over compressed keys and values
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
# fewer heads: scores of 0, and ties
SPARSE = {**LATENT, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 16}
SHORT_WINDOW = {"head_dim": 16, "sliding_window": 16}
HALF_WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
# what configs call the experts of a token
PICKED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048}
# of configs that else are encoders'
DECODER = {"is_decoder": True, "pad_token_id": 0, "num_key_value_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {  # all that are lowered
    "afmoe": EXPERTS,
    "apertus": {},
    "arcee": {},
    "aria_text": {
        **EXPERTS,
        "moe_num_experts": 4,
        "moe_topk": 2,
        "moe_num_shared_experts": 1,
        "head_dim": 16,
    },
    "axk1": {**GROUPS, **LATENT},
    "axk2": {**GROUPS, **SPARSE},
    "beam": {**GROUPS, **HALF_WINDOWED, "head_dim": 16, "mlp_layer_types": ["dense", "sparse"]},
    "biogpt": {},
    "bitnet": {},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "cohere": {"logit_scale": 0.0625, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.0625, "sliding_window": 16, "sliding_window_pattern": 2},
    "cohere2_moe": EXPERTS,
    "cohere_compass_text": {
        **HALF_WINDOWED,
        "head_dim": 16,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "cwm": {"bos_token_id": 0, "pad_token_id": 0},
    "deepseek_v2": {**GROUPS, **LATENT},
    "deepseek_v3": {**GROUPS, **LATENT},
    "deepseek_v32": {**GROUPS, **SPARSE},
    "dots1": {**GROUPS, "n_shared_experts": 1},
    "ernie4_5": {"head_dim": 16},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": 2, "head_dim": 16},
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone_moe": GROUPS,
    "falcon": {"multi_query": True},
    "flex_olmo": EXPERTS,
    "flint": {
        **EXPERTS,
        **SHORT_WINDOW,
        "mlp_only_layers": [0],
        "shared_expert_intermediate_size": 32,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "gemma": {"head_dim": 16, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24},
    "gemma3n_text": {
        "head_dim": 16,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 90,
        "laurel_rank": 8,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.9] * 2 + [0.0] * 2,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 16,
        "hidden_size_per_layer_input": 8,
        "num_hidden_layers": 4,
        "vocab_size_per_layer_input": 97,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "gemma4_unified_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "glm": {"head_dim": 16, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
    "glm4_moe": {**GROUPS, "head_dim": 16},
    "glm4_moe_lite": {**GROUPS, **LATENT},
    "glm_moe_dsa": {
        **GROUPS,
        **SPARSE,
        "num_hidden_layers": 3,
        "indexer_types": ["full", "shared", "full"],
    },
    "gpt2": {**GPT, "n_inner": 96},
    "gpt_bigcode": {**GPT, "n_inner": 96},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.25},
    "gpt_oss": {**EXPERTS, **SHORT_WINDOW},
    "granite": {
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.1,
    },
    "granite_swa": {**HALF_WINDOWED, "attention_multiplier": 0.1},
    "granitemoe": EXPERTS,
    "granitemoe_swa": {**EXPERTS, **HALF_WINDOWED, "attention_multiplier": 0.1},
    "granitemoeshared": {**EXPERTS, "shared_intermediate_size": 32},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2, "head_dim": 16},
    "hy_v3": EXPERTS,
    "hy_v4": {**EXPERTS, **SPARSE},
    "hyperclovax": {},
    "internlm3": {"head_dim": 16},
    "iquestcoder": {"head_dim": 16},
    "jais2": {},
    "llama": {},
    "kolibri1": EXPERTS,
    "laguna": EXPERTS,
    "mellum": EXPERTS,
    "mimo_v2_flash": {**GROUPS, **SHORT_WINDOW, "v_head_dim": 8, "n_group": 1},
    "minicpm3": LATENT,
    "minimax_m2": EXPERTS,
    "ministral": {"sliding_window": 16, "head_dim": 16},
    "ministral3": {
        "head_dim": 16,
        "rope_parameters": {
            "type": "default",
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {"sliding_window": 16, "head_dim": 16},
    "mixtral": EXPERTS,
    "modernbert-decoder": {
        "local_attention": 16,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "sep_token_id": 3,
        "cls_token_id": 4,
    },
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": HALF_WINDOWED,
    "olmoe": EXPERTS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "persimmon": {},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"pad_token_id": 0},
    "phimoe": EXPERTS,
    "qwen2": {},
    "qwen2_moe": EXPERTS,
    "qwen3": {"head_dim": 32},
    "qwen3_moe": EXPERTS,
    "seed_oss": {"head_dim": 16},
    "smollm3": {},
    "solar_open": {**GROUPS, "head_dim": 16},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": None},
    "vaultgemma": {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 24},
    "youtu": LATENT,
}
KINDS_OF_TOKENS = "embedding of something else than tokens or positions"
# all others that our cache serves, and the reason
NOT_LOWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": (KINDS_OF_TOKENS, DECODER),
    "dbrx": (
        "index_add_",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 2048,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "longcat_flash": (
        "index_add_",
        {**EXPERTS, **LATENT, "head_dim": 8, "n_routed_experts": 4, "zero_expert_num": 2},
    ),
    "roberta": (KINDS_OF_TOKENS, DECODER),
}

# States between layers are several for each token
# others carry several streams from layer to layer
HEAD_STATES_ONLY = frozenset({"gemma3n_text", "hy_v4"})


def states_of(family: str) -> tuple[int, ...]:
    """Keys of the hidden states that a family's pass gives."""
    return (AFTER_NORM,) if family in HEAD_STATES_ONLY else (AFTER_NORM, 0, 1, 2)


def make(family: str, dtype: torch.dtype = torch.float32, *, picks_all: bool = True) -> Any:
    """A random model of this family, in eval mode."""
    skip_unless_lowered(family)
    attention.register()  # which `lower` ends with
    changes = FAMILIES[family] if family in FAMILIES else NOT_LOWERED[family][1]
    named = {**SIZES, **changes}
    # rounding changes what is picked: all experts, of all groups, and positions
    if dtype == torch.bfloat16 and picks_all:
        named |= {key: named["num_experts"] for key in PICKED if key in named}
        named |= {"topk_group": named["n_group"]} if "n_group" in named else {}
        named |= {"index_topk": 64} if "index_topk" in named else {}
        # its router picks two, whatever the config says
        named |= {"num_local_experts": 2} if family == "phimoe" else {}
    if family in ("bloom", "dbrx", "gpt2", "gpt_bigcode", "opt"):
        named = {
            **{
                key: SIZES[key]
                for key in ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")
            },
            **changes,
        }
        if family == "opt":
            named |= {
                "hidden_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "init_std": 0.2,
            }
    config = AutoConfig.for_model(family, **named)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (
            AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            .eval()
            .requires_grad_(False)
        )
        for tensor in model.parameters():  # norms and biases that are not ones and zeros
            if tensor.dim() == 1:
                tensor += 0.1 * torch.randn_like(tensor)
            elif not tensor.any():  # ERNIE's router in transformers 5.17: which of equal experts are chosen is nobody's rule
                tensor += named["initializer_range"] * torch.randn_like(tensor)
    hand_over(model)  # as loading does
    return model.to(dtype)
