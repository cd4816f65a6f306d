"""Models loaded from GGUF files against the transformers models they were written from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GPT2Config,
    GraniteConfig,
    HunYuanDenseV1Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    Ministral3Config,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.derived.derive import num_weights, weight_of
from outrider.models.derived.quantise import quantised_copy
from outrider.models.gguf.header import read_gguf
from outrider.models.gguf.linear import BlockEmbedding, BlockLinear, block_layers
from outrider.models.gguf.rearranging import is_unused
from outrider.models.gguf.weights import gguf_notes
from outrider.models.loaded import LoadedModel
from outrider.models.loading import load
from outrider.models.loading.generation_config import asked_of, eos_token_ids, sampling_defaults
from outrider.models.loading.load import load_config, load_module, load_tokenizer
from outrider.models.loading.memory import model_memory
from outrider.models.loading.read_card import card_of
from outrider.models.source import resolve
from outrider.runtime.layers import use_kernels
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from tests.gguf_files import VOCABULARY_SIZE, Kind, rounded, vocabulary, write_model
from tests.unit.runtime.passes import differences, every_pass

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
    "initializer_range": 0.2,
}  # fmt: skip


def made(kind: type = LlamaConfig, *, seed: int = 0, **changes: Any) -> Any:
    """A random model."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = kind(**{**SIZES, "tie_word_embeddings": False, **changes})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases, which begin as ones and zeros
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def loaded(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return load_module(resolve(str(path)), load_config(resolve(str(path))), dtype, CPU)


def norms_of_heads(model: Any) -> dict[str, np.ndarray]:
    """StableLM 2's norms, as llama.cpp keeps them: a row for each head."""
    return {
        f"blk.{number}.attn_{kind}_norm.weight": torch.stack(
            [norm.weight.detach() for norm in getattr(layer.self_attn, f"{kind}_layernorm").norms]
        ).numpy()
        for number, layer in enumerate(model.model.layers)
        for kind in "qk"
    }


def logits(module: Any) -> torch.Tensor:
    tokens = torch.arange(3, 43)[None] % VOCABULARY_SIZE
    with torch.inference_mode():
        return module(input_ids=tokens, use_cache=False).logits.float()


GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "sliding_window": 16,
}
DELTA_NET = {
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16,
    "linear_value_head_dim": 32, "full_attention_interval": 2, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
    },
}  # fmt: skip
DELTA_NET_KEYS = {
    "qwen35.full_attention_interval": 2, "qwen35.ssm.conv_kernel": 4, "qwen35.ssm.state_size": 16, "qwen35.ssm.group_count": 2,
    "qwen35.ssm.time_step_rank": 6, "qwen35.ssm.inner_size": 192, "qwen35.rope.dimension_count": 8,
    "qwen35.rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "llama": ("llama", made, {}),
    "llama, tied": ("llama", lambda: made(tie_word_embeddings=True), {}),
    "llama, biases": ("llama", lambda: made(attention_bias=True, mlp_bias=True), {}),
    "llama, linear positions": (
        "llama", lambda: made(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "llama, yarn": (
        "llama",
        lambda: made(
            rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}
        ),
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0, "llama.rope.scaling.original_context_length": 128},
    ),
    "mistral": ("llama", lambda: made(MistralConfig, sliding_window=None), {}),
    "qwen2": ("qwen2", lambda: made(Qwen2Config), {}),
    "qwen3": ("qwen3", lambda: made(Qwen3Config, head_dim=32), {"qwen3.attention.key_length": 32}),
    "gemma2": (
        "gemma2", lambda: made(Gemma2Config, **GEMMA, attn_logit_softcapping=20.0, final_logit_softcapping=10.0),
        {"gemma2.attn_logit_softcapping": 20.0, "gemma2.final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "gemma3", lambda: made(Gemma3TextConfig, **GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0}),
        {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
    ),
    "gemma": ("gemma", lambda: made(GemmaConfig, head_dim=16, tie_word_embeddings=True), {}),
    "qwen2vl": ("qwen2vl", lambda: made(Qwen2Config), {"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": ("qwen3vl", lambda: made(Qwen3Config, head_dim=32), {"qwen3vl.rope.dimension_sections": [4, 6, 6, 0]}),
    "qwen35": ("qwen35", lambda: made(Qwen3_5TextConfig, **DELTA_NET), DELTA_NET_KEYS),
    "qwen35, as many keys": (
        "qwen35", lambda: made(Qwen3_5TextConfig, **DELTA_NET | {"linear_num_value_heads": 2}),
        DELTA_NET_KEYS | {"qwen35.ssm.time_step_rank": 2, "qwen35.ssm.inner_size": 64},
    ),
    "smollm3": ("smollm3", lambda: made(SmolLM3Config, num_hidden_layers=4), {"smollm3.rope.dimension_count": 16}),
    "granite": (
        "granite", lambda: made(
            GraniteConfig, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.25, attention_multiplier=0.1
        ), {
            "granite.embedding_scale": 12.0, "granite.logit_scale": 8.0, "granite.residual_scale": 0.25,
            "granite.attention.scale": 0.1, "granite.rope.dimension_count": 16,
        },
    ),
    "olmo2": ("olmo2", lambda: made(Olmo2Config), {}),
    "cohere2": (
        "cohere2", lambda: made(
            Cohere2Config, tie_word_embeddings=True, logit_scale=0.25, num_hidden_layers=5, sliding_window=16
        ), {
            "cohere2.logit_scale": 0.25, "cohere2.rope.scaling.type": "none", "cohere2.attention.sliding_window": 16,
            "cohere2.rope.dimension_count": 16,
        },
    ),
    "ernie4_5": ("ernie4_5", lambda: made(Ernie4_5Config, head_dim=32), {}),
    "exaone4": ("exaone4", lambda: made(Exaone4Config, sliding_window=None, layer_types=["full_attention"] * 2), {}),
    "exaone4, windows": (
        "exaone4", lambda: made(Exaone4Config, num_hidden_layers=4, sliding_window=16, layer_types=[
            "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"
        ]), {"exaone4.attention.sliding_window": 16, "exaone4.attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "hunyuan-dense": (  # a larger base of positions is what their scaling comes to
        "hunyuan-dense", lambda: made(HunYuanDenseV1Config, head_dim=32, rope_parameters={
            "rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0,
        }), {"hunyuan-dense.rope.freq_base": 1e4 * 1000.0 ** (32 / 30), "hunyuan-dense.rope.scaling.type": "none"},
    ),
    "olmoe": ("olmoe", lambda: made(OlmoeConfig, num_experts=4, num_experts_per_tok=2), {}),
    "olmo3": (
        "olmo2", lambda: made(Olmo3Config, num_hidden_layers=4, sliding_window=16),
        {"olmo2.attention.sliding_window": 16, "olmo2.attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "olmo3, yarn": (
        "olmo2", lambda: made(Olmo3Config, num_hidden_layers=4, sliding_window=16, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}, "full_attention": {
                "rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
                "attention_factor": 1.2, "beta_fast": 16.0, "beta_slow": 1.0,
            },
        }), {
            "olmo2.attention.sliding_window": 16, "olmo2.rope.scaling.type": "yarn", "olmo2.rope.scaling.factor": 8.0,
            "olmo2.rope.scaling.original_context_length": 64, "olmo2.rope.scaling.yarn_attn_factor": 1.2,
            "olmo2.rope.scaling.yarn_beta_fast": 16.0, "olmo2.rope.freq_base": 5e5,
        },
    ),
    "glm4": (
        "glm4", lambda: made(Glm4Config, head_dim=16, partial_rotary_factor=0.5, attention_bias=True),
        {"glm4.rope.dimension_count": 8},
    ),
    "glm4, no biases": (
        "glm4", lambda: made(Glm4Config, head_dim=16, partial_rotary_factor=0.5, attention_bias=False),
        {"glm4.rope.dimension_count": 8},
    ),
    "seed_oss": ("seed_oss", lambda: made(SeedOssConfig, head_dim=32), {}),
    "command-r": (
        "command-r", lambda: made(CohereConfig, tie_word_embeddings=True, logit_scale=0.25),
        {"command-r.logit_scale": 0.25, "command-r.rope.scaling.type": "none"},
    ),
    "mistral3": (
        "mistral3", lambda: made(MistralConfig, sliding_window=None, head_dim=32), {"mistral3.rope.dimension_count": 32}
    ),
    "mistral3, yarn": (
        "mistral3", lambda: made(MistralConfig, sliding_window=None, head_dim=32, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32, "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }), {
            "mistral3.rope.dimension_count": 32, "mistral3.rope.scaling.type": "yarn", "mistral3.rope.scaling.factor": 16.0,
            "mistral3.rope.scaling.original_context_length": 32, "mistral3.rope.scaling.yarn_log_multiplier": 1.0,
        },
    ),
    "mistral3, positions": (
        "mistral3", lambda: made(Ministral3Config, head_dim=32, rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 16.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }), {
            "mistral3.rope.dimension_count": 32, "mistral3.rope.scaling.type": "yarn", "mistral3.rope.scaling.factor": 16.0,
            "mistral3.rope.scaling.original_context_length": 16, "mistral3.rope.scaling.yarn_beta_fast": 16.0,
            "mistral3.rope.scaling.yarn_log_multiplier": 1.0, "mistral3.attention.temperature_scale": 0.1,
        },
    ),
    "phi3": (
        "phi3", lambda: made(Phi3Config, partial_rotary_factor=0.5, sliding_window=16, head_dim=16),
        {"phi3.rope.dimension_count": 8, "phi3.attention.sliding_window": 16},
    ),
    "phi2": (
        "phi2", lambda: made(PhiConfig, partial_rotary_factor=0.5, num_key_value_heads=4, layer_norm_eps=1e-5),
        {"phi2.rope.dimension_count": 8},
    ),
    "gpt2": (
        "gpt2", lambda: made(GPT2Config, n_embd=64, n_layer=2, n_head=4, n_positions=512, tie_word_embeddings=True),
        {"gpt2.context_length": 512},
    ),
    "gpt2, with an output layer": (
        "gpt2", lambda: made(GPT2Config, n_embd=64, n_layer=2, n_head=4, n_positions=512), {"gpt2.context_length": 512},
    ),
    "bloom": (
        "bloom", lambda: made(BloomConfig, n_head=4, n_layer=2, tie_word_embeddings=True), {"bloom.context_length": 512},
    ),
    "mamba": (  # whose converter writes no heads
        "mamba", lambda: made(MambaConfig, state_size=16, intermediate_size=128, tie_word_embeddings=True),
        {"mamba.attention.head_count": 0, "mamba.feed_forward_length": 0},
    ),
    "nemotron": (
        "nemotron", lambda: made(NemotronConfig, partial_rotary_factor=0.5, norm_eps=1e-3),
        {"nemotron.rope.dimension_count": 8, "nemotron.attention.layer_norm_epsilon": 1e-3},
    ),
    "lfm2": (
        "lfm2", lambda: made(
            Lfm2Config, layer_types=["conv", "full_attention"], tie_word_embeddings=True, block_auto_adjust_ff_dim=False,
            norm_eps=1e-3,
        ), {"lfm2.attention.head_count_kv": [0, 2], "lfm2.attention.layer_norm_rms_epsilon": 1e-3},
    ),
    "starcoder2": (
        "starcoder2", lambda: made(
            Starcoder2Config, tie_word_embeddings=True, sliding_window=None, use_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_file_says_what_its_model_says(name: str, tmp_path: Path) -> None:
    """Catches a weight at the wrong position, rows in GGUF's order, and a row that leaves out
    positions or heads."""
    architecture, model_of, changes = ARCHITECTURES[name]
    model = model_of()
    path = write_model(tmp_path / "m.gguf", model, architecture, changes=changes)
    expected = logits(model)
    assert torch.allclose(logits(loaded(path)), expected, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "gemma3", "gpt2", "qwen35"])
def test_blocks_are_what_their_model_says_rounded(name: str, tmp_path: Path) -> None:
    """Matrices stay in blocks, with rows put in order; without kernels the logits are those of the
    widened weights."""
    architecture, model_of, changes = ARCHITECTURES[name]
    model = model_of()
    path = write_model(tmp_path / "m.gguf", model, architecture, changes=changes, kind=Kind.Q8_0)
    module = loaded(path)
    layers = list(block_layers(module))
    assert len(layers) == sum(
        1 for tensor in read_gguf(path).tensors if tensor.kind is Kind.Q8_0
    ) + (model.config.tie_word_embeddings is True)
    assert isinstance(module.get_input_embeddings(), BlockEmbedding)
    assert isinstance(module.get_output_embeddings(), BlockLinear)
    with torch.no_grad():
        for part in model.modules():
            if (weight := getattr(part, "weight", None)) is not None and weight.ndim == 2:
                turned = type(part).__name__ == "Conv1D"
                kept = rounded(weight.t() if turned else weight, Kind.Q8_0)
                weight.copy_(kept.t() if turned else kept)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=2e-4 * expected.abs().max().item())


# of 1.6B and of 12B
@pytest.mark.parametrize(("biases", "parallel"), [(True, False), (False, True)])
def test_norms_of_heads_are_rows_of_one_tensor(
    tmp_path: Path, biases: bool, parallel: bool
) -> None:
    model = made(
        StableLmConfig,
        use_qkv_bias=biases,
        qk_layernorm=True,
        use_parallel_residual=parallel,
        partial_rotary_factor=0.25,
    )
    norms = norms_of_heads(model)
    assert {len(norm) for norm in norms.values()} == {4, 2}
    changes = {"stablelm.rope.dimension_count": 4, "stablelm.rope.freq_base": 10000.0}
    path = write_model(tmp_path / "m.gguf", model, "stablelm", changes=changes, tensors=norms)
    expected = logits(model)
    assert torch.allclose(logits(loaded(path)), expected, atol=1e-4 * expected.abs().max().item())
    few = norms | {"blk.0.attn_q_norm.weight": norms["blk.0.attn_q_norm.weight"][:3]}
    with pytest.raises(
        CheckpointError,
        match=r"'blk.0.attn_q_norm.weight' has shape \(3,\), by its metadata .* \(4,\)",
    ):
        loaded(write_model(tmp_path / "m.gguf", model, "stablelm", changes=changes, tensors=few))


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_queries_keys_and_values_in_one_tensor(tmp_path: Path, kind: Kind) -> None:
    """Early files of Phi-2 have them so, biases included."""
    model = made(PhiConfig, partial_rotary_factor=0.5, num_key_value_heads=4, layer_norm_eps=1e-5)
    parts = [
        (number, [getattr(layer.self_attn, f"{part}_proj") for part in "qkv"])
        for number, layer in enumerate(model.model.layers)
    ]
    joined = {
        f"blk.{number}.attn_qkv.{end}": torch.cat([getattr(part, end) for part in own])
        .detach()
        .numpy()
        for number, own in parts
        for end in ("weight", "bias")
    }
    without = tuple(
        f"blk.{number}.attn_{part}.{end}"
        for number, _ in parts
        for part in "qkv"
        for end in ("weight", "bias")
    )
    path = write_model(
        tmp_path / "m.gguf",
        model,
        "phi2",
        changes={"phi2.rope.dimension_count": 8},
        tensors=joined,
        leave_out=without,
        kind=lambda name: kind if "attn_qkv" in name else Kind.F32,
    )
    with torch.no_grad():
        for _, own in parts:
            for part in own:
                part.weight.copy_(rounded(part.weight, kind))
    module = loaded(path)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=1e-4 * expected.abs().max().item())
    assert len(list(block_layers(module))) == (6 if kind is Kind.Q8_0 else 0)
    short = {
        name: value[:-1] if name.endswith("0.attn_qkv.weight") else value
        for name, value in joined.items()
    }
    with pytest.raises(CheckpointError, match="shape"):
        loaded(
            write_model(
                path,
                model,
                "phi2",
                changes={"phi2.rope.dimension_count": 8},
                tensors=short,
                leave_out=without,
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_gemma4(tmp_path: Path, library_path: Path, experts: bool) -> None:
    """Layers of two kinds, embeddings of each layer, layers that reuse keys and are twice as wide
    (as E2B); or experts, and values that are the keys (as 26B). On the native runtime up to
    activations in 8 bits."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    settings: dict[str, Any] = {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "layer_types": kinds,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "vocab_size_per_layer_input": VOCABULARY_SIZE,
        "final_logit_softcapping": 10.0,
    }
    if experts:
        settings |= {
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 4,
            "moe_intermediate_size": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        }
    else:
        settings |= {
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        }
    model = made(Gemma4TextConfig, **settings)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.layer_scalar.mul_(0.5)
        # random ones, whose queries are not scaled, answer to any rounding
        for name, parameter in model.named_parameters():
            parameter.mul_(0.05 if "q_norm" in name else 0.1 if ".post_" in name else 1)
    key = "gemma4."
    changes = {
        f"{key}attention.key_length": 32,
        f"{key}attention.key_length_swa": 16,
        f"{key}attention.sliding_window": 16,
        f"{key}attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        f"{key}attention.shared_kv_layers": 0 if experts else 3,
        f"{key}final_logit_softcapping": 10.0,
        f"{key}embedding_length_per_layer_input": 0 if experts else 16,
        f"{key}rope.freq_base": 1e6,
        f"{key}rope.freq_base_swa": 1e4,
        f"{key}feed_forward_length": 96 if experts else [96, 96, 96, 192, 192, 192],
        f"{key}attention.head_count_kv": [2, 2, 1, 2, 2, 1] if experts else 2,
    }
    extra = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12)}
    if experts:
        changes |= {
            f"{key}expert_count": 4,
            f"{key}expert_used_count": 4,
            f"{key}expert_feed_forward_length": 32,
        }
        for number, layer in enumerate(model.model.layers):
            extra[f"blk.{number}.ffn_gate_inp.scale"] = layer.router.scale.detach().numpy()
            extra[f"blk.{number}.ffn_down_exps.scale"] = (
                layer.router.per_expert_scale.detach().numpy()
            )
    else:
        # of no use, and in published files: in the first shared layer, too
        for number, size in ((3, 32), (5, 64)):
            extra[f"blk.{number}.attn_k.weight"] = np.ones((size, 64))
    path = write_model(tmp_path / "m.gguf", model, "gemma4", changes=changes, tensors=extra)
    expected = logits(model)
    assert torch.allclose(logits(loaded(path)), expected, atol=1e-4 * expected.abs().max().item())
    module = loaded(
        write_model(
            tmp_path / "q.gguf", model, "gemma4", changes=changes, tensors=extra, kind=Kind.Q8_0
        )
    )
    lm = load.build_lm(module, "gemma4", torch.float32, CPU)
    plain = every_pass(lm)
    lm.run = NativeRun(lm, module, lower(module), library_path)
    worst = differences(every_pass(lm), plain)
    assert max(worst.values()) < 0.1, worst


def test_gemma3n(tmp_path: Path) -> None:
    """Several streams, whose projections are one tensor; sparse activations, keys that are reused,
    embeddings of each layer."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = made(
        Gemma3nTextConfig,
        num_hidden_layers=4,
        head_dim=16,
        layer_types=kinds,
        sliding_window=16,
        tie_word_embeddings=True,
        vocab_size_per_layer_input=VOCABULARY_SIZE,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        num_kv_shared_layers=2,
        altup_num_inputs=4,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0],
        initializer_range=0.02,
    )
    normal = torch.distributions.normal.Normal(0, 1)
    changes = {
        "attention.key_length": 16,
        "attention.sliding_window": 16,
        "attention.shared_kv_layers": 2,
        "altup.active_idx": 0,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "altup.num_inputs": 4,
        "embedding_length_per_layer_input": 8,
        "rope.freq_base": 1e6,
        "feed_forward_length": [96] * 4,
        "activation_sparsity_scale": [
            normal.icdf(torch.tensor(share)).item() for share in (0.95, 0.95, 0.0, 0.0)
        ],
    }
    inner = model.model
    extra = {
        "altup_proj.weight": torch.stack(
            [one.weight.detach() for one in inner.altup_projections]
        ).numpy(),
        "altup_unembd_proj.weight": torch.stack(
            [one.weight.detach() for one in inner.altup_unembed_projections]
        ).numpy(),
        "blk.2.attn_k_norm.weight": np.ones(16),  # of no use, and in published files
        "blk.3.attn_v.weight": np.ones((32, 64)),
    }
    path = write_model(
        tmp_path / "m.gguf",
        model,
        "gemma3n",
        changes={f"gemma3n.{key}": value for key, value in changes.items()},
        tensors=extra,
    )
    assert load_config(resolve(str(path))).activation_sparsity_pattern == [0.95, 0.95, 0.0, 0.0]
    expected = logits(model)
    assert torch.allclose(logits(loaded(path)), expected, atol=1e-4 * expected.abs().max().item())


def test_what_shared_layers_do_not_use_is_left_out() -> None:
    """From the first of them on, of keys and values alone."""
    config = Gemma4TextConfig(num_hidden_layers=12, num_kv_shared_layers=3)
    ends = (
        "k.weight",
        "v.weight",
        "k_norm.weight",
        "v_norm.weight",
        "q.weight",
        "q_norm.weight",
        "output.weight",
    )
    useless = {
        (layer, end)
        for layer in range(12)
        for end in ends
        if is_unused(f"blk.{layer}.attn_{end}", config)
    }
    assert useless == {(layer, end) for layer in (9, 10, 11) for end in ends[:4]}


def test_frequencies_are_divided_as_the_file_says(tmp_path: Path) -> None:
    """Llama 3.1's positions: the divisors that the file has are those of its rule."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = made(rope_parameters=rope)
    plain = 1e4 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    assert factors.max() > 2  # else this shows nothing
    path = write_model(tmp_path / "m.gguf", model, "llama", tensors={"rope_freqs.weight": factors})
    assert torch.allclose(logits(loaded(path)), logits(model), atol=1e-4)


def test_what_the_metadata_says_is_known(tmp_path: Path) -> None:
    """Context, ends (also those that only a name tells), sampling defaults, the tokenizer, its
    template."""
    changes = {
        "tokenizer.ggml.eot_token_id": 5,
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }
    path = write_model(tmp_path / "m.gguf", made(), "llama", changes=changes)
    config = load_config(resolve(str(path)))
    tokenizer = load_tokenizer(resolve(str(path)))
    module = loaded(path)
    assert config.max_position_embeddings == 512
    assert eos_token_ids(module, tokenizer, VOCABULARY_SIZE) == {0, 2, 5}
    found = sampling_defaults(
        "auto",
        LoadedModel(
            str(path),
            None,
            card_of(config),
            tokenizer,
            frozenset(),
            generation_config=asked_of(module.generation_config),
        ),
        512,
    )
    assert found.values == {"temperature": 0.6, "top_k": 20}
    assert found.notes[0].startswith(
        "sampling defaults from its metadata: temperature 0.6, top_k 20"
    )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hé 1"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>hé 1<|im_end|><|im_start|>"
    ids = tokenizer(text)["input_ids"]
    assert (ids[0], ids[-1], tokenizer.decode(ids)) == (1, 1, text)
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # gpt-oss: <|end|> ends a thought, not an answer
        (["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"], [0, 1, 2, 3]),
        (["<|end|>", "<|endoftext|>", "<|user|>"], [0, 1, 2]),  # Phi
        (["<turn|>", "<|tool_response>", "<eos>", "<|turn>"], [0, 1, 2]),  # Gemma 4
    ],
)
def test_control_tokens_end_answers_by_their_names(
    tmp_path: Path, names: list[str], expected: list[int]
) -> None:
    tokens, kinds = vocabulary()
    changes = {
        "tokenizer.ggml.tokens": [*names, *tokens[4:]],
        "tokenizer.ggml.token_type": [3] * len(names) + kinds[4:],
    }
    path = write_model(tmp_path / "m.gguf", made(), "llama", changes=changes)
    assert load_config(resolve(str(path))).eos_token_id == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_what_is_loaded(tmp_path: Path, dtype: torch.dtype) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        made(),
        "llama",
        kind=lambda name: Kind.Q4_0 if "ffn" in name else Kind.Q8_0,
    )
    weighed = model_memory(resolve(str(path)), load_config(resolve(str(path))), dtype)
    module = loaded(path, dtype)
    assert weighed.quantised_bytes == sum(layer.panels.nbytes for layer in block_layers(module))
    assert weighed.weights_bytes - weighed.quantised_bytes == sum(
        parameter.nbytes for parameter in module.parameters()
    )


def test_dtypes_follow_the_file(tmp_path: Path) -> None:
    """Blocks are computed in bf16, plain weights in their own type."""
    for kind, dtype in (
        (Kind.Q8_0, torch.bfloat16),
        (Kind.F16, torch.float16),
        (Kind.BF16, torch.bfloat16),
        (Kind.F32, torch.float32),
    ):
        path = write_model(tmp_path / "m.gguf", made(), "llama", kind=kind)
        assert load_config(resolve(str(path))).dtype == dtype


def test_formats_that_no_kernel_has_are_widened_and_reported(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        made(hidden_size=256),
        "llama",
        kind=lambda name: Kind.TQ2_0 if "ffn_up" in name else Kind.Q8_0,
    )
    module = loaded(path)
    assert type(module.model.layers[0].mlp.up_proj) is torch.nn.Linear
    notes = gguf_notes(read_gguf(path), module, "tiny")
    assert any(
        "widened (2 in TQ2_0; 0.0M weights)" in note or "widened (2 in TQ2_0" in note
        for note in notes
    ), notes
    assert any("slow" in note for note in notes)  # no kernels here


def test_what_the_kernels_round_is_reported_where_they_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes in bfloat16 move distributions about a third as far as activations in 8 bits do; fp32
    rounds neither."""
    path = write_model(tmp_path / "m.gguf", made(), "llama", kind=Kind.Q8_0)
    module = loaded(path)
    (slow,) = gguf_notes(read_gguf(path), module, "tiny")
    assert "bits" not in slow
    monkeypatch.setattr("outrider.models.gguf.weights.runs_on_kernels", lambda module: True)
    (note,) = gguf_notes(read_gguf(path), module, "tiny")
    assert (
        "passes are in bfloat16 (llama.cpp's in fp32), and activations are rounded to 8 bits"
        in note
    )
    assert "--dtype float32 rounds neither" in note


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"leave_out": ("blk.1.ffn_up.weight",)},
            "lacks 1 weights, first 'model.layers.1.mlp.up_proj.weight'.* Fetch it again",
        ),
        (
            {"tensors": {"blk.0.attn_q_norm.weight": np.ones(16)}},
            "no place for, first 'blk.0.attn_q_norm.weight'.* Use the original checkpoint",
        ),
        (
            {"changes": {"llama.feed_forward_length": 128}},
            r"has shape \(.*96.*\), by its metadata it should have \(.*128.*\)",
        ),
        (
            {"changes": {"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 4.0}},
            "scales its positions by 'su'",
        ),
        (
            {"changes": {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}},
            "rotates 8 of the 16 numbers",
        ),
        ({"changes": {"llama.block_count": 0}}, "layer"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_model(tmp_path / "m.gguf", made(), "llama", **changes)

    def use() -> None:
        model_memory(resolve(str(path)), load_config(resolve(str(path))), torch.float32)
        loaded(path)

    with pytest.raises((CapabilityError, CheckpointError), match=message):
        use()


def test_metadata_that_is_missing_is_named(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "m.gguf",
        made(Qwen3Config),
        "qwen3vl",
        changes={"qwen3vl.embedding_length": None},
    )
    with pytest.raises(
        CheckpointError, match=r"lacks 1 values .*, first 'qwen3vl\.embedding_length'"
    ):
        load_config(resolve(str(path)))


def test_what_would_be_another_model_is_refused(tmp_path: Path) -> None:
    """GLM-4V keeps its queries and keys in another order; without frequencies nothing says what
    Gemma 4 rotates."""
    model = made(Glm4Config, head_dim=16, partial_rotary_factor=0.5)
    changes = {"glm4.rope.dimension_count": 8, "glm4.rope.dimension_sections": [2, 1, 1, 0]}
    with pytest.raises(CapabilityError, match="text part of a GLM-4 that sees"):
        load_config(resolve(str(write_model(tmp_path / "m.gguf", model, "glm4", changes=changes))))
    keys = {
        "attention.key_length": 32,
        "attention.key_length_swa": 16,
        "attention.sliding_window": 16,
        "rope.freq_base": 1e6,
        "attention.sliding_window_pattern": [True, False],
        "attention.shared_kv_layers": 0,
    }
    path = write_model(
        tmp_path / "g.gguf",
        made(Qwen3Config),
        "gemma4",
        changes={f"gemma4.{key}": value for key, value in keys.items()},
    )
    with pytest.raises(CheckpointError, match=r"lacks 'rope_freqs\.weight'"):
        load_config(resolve(str(path)))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("rwkv6", None),
        ("t5", None),
        ("hy_v3", None),
        ("mimo2", None),
        ("llama4", "llama"),
        ("deepseek32", "deepseek2"),
        ("glm-dsa", None),
        ("exaone-moe", "exaone4"),
        ("minimax-m2", None),
        ("qwen3next2", "qwen3next"),
    ],
)
def test_other_architectures_are_named_and_refused(
    name: str, nearest: str | None, tmp_path: Path
) -> None:
    """In one line, with what is read, and the nearest of it."""
    path = write_model(tmp_path / "m.gguf", made(), "llama", changes={"general.architecture": name})
    with pytest.raises(CapabilityError) as refused:
        load_config(resolve(str(path)))
    message = str(refused.value)
    assert (
        f"is a model of architecture '{name}', which is not read from GGUF (docs/support.md)."
        in message
    )
    assert "Available: bailingmoe, " in message
    assert (f"Did you mean '{nearest}'?" in message) is (nearest is not None)
    assert "\n" not in message


def test_layers_that_predict_further_tokens_are_no_part_of_the_model(tmp_path: Path) -> None:
    model = made()
    extra = {
        "blk.2.nextn.eh_proj.weight": np.ones((64, 128)),
        "blk.2.attn_norm.weight": np.ones(64),
    }
    changes = {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    path = write_model(tmp_path / "m.gguf", model, "llama", changes=changes, tensors=extra)
    module = loaded(path)
    assert torch.allclose(logits(module), logits(model), atol=1e-4)
    assert gguf_notes(read_gguf(path), module, "tiny") == []
    weighed = model_memory(
        resolve(str(path)), load_config(resolve(str(path))), torch.float32
    ).weights_bytes
    assert weighed == sum(parameter.nbytes for parameter in module.parameters())


def test_drafts_derive_from_blocks(tmp_path: Path) -> None:
    """`quantised` reads weights back; the weights of a pass are counted as those of the plain
    model."""
    model = made()
    module = loaded(
        write_model(tmp_path / "m.gguf", model, "llama", kind=Kind.Q8_0), torch.bfloat16
    )
    up = module.model.layers[0].mlp.up_proj
    assert torch.equal(
        weight_of(up),
        rounded(model.model.layers[0].mlp.up_proj.weight.detach(), Kind.Q8_0).bfloat16(),
    )
    assert num_weights(module) == num_weights(model)
    copy = quantised_copy(module, 8, 32, head=True, native=False, name="tiny")
    near = logits(copy)
    own = logits(module)
    assert (near - own).norm() < 0.05 * own.norm()


def test_rows_are_independent_and_limits_are_found(tmp_path: Path, library_path: Path) -> None:
    """Run eagerly, on the library: a row's bits are its own, measured by probes that cannot agree
    by luck."""
    path = write_model(tmp_path / "m.gguf", made(), "llama", kind=Kind.Q8_0)
    module = loaded(path, torch.bfloat16)
    kernels = partial(use_kernels, path=library_path)
    lm = load.build_lm(module, "tiny", torch.bfloat16, CPU, kernels=kernels)
    load.finish(lm, module, kernels=kernels)
    assert all(layer.kernel is not None for layer in block_layers(module))
    assert lm.kernels is not None
    assert lm.limits.exact_rows
