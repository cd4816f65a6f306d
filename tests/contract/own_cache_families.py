"""Tiny random models of the families that run on transformers' own cache, with the quirks that feeding them must see."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.older_transformers import skip_unless_lowered
from tests.unit.runtime.families import DECODER, EXPERTS, GROUPS, LATENT, SHORT_WINDOW, SIZES, SPARSE

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
HALF = {  # the decoder of a model that also has an encoder
    "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "max_position_embeddings": 2048,
    "init_std": 0.2, "is_decoder": True, "is_encoder_decoder": False, "forced_eos_token_id": None,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**GROUPS, **LATENT, **ALTERNATING, "head_dim": 16},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "bart": HALF,
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "bigbird_pegasus": HALF,
    "blenderbot": HALF,
    "blenderbot-small": HALF,
    "cpmant": {"dim_head": 16, "dim_ff": 96, "prompt_types": 4, "prompt_length": 8, "segment_types": 4},
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
    "git": {"pad_token_id": 0, "vision_config": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}},
    "granitemoehybrid": {**EXPERTS, **MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
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
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "marian": {**HALF, "pad_token_id": 0},
    "mbart": HALF,
    "megatron-bert": DECODER,
    "minimax": {**EXPERTS, **ALTERNATING, "head_dim": 16, "block_size": 8},
    "minimax_m3_vl_text": {
        **EXPERTS, "head_dim": 16, "rotary_dim": 8, "index_n_heads": 4, "index_head_dim": 16, "index_block_size": 4,
        "index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse"], "dense_intermediate_size": 96,
        "shared_intermediate_size": 32},
    "mpt": {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 2048},
    "mvp": HALF,
    "nemotron_h": {
        **GROUPS, "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1,
        "conv_kernel": 4, "chunk_size": 8, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": None},
    "olmo_hybrid": DELTA,
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 2048},
    "pegasus": HALF,
    "plbart": HALF,
    "prophetnet": {
        "hidden_size": 64, "num_decoder_layers": 2, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 96, "init_std": 0.2,
        "is_decoder": True, "is_encoder_decoder": False},
    "qwen3_5_moe_text": {**DELTA, **SHARED_EXPERT},
    "qwen3_5_text": DELTA,
    "qwen3_next": {**DELTA, **SHARED_EXPERT},
    "qwen4_exp_text": {
        **DELTA, **SHARED_EXPERT, "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 64,
        "ngram_vocab_size_base": 64, "heads_per_ngram": 4, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 4},
    "recurrent_gemma": {"attention_window_size": 16, "lru_width": 64, "num_hidden_layers": 3},
    "reformer": {
        "hidden_size": 64, "attention_head_size": 16, "num_attention_heads": 4, "feed_forward_size": 96, "is_decoder": True,
        "attn_layers": ["local", "lsh"], "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [32, 32], "num_buckets": 4,
        "local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16, "max_position_embeddings": 512, "hash_seed": 3},
    "rembert": DECODER,
    "roformer": DECODER,
    "rwkv": {"attention_hidden_size": 64},
    "trocr": HALF,
    "xglm": {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4, "causal": True, "n_langs": 1, "embed_init_std": 0.2, "init_std": 0.2},
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
    "xlstm": {"hidden_size": 64, "num_blocks": 2, "num_heads": 4},
    "zamba": {
        "attention_hidden_size": 128, "attention_head_dim": 32, "mamba_d_state": 8, "mamba_dt_rank": 8, "n_mamba_heads": 2,
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "hidden_act": "gelu"},
    "zamba2": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "mamba_headdim": 16,
        "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8, "num_mem_blocks": 1, "attention_head_dim": 32,
        "attention_hidden_size": 128, "adapter_rank": 8, "hybrid_layer_ids": [1, 3], "use_shared_attention_adapter": True,
        "num_key_value_heads": 4},
    "zaya": {**EXPERTS, "num_experts_per_tok": 1},
}  # fmt: skip
OTHERWISE_NAMED = (  # sizes have names of their own
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mpt", "mvp", "openai-gpt", "pegasus",
    "plbart", "prophetnet", "reformer", "trocr", "xglm", "xlm", "xlnet", "xlstm",
)  # fmt: skip
NATIVE = (  # on the native runtime their states are in our cache; on torch's modules in transformers'
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe",
    "lfm3", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip
FOR_EACH_TOKEN = frozenset({"cpmant", "prophetnet", "reformer", "xlm", "xlnet"})  # read a whole text anew for each token
ONE_OF_EACH_KIND = (  # delta net, Mamba 2 beside attention, short convolution, RG-LRU, ALiBi, no cache at all
    "qwen3_5_text", "falcon_h1", "lfm2", "recurrent_gemma", "mpt", "cpmant",
)  # fmt: skip


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
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
        for tensor in model.parameters():  # norms and biases that are not ones and zeros
            if tensor.dim() == 1:
                tensor += 0.1 * torch.randn_like(tensor)
    return model.to(dtype)
