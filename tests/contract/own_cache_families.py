"""Tiny random models of the families that run on transformers' own cache, with the quirks that
feeding them must see."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.older_transformers import skip_unless_lowered
from tests.unit.runtime.families import EXPERTS, GROUPS, LATENT, SHORT_WINDOW, SIZES, SPARSE

VOCAB = SIZES["vocab_size"]
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {  # gated delta net
    **ALTERNATING, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 32}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_chunk_size": 8,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**GROUPS, **LATENT, **ALTERNATING, "head_dim": 16},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "deepseek_v4": {
        **SPARSE, **SHORT_WINDOW, **EXPERTS, "num_key_value_heads": 1, "o_lora_rank": 16, "o_groups": 2, "n_routed_experts": 4,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"],
        "compress_rates": {"heavily_compressed_attention": 8, "compressed_sparse_attention": 4}},
    "diffllama": {},
    "doge": {},
    "dots3_note_text": {**GROUPS, **SHORT_WINDOW, "n_group": 2, "num_key_value_heads": 4},
    "falcon_h1": {**MAMBA2, "head_dim": 16, "mamba_d_ssm": 128},
    "falcon_mamba": {"state_size": 8},
    "granitemoehybrid": {**EXPERTS, **MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048, "rotary_dim": 8},
    "hrm_text": {},
    "inkling2_text": EXPERTS,
    "inkling_text": EXPERTS,
    "jamba": {
        **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 8, "mamba_dt_rank": 8},
    "kimi_linear": {
        **GROUPS, **LATENT, **ALTERNATING, "num_shared_experts": 1, "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1], "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4}},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {
        **EXPERTS, "head_dim": 16, "attention_chunk_size": 24, "floor_scale": 10, "attn_scale": 0.3, "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"]},
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "minimax": {**EXPERTS, **ALTERNATING, "head_dim": 16, "block_size": 8},
    "minimax_m3_vl_text": {
        **EXPERTS, "head_dim": 16, "rotary_dim": 8, "index_n_heads": 4, "index_head_dim": 16, "index_block_size": 4,
        "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"], "dense_intermediate_size": 96,
        "shared_intermediate_size": 32},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 2048},
    "nemotron_h": {
        **GROUPS, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
        "conv_kernel": 4, "chunk_size": 8, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": None},
    "olmo_hybrid": DELTA,
    "qwen3_5_moe_text": {**DELTA, **SHARED_EXPERT},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **SHARED_EXPERT},
    "qwen4_exp_text": {
        **DELTA, **SHARED_EXPERT, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 64,
        "ngram_vocab_size_base": 64, "heads_per_ngram": 4, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 4},
    "rwkv": {"attention_hidden_size": 64},
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "mamba_headdim": 16,
        "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1, "attention_head_dim": 32,
        "attention_hidden_size": 128, "adapter_rank": 8, "hybrid_layer_ids": [1, 3], "use_shared_attention_adapter": True,
        "num_key_value_heads": 4},
    "zaya": {**EXPERTS, "num_experts_per_tok": 1},
}  # fmt: skip
OTHERWISE_NAMED = ("gptj", "mpt", "xglm")  # sizes have names of their own
# on the native runtime their states are in our cache; on torch's modules in transformers'
NATIVE = (
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
    "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "zamba2",
)  # fmt: skip
NATIVE_ALONE = {"falcon_mamba", "jamba", "mamba", "minimax", "nemotron_h", "zamba2"}  # not so there
ON_TRANSFORMERS_CACHE = tuple(name for name in FAMILIES if name not in NATIVE_ALONE)
# delta net, Mamba 2 beside attention, short convolution, ALiBi
ONE_OF_EACH_KIND = ("qwen3_5_text", "falcon_h1", "lfm2", "mpt")


def make(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model of this family, in eval mode."""
    skip_unless_lowered(family)
    named = {**SIZES, **FAMILIES[family], **changes}
    if family in OTHERWISE_NAMED:
        general = ("vocab_size", "bos_token_id", "eos_token_id", "initializer_range")
        named = {**{key: SIZES[key] for key in general}, **FAMILIES[family], **changes}
    if named.get("num_hidden_layers", 0) is None:
        del named["num_hidden_layers"]
    config = AutoConfig.for_model(family, **copy.deepcopy(named))
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
    return model.to(dtype)
