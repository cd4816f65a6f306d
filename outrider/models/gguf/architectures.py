"""The architectures of GGUF files that are read: a row for each, which is all that another one
needs.

A row says what transformers calls the model, where its config stands in the metadata, how its
tensors differ from transformers' parameters, and how it chooses experts. The keys are those that
llama.cpp's converter writes; what an architecture means without saying so is what llama.cpp's
graphs do. What no table can say of a config is a function of `computed.py`; how tensors are
rearranged is one of `rearranging.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from outrider.errors import CapabilityError, CheckpointError, did_you_mean
from outrider.models.gguf import computed, rearranging
from outrider.models.gguf.header import ORIGINAL, Count, GgufFile
from outrider.models.gguf.rearranging import GATE_UP, Arrange, Halves, as_stored, qkvz_order

TOKENS = "tokenizer.ggml.tokens"
# tokens, and what configs call them
MARKED = {"bos": "bos", "eos": "eos", "padding": "pad", "unknown": "unk"}
# see `Architecture.positions`
WHOLE = "whole"
PART = "part"
LATENT = "latent"
OWN = "own"

# Keys below the architecture's name -> what configs call them
NEEDED = ("context_length", "block_count", "embedding_length", "attention.head_count")
COMMON = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps", "vocab_size": "vocab_size",
}  # fmt: skip
COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
EXPERTS = COUNTS | {"expert_feed_forward_length": "moe_intermediate_size"}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
SIZES = SHARED_EXPERT | {"expert_feed_forward_length": "moe_intermediate_size"}
ROUTED = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
ERNIE = {
    "expert_count": "moe_num_experts", "expert_used_count": "moe_k", "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "moe_layer_start_index",
}  # fmt: skip
GRANITE = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
DELTA_NET = {
    "full_attention_interval": "full_attention_interval", "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim", "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
LFM = {"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {f"{part}_logit_softcapping": f"{part}_logit_softcapping" for part in ("attn", "final")}
EPSILON = {"attention.layer_norm_epsilon": "layer_norm_epsilon"}

# Ends of parameters' names in a layer -> the tensors of files that gguf's table has under another
# name
CORRECTION = {".mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
ERNIE_CORRECTION = {".mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias"}
APART = {
    f".self_attn.{part}_proj.{end}": f"attn_{part}.{end}"
    for part in "qkv"
    for end in ("weight", "bias")
}
STEP = {".linear_attn.dt_bias": "ssm_dt.bias"}
MIXER = {f".mixer.{ours}": theirs for ours, theirs in {
    "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight", "q_proj.weight": "attn_q.weight", "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight", "o_proj.weight": "attn_output.weight", "up_proj.weight": "ffn_up.weight",
    "down_proj.weight": "ffn_down.weight", "gate.weight": "ffn_gate_inp.weight",
    "gate.e_score_correction_bias": "exp_probs_b.bias", "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
    "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
}.items()}  # fmt: skip
GRANITE_NAMES = {
    ".mamba.dt_bias": "ssm_dt.bias", ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",
    ".shared_mlp.input_linear.weight": GATE_UP, ".shared_mlp.output_linear.weight": "ffn_down.weight",
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """A row: what the files of one architecture hold, and what transformers makes of it."""

    model_type: str  # transformers'
    keys: Mapping[str, str] = field(default_factory=dict)  # besides `COMMON`, and never missing
    optional: Mapping[str, str] = field(default_factory=dict)  # those that may be missing
    needed: tuple[str, ...] = ()  # keys that `more` reads, and that are never missing
    always: Mapping[str, Any] = field(default_factory=dict)
    more: Callable[[GgufFile], dict[str, Any]] | None = None  # what no table says
    # of a head that is rotated: the whole, or PART of it; LATENT: one of its two parts; OWN: see
    # `more`
    positions: str = WHOLE
    gate: int | None = None  # the function that chooses experts, unless the file names none
    names: Mapping[str, str] = field(default_factory=dict)  # of tensors: see above
    arrange: Arrange = as_stored
    moved_inputs: str = ""  # part of the name of a matrix whose inputs are rearranged, too
    halves: Halves | None = None  # two tensors that are one parameter
    in_config: tuple[str, ...] = ()  # tensors that `more` reads, and no module has


MIXTURE = Architecture("qwen3_moe", COUNTS, SIZES, always={"norm_topk_prob": True})
DENSE_DELTA = Architecture(
    "qwen3_5_text",
    DELTA_NET,
    more=computed.delta_net,
    positions=PART,
    names=STEP,
    arrange=rearranging.delta_net,
    needed=(
        "ssm.inner_size",
        "rope.dimension_count",
        "rope.dimension_sections",
        "attention.key_length",
    ),
    moved_inputs="ssm_out.",
)
ONE_PER_LAYER = Architecture(
    "nemotron_h",
    {
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
        "ssm.conv_kernel": "conv_kernel",
        "ssm.state_size": "ssm_state_size",
        "ssm.group_count": "n_groups",
        "ssm.time_step_rank": "mamba_num_heads",
    },
    needed=("attention.head_count_kv", "feed_forward_length", "ssm.inner_size"),
    more=computed.nemotron_h,
    positions=OWN,
    names=MIXER,
    arrange=rearranging.state_space,
)
ARCHITECTURES = {
    "bailingmoe": Architecture(
        "ernie4_5_moe", ERNIE, needed=("expert_weights_norm",), always={"moe_layer_interval": 1}, more=computed.ling_lite,
        names=ERNIE_CORRECTION | APART, arrange=rearranging.correction_row,
    ),
    "bailingmoe2": Architecture(
        "glm4_moe", ROUTED, needed=("rope.dimension_count", "expert_gating_func"), more=computed.ling, positions=PART,
        gate=computed.SIGMOID, names=CORRECTION | APART,
    ),
    "bloom": Architecture("bloom", EPSILON, positions=OWN, arrange=rearranging.heads_together),
    "cohere2": Architecture("cohere2", {"logit_scale": "logit_scale"} | WINDOW),
    "command-r": Architecture("cohere", {"logit_scale": "logit_scale"}),
    "deepseek2": Architecture(
        "deepseek_v3", ROUTED | {"attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim"},
        needed=("attention.key_length", "attention.value_length"), more=computed.deepseek, positions=LATENT, names=CORRECTION,
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", ERNIE | {"interleave_moe_layer_step": "moe_layer_interval"}, more=computed.ernie_moe,
        names=ERNIE_CORRECTION, arrange=rearranging.correction_row,
    ),
    "exaone4": Architecture("exaone4", more=computed.exaone),
    "gemma": Architecture("gemma", arrange=rearranging.raised_norms),
    "gemma2": Architecture("gemma2", WINDOW, CAPS, more=computed.gemma, arrange=rearranging.raised_norms),
    "gemma3": Architecture("gemma3_text", WINDOW, CAPS, more=computed.gemma, arrange=rearranging.raised_norms),
    "gemma3n": Architecture(
        "gemma3n_text", WINDOW | {
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "altup.active_idx": "altup_active_idx", "altup.num_inputs": "altup_num_inputs",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        }, needed=(
            "activation_sparsity_scale", "attention.sliding_window_pattern", "feed_forward_length", "rope.freq_base"
        ), more=computed.gemma3n, positions=OWN,
    ),
    "gemma4": Architecture(
        "gemma4_text", WINDOW | {"attention.key_length": "global_head_dim", "attention.shared_kv_layers": "num_kv_shared_layers"},
        needed=(
            "attention.key_length_swa", "attention.sliding_window_pattern", "feed_forward_length", "attention.head_count_kv",
            "rope.freq_base",
        ), more=computed.gemma4, positions=OWN, in_config=("rope_freqs.weight",),
        names={".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale"},
    ),
    "glm4": Architecture("glm4", more=computed.glm, positions=PART),
    "glm4moe": Architecture(
        "glm4_moe", ROUTED, more=computed.glm_moe, positions=PART, gate=computed.SIGMOID, names=CORRECTION
    ),
    "gpt2": Architecture("gpt2", EPSILON, positions=OWN, arrange=rearranging.transposed),
    "gpt-oss": Architecture(
        "gpt_oss", {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"} | WINDOW,
        always={"rope_scaling": {"truncate": False}},
    ),
    "granite": Architecture("granite", GRANITE, arrange=rearranging.rotary_rows),
    "granitehybrid": Architecture(
        "granitemoehybrid", GRANITE | {
            "ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
            "ssm.time_step_rank": "mamba_n_heads",
        }, needed=("attention.head_count_kv", "ssm.inner_size", "feed_forward_length"), more=computed.granite_hybrid,
        positions=OWN, names=GRANITE_NAMES, arrange=rearranging.state_space,
        halves=Halves(r"\.ffn_gate(_shexp)?\.weight$", r".ffn_up\1.weight", f".{GATE_UP}"),
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "lfm2": Architecture(
        "lfm2", LFM, needed=("attention.head_count_kv",), always={"block_auto_adjust_ff_dim": False}, more=computed.lfm,
        positions=OWN, arrange=rearranging.short_convolution,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe", LFM | EXPERTS | {"leading_dense_block_count": "num_dense_layers"}, needed=("attention.head_count_kv",),
        more=computed.lfm, positions=OWN, gate=computed.SIGMOID, names={".feed_forward.expert_bias": "exp_probs_b.bias"},
        arrange=rearranging.short_convolution,
    ),
    "llama": Architecture("llama", more=computed.llama, arrange=rearranging.rotary_rows),
    "mamba": Architecture(
        "mamba", {
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size", "ssm.time_step_rank": "time_step_rank", "ssm.inner_size": "intermediate_size",
        }, positions=OWN, arrange=rearranging.state_space,
    ),
    "mistral3": Architecture("ministral3", optional=WINDOW, more=computed.ministral, arrange=rearranging.rotary_rows),
    "nemotron": Architecture(
        "nemotron", optional={"attention.layer_norm_epsilon": "norm_eps"}, positions=PART, arrange=rearranging.raised_norms
    ),
    "nemotron_h": ONE_PER_LAYER,
    "nemotron_h_moe": ONE_PER_LAYER,
    "olmo2": Architecture("olmo2", more=computed.olmo),
    "olmoe": Architecture("olmoe", COUNTS),
    "phi2": Architecture("phi", positions=PART),
    "phi3": Architecture("phi3", optional=WINDOW, positions=PART),
    "qwen2": Architecture("qwen2"),
    "qwen2vl": Architecture("qwen2"),  # the text part, whose positions are a text's
    "qwen2moe": Architecture("qwen2_moe", COUNTS, SIZES, arrange=rearranging.shared_gate),
    "qwen3": Architecture("qwen3"),
    "qwen3vl": Architecture("qwen3"),
    "qwen3moe": MIXTURE,
    "qwen3vlmoe": MIXTURE,
    "qwen35": DENSE_DELTA,
    "qwen35moe": replace(DENSE_DELTA, model_type="qwen3_5_moe_text", keys=DELTA_NET | EXPERTS | SHARED_EXPERT),
    "qwen3next": replace(
        DENSE_DELTA, model_type="qwen3_next", keys=DELTA_NET | EXPERTS | SHARED_EXPERT, needed=("ssm.inner_size",),
        more=computed.qwen3_next, arrange=partial(rearranging.delta_net, in_turn=False),
        halves=Halves(r"\.attn_qkv\.weight$", ".attn_gate.weight", ".ssm_in.weight", qkvz_order),
    ),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", arrange=rearranging.rotary_rows),
    "stablelm": Architecture("stablelm", more=computed.stablelm, positions=PART),
    "starcoder2": Architecture("starcoder2", {"attention.layer_norm_epsilon": "norm_epsilon"}),
}  # fmt: skip


def row_of(file: GgufFile) -> Architecture:
    """The row of a file's architecture. Raises CapabilityError where there is none."""
    row = ARCHITECTURES.get(file.architecture)
    if row is None:
        raise CapabilityError(
            f"'{file.path}' is a model of architecture '{file.architecture}', which is not read "
            "from GGUF (docs/support.md)."
            f"{did_you_mean(file.architecture, ARCHITECTURES)} {ORIGINAL}"
        )
    return row


