"""GGUF files that tests make: a transformers model written as llama.cpp's converter would, and
matrices of random blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import (
    GGUF_TO_TRANSFORMERS_MAPPING,
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

Kind = GGMLQuantizationType
HALVES = {  # where a block's fp16 factors lie: in random blocks these must be small numbers
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,), Kind.IQ4_NL: (0,),
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_XS: (0,), Kind.MXFP4: (),
}  # fmt: skip
END = "<|endoftext|>"
BEGIN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
SPECIALS = (END, BEGIN, END_OF_TURN)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
CONTROL = 3
NORMAL = 1
# rows of queries and keys that are rotated together lie in turn
PERMUTED = ("llama", "granite", "mistral3", "smollm3")
RAISED = ("gemma", "gemma2", "gemma3", "nemotron")  # norms
# what llama.cpp's converter writes for any model, where transformers has no table of its keys
OWN = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps", "attention.key_length": "head_dim", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
# what transformers calls them
CONFIGS = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gpt-oss": "gpt_oss"}


def random_blocks(
    kind: Kind, outputs: int, inputs: int, seed: int = 0, spread: float = 0.01
) -> np.ndarray:
    """(outputs, bytes of a row) uint8 of this format: any codes, factors around `spread`."""
    weights, size = GGML_QUANT_SIZES[kind]
    dice = np.random.default_rng(seed)
    blocks = dice.integers(0, 256, (outputs, inputs // weights, size), dtype=np.uint8)
    if kind is Kind.MXFP4:  # exponents
        blocks[..., 0] = dice.integers(118, 122, blocks.shape[:2])
    for at in HALVES[kind]:
        blocks[..., at : at + 2] = (
            dice.normal(0, spread, (*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
        )
    return blocks.reshape(outputs, -1)


def vocabulary() -> tuple[list[str], list[int]]:
    """(tokens, their types): three control tokens, every byte and one merge."""
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt"]
    return [*SPECIALS, *letters], [CONTROL] * len(SPECIALS) + [NORMAL] * len(letters)


VOCABULARY_SIZE = len(vocabulary()[0])


def write_model(
    path: Path,
    model: Any,
    architecture: str,
    *,
    kind: Kind | Callable[[str], Kind] = Kind.F32,
    changes: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
    pre: str | None = "gpt-2",
    tokenizer: str = "gpt2",
) -> Path:
    """`model` with matrices in format `kind` (or that of each name); `changes`: other metadata,
    None leaves a key out; `tensors`: more of them."""
    writer = GGUFWriter(path, architecture)
    for key, value in (
        _metadata(model, architecture, pre, tokenizer) | dict(changes or {})
    ).items():
        add_value(writer, key, value)
    stored = {
        name: value
        for name, value in stored_tensors(model, architecture).items()
        if name not in leave_out
    }
    for name, value in {**stored, **(tensors or {})}.items():
        is_matrix = value.ndim > 1 and not name.endswith(".bias")
        wanted = (kind(name) if callable(kind) else kind) if is_matrix else Kind.F32
        add_tensor(
            writer,
            name,
            value,
            wanted if value.shape[-1] % GGML_QUANT_SIZES[wanted][0] == 0 else Kind.F32,
        )
    return finish(writer, path)


def add_tensor(writer: GGUFWriter, name: str, value: np.ndarray, kind: Kind) -> None:
    if kind is Kind.F32:
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    else:
        writer.add_tensor(
            name, gguf.quantize(np.ascontiguousarray(value, dtype=np.float32), kind), raw_dtype=kind
        )


def finish(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    if isinstance(value, list):
        entries = gguf.GGUFValueType[
            kinds[type(value[0])] if not isinstance(value[0], int) else "INT32"
        ]
        writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, sub_type=entries)
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])


def _metadata(model: Any, architecture: str, pre: str | None, tokenizer: str) -> dict[str, Any]:
    table = GGUF_TO_TRANSFORMERS_MAPPING["config"].get(CONFIGS.get(architecture, architecture), OWN)
    # which also has what differs by layer
    config = model.config
    values = model.config.to_dict()
    found = {
        f"{architecture}.{key}": values[name] if name in values else getattr(config, name, None)
        for key, name in table.items()
        if name is not None
    }
    theta = (config.rope_parameters or {}) if hasattr(config, "rope_parameters") else {}
    theta = theta.get("full_attention", theta)
    if "rope_theta" in theta:
        found[f"{architecture}.rope.freq_base"] = float(theta["rope_theta"])
    tokens, types = vocabulary()
    return found | {
        "general.name": "tiny",
        "tokenizer.ggml.model": tokenizer,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["Ġ t"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def stored_tensors(model: Any, architecture: str) -> dict[str, np.ndarray]:
    """Tensors by GGUF's names, arranged as llama.cpp keeps them."""
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    state = model.state_dict()
    found = {}
    for theirs, ours in get_gguf_hf_weights_map(model, processor, architecture).items():
        if ours in state and not (ours == "lm_head.weight" and model.config.tie_word_embeddings):
            named = (
                f"{theirs}.weight"
                if theirs.endswith(("attn_sinks", "layer_output_scale", "altup_correct_scale"))
                else theirs
            )
            found[named] = _arranged(
                theirs, state[ours].float(), architecture, model.config
            ).numpy()
    found |= {
        f"blk.{name.split('.')[2]}.ssm_dt.bias": (
            value if architecture == "qwen3next" else tiled(value, model.config, 1)
        ).numpy()
        for name, value in state.items()
        if name.endswith(".linear_attn.dt_bias")
    }
    found |= {
        f"blk.{name.split('.')[2]}.exp_probs_b.bias": value.float().numpy()
        for name, value in state.items()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    }
    for name in [name for name in found if "attn_kv_b" in name]:
        keys, values = _latents(found.pop(name), model.config)
        found |= {name.replace("kv_b", "k_b"): keys, name.replace("kv_b", "v_b"): values}
    return {name: value for name, value in found.items() if "_exps" not in name} | experts_of(model)


