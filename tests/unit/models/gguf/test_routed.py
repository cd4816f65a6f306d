"""GGUF files of models with routed and shared experts, first layers without, latents, states: GLM,
DeepSeek, Qwen3-Next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH_NAMES
from transformers import (
    CONFIG_MAPPING,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GraniteMoeHybridConfig,
    Lfm2MoeConfig,
    NemotronHConfig,
    Qwen3NextConfig,
)

from outrider.errors import CapabilityError
from outrider.models.gguf.architectures import ARCHITECTURES
from outrider.models.gguf.header import read_gguf
from outrider.models.gguf.linear import BlockEmbedding, BlockExperts, BlockLinear, block_layers
from outrider.models.loading.load import build_lm, finish, load_config
from outrider.models.source import resolve
from outrider.models.stateful.lm import StateLM
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from tests.gguf_files import Kind, rounded, write_model
from tests.gguf_heads import round_matrices
from tests.unit.models.gguf import test_experts, test_loading
from tests.unit.models.gguf.test_loading import CPU, loaded, logits, made
from tests.unit.runtime.passes import differences, every_pass


@pytest.fixture(autouse=True)
def _same_weights() -> Iterator[None]:
    """Of routers, too: the largest of some thousand differences between roundings is twice as large
    with one seed as with another."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


EXPERTS = 4
ROUTED = {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": EXPERTS, "n_shared_experts": 2,
    "num_experts_per_tok": EXPERTS, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
    "initializer_range": 0.1,
}  # fmt: skip
LATENTS = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
    "num_key_value_heads": 4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7,
    "mscale_all_dim": 0.7, "beta_fast": 16.0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "glm4moe": ("glm4moe", lambda: made(
        Glm4MoeConfig, **ROUTED, head_dim=16, partial_rotary_factor=0.5, attention_bias=True, use_qk_norm=True,
        norm_topk_prob=True,
    )),
    "glm4moe, without norms": ("glm4moe", lambda: made(
        Glm4MoeConfig, **ROUTED, head_dim=16, partial_rotary_factor=0.5, attention_bias=False, norm_topk_prob=False
    )),
    "deepseek v3": ("deepseek2", lambda: made(DeepseekV3Config, **ROUTED, **LATENTS, norm_topk_prob=True, rope_parameters=YARN)),
    "deepseek v2 lite": ("deepseek2", lambda: made(DeepseekV2Config, **ROUTED, **{**LATENTS, "q_lora_rank": None})),
    "glm 4.7 flash": ("deepseek2", lambda: made(Glm4MoeLiteConfig, **ROUTED, **LATENTS, norm_topk_prob=True)),
}  # fmt: skip


ERNIE = {
    "num_hidden_layers": 3, "moe_num_experts": EXPERTS, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_interval": 1, "initializer_range": 0.1,
}  # fmt: skip
# architecture, config, sizes, metadata
NEWER: dict[str, tuple[str, type, dict[str, Any], dict[str, Any]]] = {
    "ernie": ("ernie4_5-moe", Ernie4_5_MoeConfig, ERNIE, {
        "expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32, "interleave_moe_layer_step": 1,
        # 48: as published
        "leading_dense_block_count": 1, "expert_shared_feed_forward_length": 48, "expert_shared_count": 2,
    }),
    "ling-lite": ("bailingmoe", Ernie4_5_MoeConfig, {**ERNIE, "moe_layer_start_index": 0}, {
        "expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_weights_scale": 1.0,
        "leading_dense_block_count": 0, "expert_shared_count": 2, "expert_weights_norm": True,
    }),
}  # fmt: skip


LING = {
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "initializer_range": 0.1,
    "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": True, "norm_topk_prob": True,
}  # fmt: skip
LING_KEYS = {f"bailingmoe2.{key}": value for key, value in {
    "expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1, "expert_feed_forward_length": 32,
    "leading_dense_block_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_group_count": 4,
    "expert_group_used_count": 2, "expert_gating_func": 2, "rope.dimension_count": 8, "attention.key_length": 16,
}.items()}  # fmt: skip