def arranging(file: GgufFile, config: Any) -> Callable[[np.ndarray, str], np.ndarray]:
    """A function that makes a parameter from the stored values and a tensor's name, for a model of
    this config."""
    arrange = row_of(file).arrange
    values = config.get_text_config().to_dict()
    return lambda weights, name: arrange(weights, name, values)


def own_config(file: GgufFile, row: Architecture) -> dict[str, Any]:
    """The arguments of transformers' config class that differ between architectures.

    Raises CheckpointError where the metadata lacks something, CapabilityError for another way to
    choose experts.
    """
    if missing := [key for key in (*NEEDED, *row.keys, *row.needed) if file.of_model(key) is None]:
        raise CheckpointError(
            f"'{file.path}' lacks {len(missing)} values of its metadata, first "
            f"'{file.architecture}.{missing[0]}': incomplete. "
            "Convert the model again."
        )
    if row.gate is not None and file.of_model("expert_gating_func", row.gate) != row.gate:
        raise computed.unknown_gate(file)
    keys = COMMON | dict(row.optional) | dict(row.keys)
    values = {
        ours: value for theirs, ours in keys.items() if (value := file.of_model(theirs)) is not None
    }
    tokens = file.metadata.get(TOKENS)
    if "vocab_size" not in values and tokens is not None:
        values["vocab_size"] = int(tokens) if isinstance(tokens, Count) else len(tokens)
    marked = {
        f"{ours}_token_id": file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for theirs, ours in MARKED.items()
    }
    names = file.tensor_names
    heads = values["num_attention_heads"]
    # Mamba has none
    size = file.of_model("attention.key_length") or values["hidden_size"] // max(heads, 1)
    return {
        "model_type": row.model_type,
        "tie_word_embeddings": "output.weight" not in names,
        "head_dim": size,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "rope_theta": computed.theta(file),
        **marked,
        **values,
        **row.always,
        **(row.more(file) if row.more else {}),
    }