def _latents(whole: np.ndarray, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """(heads, latent, key) and (heads, value, latent) of DeepSeek's matrix, which has key and value
    of a head in turn."""
    sizes = config.qk_nope_head_dim, config.v_head_dim
    rows = whole.reshape(config.num_attention_heads, sum(sizes), config.kv_lora_rank)
    return rows[:, : sizes[0]].swapaxes(1, 2), rows[:, sizes[0] :]


def tiled(value: Tensor, config: Any, size: int) -> Tensor:
    """Rows of Qwen3.5's value heads, so many of each, as llama.cpp keeps them: one of each key head
    in turn."""
    keys = config.linear_num_key_heads
    each = config.linear_num_value_heads // keys
    order = [key * each + number for number in range(each) for key in range(keys)]
    return torch.cat([value[head * size : (head + 1) * size] for head in order])


def _of_delta_net(name: str, value: Tensor, config: Any) -> Tensor:
    kind = name.split(".", 2)[-1]
    size = config.linear_value_head_dim
    key_rows = 2 * (config.linear_num_key_heads * config.linear_key_head_dim)
    if name.endswith("norm.weight") and kind != "ssm_norm.weight":
        return value + 1
    if kind == "ssm_a":
        return tiled(-torch.exp(value), config, 1)
    if kind in ("ssm_alpha.weight", "ssm_beta.weight"):
        return tiled(value, config, 1)
    if kind == "attn_gate.weight":
        return tiled(value, config, size)
    if kind in ("attn_qkv.weight", "ssm_conv1d.weight"):
        rows = value.squeeze(1) if value.ndim == 3 else value
        return torch.cat([rows[:key_rows], tiled(rows[key_rows:], config, size)])
    if kind == "ssm_out.weight":
        return tiled(value.t(), config, size).t()
    return value.squeeze(0) if kind == "ffn_gate_inp_shexp.weight" else value


def experts_of(model: Any) -> dict[str, np.ndarray]:
    """Tensors of experts by GGUF's names: (experts, outputs, inputs), and biases."""
    found: dict[str, Tensor] = {}
    for path, part in model.named_modules():
        layer = re.search(r"layers\.(\d+)\.", path)
        if layer is None or not hasattr(part, "has_gate"):
            continue
        transposed = part.is_transposed
        concatenated = part.is_concatenated
        for name, value in part.named_parameters(recurse=False):
            kind = name.removesuffix("_bias")
            end = "bias" if name.endswith("_bias") else "weight"
            rows = (
                value.detach().float().transpose(1, 2)
                if transposed and end == "weight"
                else value.detach().float()
            )
            each = {"down": rows}
            if kind == "gate_up_proj":
                halves = rows.chunk(2, dim=1) if concatenated else (rows[:, ::2], rows[:, 1::2])
                each = dict(zip(("gate", "up"), halves, strict=True))
            found |= {f"blk.{layer[1]}.ffn_{one}_exps.{end}": own for one, own in each.items()}
    return {name: value.contiguous().numpy() for name, value in found.items()}


def _arranged(name: str, value: Tensor, architecture: str, config: Any) -> Tensor:
    if architecture in ("lfm2", "lfm2moe", "mamba") and "conv" in name and value.ndim == 3:
        return value.squeeze(1)
    if architecture == "mamba" and name.endswith("ssm_a"):
        return -torch.exp(value)
    if architecture == "bloom" and "attn_qkv" in name:
        return (
            value.view(config.n_head, 3, -1, *value.shape[1:]).transpose(0, 1).reshape(value.shape)
        )
    if architecture == "qwen3next" and "ssm_" in name:
        return (
            value.squeeze(1)
            if "conv1d" in name
            else -torch.exp(value)
            if name.endswith("ssm_a")
            else value
        )
    if architecture == "qwen3next":
        return (
            value + 1
            if name.endswith("norm.weight")
            else value.squeeze(0)
            if "inp_shexp" in name
            else value
        )
    if architecture.startswith("qwen35"):
        return _of_delta_net(name, value, config)
    if architecture in PERMUTED and (".attn_q." in name or ".attn_k." in name):
        heads = config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads
        return value.view(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
    if architecture in RAISED and name.endswith("norm.weight"):
        return value + 1
    if "ffn_gate_inp_shexp" in name:
        return value.squeeze(0)
    if architecture == "gpt2" and any(
        part in name
        for part in ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    ):
        return value.t()
    return value


def rounded(weight: Tensor, kind: Kind) -> Tensor:
    """A matrix as this format keeps it, fp32."""
    return torch.from_numpy(gguf.dequantize(gguf.quantize(weight.float().numpy(), kind), kind))