def metadata(architecture: str, config: Any) -> dict[str, Any]:
    found = {
        "expert_count": EXPERTS,
        "expert_used_count": EXPERTS,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 32,
        "leading_dense_block_count": 1,
        "expert_weights_scale": 1.8,
        "expert_weights_norm": bool(config.norm_topk_prob),
    }
    if architecture == "glm4moe":
        found |= {"rope.dimension_count": 8, "expert_gating_func": 2}
    else:
        found |= {
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": 32,
            "attention.key_length": 40,
            "attention.value_length": 32,
            "attention.key_length_mla": 24,
            "attention.value_length_mla": 24,
            "attention.head_count_kv": 1,
            "rope.dimension_count": 8,
        }
    if (config.rope_parameters or {}).get("rope_type") == "yarn":
        found |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.yarn_log_multiplier": 0.07,
            "rope.scaling.yarn_beta_fast": 16.0,
        }
    return {f"{architecture}.{key}": value for key, value in found.items()}


def model_of(name: str) -> tuple[str, Any]:
    architecture, make = MODELS[name]
    model = make()
    with torch.no_grad():
        for path, buffer in model.named_buffers():
            if path.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn(buffer.shape) / 10)
    return architecture, model


@pytest.mark.parametrize("name", MODELS)
def test_a_file_says_what_its_model_says(name: str, tmp_path: Path) -> None:
    architecture, model = model_of(name)
    path = write_model(
        tmp_path / "m.gguf", model, architecture, changes=metadata(architecture, model.config)
    )
    expected = logits(model)
    assert torch.allclose(logits(loaded(path)), expected, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
@pytest.mark.parametrize("name", NEWER)
def test_other_mixtures(name: str, kind: Kind, tmp_path: Path, library_path: Path) -> None:
    """ERNIE's choice is corrected by a row of its own."""
    architecture, config, sizes, changes = NEWER[name]
    if kind is not Kind.F32:  # all experts: rounded activations would choose others
        sizes = {**sizes, "moe_k": EXPERTS}
        changes = {**changes, "expert_used_count": EXPERTS}
    model = made(config, **sizes)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "e_score_correction_bias" in path and name == "ernie":
                parameter.copy_(torch.rand(parameter.shape) / 4)
            if path.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn(parameter.shape))
    path = write_model(
        tmp_path / "m.gguf",
        model,
        architecture,
        changes={f"{architecture}.{key}": value for key, value in changes.items()},
        kind=lambda name: Kind.F32 if "ffn_gate_inp" in name else kind,
        leave_out=tuple(f"blk.{number}.exp_probs_b.bias" for number in range(3))
        if name == "ling-lite"
        else (),
    )
    if kind is not Kind.F32:
        round_matrices(model, kind)
    module = loaded(path)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=1e-4 * expected.abs().max().item())
    kinds = {type(layer) for layer in block_layers(module)}
    assert kinds == (set() if kind is Kind.F32 else {BlockLinear, BlockEmbedding, BlockExperts})
    lm = build_lm(module, "it", torch.float32, CPU)
    assert isinstance(lm, StateLM) == (name == "llama 4")
    if isinstance(lm, StateLM):
        finish(lm, module)  # transformers' own cache reproduces it
        return
    plain = every_pass(lm)
    lm.run = NativeRun(lm, module, lower(module), library_path)
    worst = differences(every_pass(lm), plain)
    assert max(worst.values()) < (1e-3 if kind is Kind.F32 else 0.1), worst


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_ling(kind: Kind, tmp_path: Path) -> None:
    """Files have queries, keys and values in one tensor, whose rows three layers take; experts are
    chosen in groups."""
    model = made(Glm4MoeConfig, **LING)
    path = write_model(
        tmp_path / "m.gguf",
        model,
        "bailingmoe2",
        changes=LING_KEYS,
        tensors=joined(model),
        kind=lambda name: Kind.F32 if "ffn_gate_inp" in name else kind,
    )
    if kind is not Kind.F32:
        round_matrices(model, kind)
    module = loaded(path)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=1e-4 * expected.abs().max().item())
    assert isinstance(module.model.layers[0].self_attn.k_proj, BlockLinear) is (
        kind is not Kind.F32
    )
    with pytest.raises(CapabilityError, match="chooses its experts by function 1"):
        loaded(
            write_model(
                path,
                model,
                "bailingmoe2",
                changes={**LING_KEYS, "bailingmoe2.expert_gating_func": 1},
            )
        )


