"""Undo the rearrangements of llama.cpp's converter.

A function for a row of `architectures.py` is given the stored values of one tensor, its name, and
the model's config, and returns the values of transformers' parameter. What it does to a matrix is
found out on numbers of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.models.gguf.experts import SAME
from outrider.models.gguf.header import TensorInfo

Arrange = Callable[[np.ndarray, str, Mapping[str, Any]], np.ndarray]
GATE_UP = "ffn_gate_up_shexp.weight"  # files have its halves
LAYER = re.compile(r"(?:^|\.)layers\.(?P<layer>\d+)(?P<end>\..*)")
OWN_KEYS = re.compile(r"blk\.(?P<layer>\d+)\.attn_(k|v|k_norm|v_norm)\.")


@dataclass(frozen=True)
class Halves:
    """Two tensors that transformers has as one."""

    first: str  # pattern of the first one's name
    second: str  # what to write for it: the second one's
    whole: str  # that of both
    # which of the rows each output is, by the model's config
    order: Callable[[Any], np.ndarray] | None = None


def as_stored(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """The values as they are."""
    return weights


def rotary_rows(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Llama's: rows of queries and keys that are rotated together lie in turn."""
    if ".attn_q." in name:
        return _halves_of_heads(weights, config["num_attention_heads"])
    return (
        _halves_of_heads(weights, config["num_key_value_heads"]) if ".attn_k." in name else weights
    )


def _halves_of_heads(weights: np.ndarray, heads: int) -> np.ndarray:
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(2, 1).reshape(weights.shape)


def raised_norms(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Gemma's: norms are raised by one."""
    return weights - 1 if "norm.weight" in name else weights


def transposed(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """GPT-2's: transformers has (inputs, outputs)."""
    matrices = ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight")
    return weights.T if _kind(name) in matrices else weights


def heads_together(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """BLOOM's: transformers has query, key and value of a head together."""
    if "attn_qkv" not in name:
        return weights
    parts = weights.reshape(3, config["n_head"], -1, *weights.shape[1:])
    return parts.swapaxes(0, 1).reshape(weights.shape)


def short_convolution(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """LFM2's: a convolution lacks the dimension of one channel."""
    return weights[:, None] if _kind(name) == "shortconv.conv.weight" else weights


def shared_gate(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Qwen2's with experts: the gate of the shared one is a matrix of one row."""
    return weights.reshape(1, -1) if _kind(name) == "ffn_gate_inp_shexp.weight" else weights


def correction_row(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """ERNIE's: what corrects the choice of experts is a row of its own."""
    return weights.reshape(1, -1) if ".exp_probs_b." in name else weights


def state_space(weights: np.ndarray, name: str, config: Mapping[str, Any]) -> np.ndarray:
    """Mamba's and Mamba 2's: decays are -exp of their logarithm; Mamba 2 has numbers of heads as
    columns, norms by groups.

    Queries and keys of layers without positions may lie in Llama's order, which leaves their
    products as they are.
    """
    kind = _kind(name)
    if kind == "ssm_conv1d.weight":
        return weights[:, None]
    if kind == "ssm_norm.weight":
        return weights.reshape(-1)
    if kind in ("ssm_a", "ssm_d"):
        weights = np.log(-weights) if kind == "ssm_a" else weights
        return weights.reshape(-1) if weights.shape[-1] == 1 else weights
    return weights


def delta_net(
    weights: np.ndarray, name: str, config: Mapping[str, Any], *, in_turn: bool = True
) -> np.ndarray:
    """Qwen3.5's: norms are raised by one, decays are -exp of their logarithm. `in_turn`: value
    heads lie one of each key head."""
    values = config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"]
    queries_and_keys = 2 * keys * config["linear_key_head_dim"]

    def grouped(rows: np.ndarray, count: int) -> np.ndarray:
        """Rows of value heads, `count` of each, brought together with the others of their key head."""
        if not in_turn:
            return rows
        heads = rows.reshape(values // keys, keys, count, *rows.shape[1:])
        return heads.swapaxes(0, 1).reshape(rows.shape)

    kind = _kind(name)
    if name.endswith("norm.weight") and kind != "ssm_norm.weight":
        return weights - 1
    if kind in ("ssm_a", "ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
        return grouped(np.log(-weights) if kind == "ssm_a" else weights, 1)
    if kind == "attn_gate.weight":
        return grouped(weights, size)
    if kind in ("attn_qkv.weight", "ssm_conv1d.weight"):
        if in_turn and keys != values:
            weights = np.concatenate(
                [weights[:queries_and_keys], grouped(weights[queries_and_keys:], size)]
            )
        return weights[:, None] if kind == "ssm_conv1d.weight" else weights
    if kind == "ssm_out.weight":
        return grouped(weights.T, size).T
    return shared_gate(weights, name, config)


def _kind(name: str) -> str:
    """A tensor's name in its layer."""
    return name.split(".", 2)[-1]


def other_paths(parameters: Iterable[str], names: Mapping[str, str]) -> dict[str, str]:
    """The parameters whose ends are among `names`, by the names of their tensors."""
    matches = ((LAYER.search(path), path) for path in parameters)
    known = (
        (match["layer"], names.get(match["end"]), path)
        for match, path in matches
        if match is not None
    )
    return {f"blk.{layer}.{tensor}": path for layer, tensor, path in known if tensor is not None}


def is_unused(name: str, config: Any) -> bool:
    """Whether a tensor is of keys or values that its layer takes from another one; published files
    have them."""
    shared = getattr(config, "num_kv_shared_layers", 0)
    match = OWN_KEYS.match(name)
    return (
        bool(shared)
        and match is not None
        and int(match["layer"]) >= config.num_hidden_layers - shared
    )


def order_of(
    tensor: TensorInfo,
    arrange: Callable[[np.ndarray, str], np.ndarray],
    *,
    is_transposed: bool,
    of_inputs: bool = False,
) -> np.ndarray | None:
    """Which stored row each output is, or which stored column each input; None where the
    architecture's rearrangement does more than reorder these."""
    outputs, inputs = tensor.shape
    along = 1 if of_inputs else 0
    numbers = np.broadcast_to(
        np.expand_dims(np.arange(tensor.shape[along], dtype=np.int32), 1 - along), (outputs, inputs)
    )
    try:
        result = arrange(numbers, tensor.name)
    except (TypeError, ValueError, KeyError):
        return None
    if result.ndim != 2:
        return None
    result = result.T if is_transposed else result
    if result is numbers:
        return SAME
    order = np.ascontiguousarray(result[0] if of_inputs else result[:, 0])
    known = np.arange(len(order))
    if (
        result.shape != numbers.shape
        or not (result == np.expand_dims(order, 1 - along)).all()
        or not np.array_equal(np.sort(order), known)
    ):
        return None
    return SAME if np.array_equal(order, known) else order.astype(np.int64)


def qkvz_order(config: Any) -> np.ndarray:
    """Rows of queries, keys, values and gates, stored for all heads, in transformers' order: those
    of a key head together."""
    heads = config.linear_num_key_heads
    each = config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [each * config.linear_value_head_dim] * 2
    starts = np.cumsum([0, *(heads * size for size in sizes[:-1])])
    parts = [
        start + np.arange(heads * size).reshape(heads, size)
        for start, size in zip(starts, sizes, strict=True)
    ]
    return np.concatenate(parts, axis=1).reshape(-1)


def joined_latents(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """DeepSeek's matrix that makes keys and values of a latent: files have (heads, latent, key) and
    (heads, value, latent)."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])