def joined(model: Any, first: int = 0) -> dict[str, np.ndarray]:
    """Queries, keys and values of the layers in one tensor each, counted from `first`."""
    parts = [
        [getattr(layer.self_attn, f"{part}_proj").weight for part in "qkv"]
        for layer in model.model.layers
    ]
    return {
        f"blk.{first + number}.attn_qkv.weight": torch.cat(own).detach().numpy()
        for number, own in enumerate(parts)
    }


def test_older_files_have_the_matrix_of_latents_whole(tmp_path: Path) -> None:
    """Their metadata has the sizes of whole heads, of which each has its key."""
    architecture, model = model_of("deepseek v3")
    changes = {
        key: value
        for key, value in metadata(architecture, model.config).items()
        if not key.endswith("_mla")
    }
    changes |= {"deepseek2.attention.key_length": 24, "deepseek2.attention.value_length": 24}
    changes["deepseek2.attention.head_count_kv"] = 4
    parts = tuple(f"blk.{number}.attn_{part}_b.weight" for number in range(3) for part in "kv")
    whole = {
        f"blk.{number}.attn_kv_b.weight": layer.self_attn.kv_b_proj.weight.detach().numpy()
        for number, layer in enumerate(model.model.layers)
    }
    path = write_model(
        tmp_path / "m.gguf", model, architecture, changes=changes, leave_out=parts, tensors=whole
    )
    expected = logits(model)
    assert torch.allclose(logits(loaded(path)), expected, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["glm4moe", "deepseek v3"])
def test_blocks_stay(name: str, tmp_path: Path, library_path: Path) -> None:
    """Those of linear layers and experts; on the native runtime up to activations in 8 bits."""
    architecture, model = model_of(name)

    def kind(tensor: str) -> Kind:
        return (
            Kind.F32
            if any(part in tensor for part in ("_k_b.", "_v_b.", "gate_inp", "token_embd"))
            else Kind.Q8_0
        )

    path = write_model(
        tmp_path / "m.gguf",
        model,
        architecture,
        changes=metadata(architecture, model.config),
        kind=kind,
    )
    module = loaded(path)
    assert sum(isinstance(layer, BlockExperts) for layer in block_layers(module)) == 4
    with torch.no_grad():
        for path_of, part in model.named_modules():
            weight = getattr(part, "weight", None)
            if (
                isinstance(part, torch.nn.Linear)
                and weight is not None
                and "kv_b_proj" not in path_of
            ):
                weight.copy_(rounded(weight, Kind.Q8_0))
            for own in (getattr(part, "gate_up_proj", None), getattr(part, "down_proj", None)):
                if isinstance(own, torch.nn.Parameter):
                    own.copy_(rounded(own, Kind.Q8_0))
    assert any("exp_probs_b" in tensor.name for tensor in read_gguf(path).tensors)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=2e-4 * expected.abs().max().item())
    lm = build_lm(module, "it", torch.float32, CPU)
    plain = every_pass(lm)
    lm.run = NativeRun(lm, module, lower(module), library_path)
    worst = differences(every_pass(lm), plain)
    assert max(worst.values()) < 0.1, worst


@pytest.mark.parametrize("name", ["glm4moe", "deepseek v3", "deepseek v2 lite"])
def test_other_gates_are_refused(name: str, tmp_path: Path) -> None:
    architecture, model = model_of(name)
    changes = metadata(architecture, model.config) | {
        f"{architecture}.expert_gating_func": 2 if "v2" in name else 1
    }
    path = write_model(
        tmp_path / "m.gguf",
        model,
        architecture,
        changes=changes,
        tensors={"rope_freqs.weight": np.ones(4)},
    )
    with pytest.raises(CapabilityError, match="chooses its experts by function"):
        load_config(resolve(str(path)))


def test_lfm2_with_experts(tmp_path: Path) -> None:
    """Convolutions and attention by turns; the first layers have no experts."""
    model = made(
        Lfm2MoeConfig,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention"] * 2,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_dense_layers=1,
        tie_word_embeddings=True,
    )
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.feed_forward.expert_bias.copy_(torch.randn(EXPERTS) / 10)
    changes = {
        "attention.head_count_kv": [0, 2, 0, 2],
        "attention.layer_norm_rms_epsilon": model.config.norm_eps,
        "shortconv.l_cache": 3,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "attention.key_length": None,
        "rope.freq_base": float(model.config.rope_parameters["rope_theta"]),
    }
    path = write_model(
        tmp_path / "m.gguf",
        model,
        "lfm2moe",
        changes={f"lfm2moe.{key}": value for key, value in changes.items()},
    )
    expected = logits(model)
    assert torch.allclose(logits(loaded(path)), expected, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    "kinds", [(Kind.F32, Kind.F32), (Kind.Q8_0, Kind.Q8_0), (Kind.Q8_0, Kind.Q4_0)]
)
def test_qwen3_next(kinds: tuple[Kind, Kind], tmp_path: Path) -> None:
    """Queries, keys and values are one tensor and gates another, which transformers has in one, by
    key heads. They stay in blocks where both have one format."""
    model = made(
        Qwen3NextConfig,
        num_hidden_layers=4,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        partial_rotary_factor=0.25,
    )
    changes = {
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 6,
        "ssm.inner_size": 192,
        "rope.dimension_count": 8,
        "expert_shared_feed_forward_length": 32,
    }
    changes = {f"qwen3next.{key}": value for key, value in changes.items()}
    parts: dict[str, np.ndarray] = {}
    for number, layer in enumerate(model.model.layers[:3]):  # the fourth is full attention
        # by key heads: 16, 16, 96, 96
        rows = layer.linear_attn.in_proj_qkvz.weight.detach().view(2, -1, 64)
        *qkv, gate = (part.reshape(-1, 64) for part in rows.split([16, 16, 96, 96], dim=1))
        parts |= {
            f"blk.{number}.attn_qkv.weight": torch.cat(qkv).numpy(),
            f"blk.{number}.attn_gate.weight": gate.numpy(),
        }

    def kind(name: str) -> Kind:
        return kinds[0] if "attn_qkv" in name else kinds[1] if "attn_gate" in name else Kind.F32

    without = tuple(f"blk.{number}.ssm_in.weight" for number in range(3))
    path = write_model(
        tmp_path / "m.gguf",
        model,
        "qwen3next",
        changes=changes,
        tensors=parts,
        leave_out=without,
        kind=kind,
    )
    with torch.no_grad():
        for layer in model.model.layers[:3]:
            own = layer.linear_attn.in_proj_qkvz.weight.view(2, -1, 64)
            own[:, :128].copy_(rounded(own[:, :128].contiguous(), kinds[0]))
            own[:, 128:].copy_(rounded(own[:, 128:].contiguous(), kinds[1]))
    module = loaded(path)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=1e-4 * expected.abs().max().item())
    assert len(list(block_layers(module))) == (3 if kinds == (Kind.Q8_0, Kind.Q8_0) else 0)
    older = write_model(tmp_path / "o.gguf", model, "qwen3next", changes=changes)
    assert torch.allclose(logits(loaded(older)), expected, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("experts", [0, EXPERTS])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_granite_hybrids(experts: int, kind: Kind, tmp_path: Path) -> None:
    """Gate and up of the shared network are two tensors, under other names where there are no
    experts."""
    scales = {
        "embedding_multiplier": 12.0,
        "logits_scaling": 8.0,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.1,
    }
    model = made(
        GraniteMoeHybridConfig,
        **scales,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_expand=2,
        num_local_experts=experts,
        num_experts_per_tok=experts,
        intermediate_size=32,
        shared_intermediate_size=64,
        initializer_range=0.1,
    )
    stored: dict[str, np.ndarray] = {}
    ending = "_shexp" if experts else ""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            number = name.split(".")[2] if ".layers." in name else ""
            end = name.split(".", 3)[-1]
            if kind is Kind.Q8_0 and ("shared_mlp" in end or "mamba.in_proj" in end):
                value.copy_(rounded(value, kind))
            if end == "shared_mlp.input_linear.weight":
                halves = zip(("gate", "up"), value.chunk(2), strict=True)
                stored |= {
                    f"blk.{number}.ffn_{part}{ending}.weight": half.numpy() for part, half in halves
                }
            elif end == "shared_mlp.output_linear.weight":
                stored[f"blk.{number}.ffn_down{ending}.weight"] = value.numpy()
            elif end in ("mamba.A_log", "mamba.D"):
                stored[f"blk.{number}.ssm_{'a' if 'A_log' in end else 'd'}"] = (
                    -value.exp() if "A_log" in end else value
                )[:, None].numpy()
            elif end == "mamba.norm.weight":
                stored[f"blk.{number}.ssm_norm.weight"] = value[None].numpy()
            elif end == "mamba.conv1d.weight":
                stored[f"blk.{number}.ssm_conv1d.weight"] = value.squeeze(1).numpy()
            elif end == "mamba.dt_bias":
                stored[f"blk.{number}.ssm_dt.bias"] = value.numpy()
            elif end == "block_sparse_moe.router.weight":
                stored[f"blk.{number}.ffn_gate_inp.weight"] = value.numpy()
    changes = {
        "attention.head_count_kv": [0, 2],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 1,
        "ssm.time_step_rank": 8,
        "ssm.inner_size": 128,
        "attention.key_length": None,
        "rope.scaling.finetuned": False,
        "expert_count": experts or None,
        "expert_used_count": experts or None,
        "feed_forward_length": 32 if experts else 64,
        "expert_shared_feed_forward_length": 64 if experts else None,
        "embedding_scale": 12.0,
        "logit_scale": 8.0,
        "residual_scale": 0.25,
        "attention.scale": 0.1,
        "expert_feed_forward_length": None,
    }
    path = write_model(
        tmp_path / "m.gguf",
        model,
        "granitehybrid",
        changes={f"granitehybrid.{key}": value for key, value in changes.items()},
        tensors=stored,
        kind=lambda name: kind if name.split(".")[-2] in SHARED else Kind.F32,
        leave_out=()
        if experts
        else tuple(f"blk.{number}.ffn_down_shexp.weight" for number in range(2)),
    )
    module = loaded(path)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=2e-4 * expected.abs().max().item())
    assert len(list(block_layers(module))) == (0 if kind is Kind.F32 else 5)


SHARED = (
    "ssm_in",
    *(f"ffn_{part}{end}" for part in ("gate", "up", "down") for end in ("", "_shexp")),
)
NEMOTRON = {  # names of parameters in a layer -> those of files
    "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight", "q_proj.weight": "attn_q.weight", "k_proj.weight": "attn_k.weight",
    "v_proj.weight": "attn_v.weight",
    "o_proj.weight": "attn_output.weight", "up_proj.weight": "ffn_up.weight", "down_proj.weight": "ffn_down.weight",
    "gate.weight": "ffn_gate_inp.weight", "gate.e_score_correction_bias": "exp_probs_b.bias",
    "shared_experts.up_proj.weight": "ffn_up_shexp.weight", "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    "experts.up_proj": "ffn_up_exps.weight", "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


IN_BLOCKS = (
    "ssm_in", "ssm_out", "attn_q", "attn_k", "attn_v", "attn_output",
    *(f"ffn_{part}{end}" for part in ("up", "down") for end in ("", "_exps", "_shexp")),
)  # fmt: skip


def nemotron_tensors(model: Any, kind: Kind) -> dict[str, np.ndarray]:
    """Tensors of the layers by GGUF's names. The model's matrices are rounded in place."""
    stored: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if ".mixer." not in name:
                continue
            number = int(name.split(".")[2])
            end = name.split(".mixer.")[1]
            if end.endswith("e_score_correction_bias"):
                value.copy_(torch.randn(value.shape) / 10)
            if kind is Kind.Q8_0 and end.endswith(
                ("proj.weight", "experts.up_proj", "experts.down_proj")
            ):
                value.copy_(rounded(value.contiguous(), kind))
            own = value
            if end in ("q_proj.weight", "k_proj.weight"):
                own = value.view(-1, 2, 8, value.shape[1]).transpose(1, 2).reshape(value.shape)
            elif end in ("A_log", "D"):
                own = (-value.exp() if end == "A_log" else value)[:, None]
            elif end == "norm.weight":
                own = value.view(2, -1)
            elif end == "conv1d.weight":
                own = value.squeeze(1)
            stored[f"blk.{number}.{NEMOTRON[end]}"] = own.contiguous().numpy()
    return stored


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_nemotron_h(experts: bool, kind: Kind, tmp_path: Path) -> None:
    """Layers of one thing each; queries and keys without positions may lie in any order that both
    have. Experts have no gates."""
    layers = ["mamba", "moe" if experts else "mlp", "attention", "moe" if experts else "mlp"]
    model = made(
        NemotronHConfig,
        num_hidden_layers=4,
        layers_block_type=layers,
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=64,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=EXPERTS,
        routed_scaling_factor=2.5,
        n_shared_experts=1,
        layer_norm_epsilon=1e-5,
        initializer_range=0.1,
    )
    stored = nemotron_tensors(model, kind)
    width = 32 if experts else 96
    changes = {
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 0, 2, 0],
        "feed_forward_length": [0, width, 0, width],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 8,
        "ssm.inner_size": 128,
        "attention.key_length": 16,
        "expert_count": None,
        "block_count": 4,
    }
    if experts:
        changes |= {
            "expert_count": EXPERTS,
            "expert_used_count": EXPERTS,
            "expert_feed_forward_length": 32,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 64,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
        }
    architecture = "nemotron_h_moe" if experts else "nemotron_h"
    path = write_model(
        tmp_path / "m.gguf",
        model,
        architecture,
        changes={f"{architecture}.{key}": value for key, value in changes.items()},
        tensors=stored,
        kind=lambda name: kind if name.split(".")[-2] in IN_BLOCKS else Kind.F32,
    )
    module = loaded(path)
    expected = logits(model)
    assert torch.allclose(logits(module), expected, atol=2e-4 * expected.abs().max().item())
    assert len(list(block_layers(module))) == (0 if kind is Kind.F32 else 14 if experts else 10)


def test_every_row_is_known_and_has_a_file() -> None:
    """A row is complete when transformers has its class, gguf the names of its tensors, and a test
    a file of it."""
    elsewhere = {
        "bailingmoe2",
        "gemma3n",
        "gemma4",
        "granitehybrid",
        "lfm2moe",
        "nemotron_h",
        "nemotron_h_moe",
        "qwen3next",
    }
    tables = (test_loading.ARCHITECTURES, MODELS, NEWER)
    written = {row[0] for table in tables for row in table.values()} | {
        *test_experts.MODELS,
        *elsewhere,
        "stablelm",
    }
    assert ARCHITECTURES.keys() == written
    assert ARCHITECTURES.keys() <= set(MODEL_ARCH_NAMES.values())
    assert {row.model_type for row in ARCHITECTURES.values()} <= set(CONFIG_MAPPING)
