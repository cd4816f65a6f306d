"""How the tensors of a GGUF file differ from transformers', by architecture: transformers' own table, and what it lacks.

A processor has transformers' interface (`TensorProcessor`): `process` turns stored values into a parameter's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from outrider.lazy import transformers
from outrider.models.gguf.experts import SAME
from outrider.models.gguf.header import TensorInfo

LIKE = {  # architectures whose tensors differ as those of another one do, which transformers knows
    **dict.fromkeys(("arcee", "granite", "mistral3", "smollm3"), "llama"), "gemma": "gemma2", "lfm2moe": "lfm2",
    "qwen3vlmoe": "qwen3moe",
}  # fmt: skip

NAMED_LIKE = {"deepseek32": "glm-dsa", "hy_v3": "glm4moe"}  # gguf has no table of these names; one that has the same
GATE_UP = "ffn_gate_up_shexp.weight"  # files have its halves
OTHER_NAMES = {  # ends of parameters' names in a layer, and the tensors of files that gguf's table has under another name
    ".linear_attn.dt_bias": "ssm_dt.bias", ".feed_forward.expert_bias": "exp_probs_b.bias",
    ".mlp.e_score_correction_bias": "exp_probs_b",
    ".mlp.gate.e_score_correction_bias": "exp_probs_b.bias", ".mlp.gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
    **{f".self_attn.{part}_proj.{end}": f"attn_{part}.{end}" for part in "qkv" for end in ("weight", "bias")},  # Ling's
    **{f".mixer.{ours}": theirs for ours, theirs in {  # Nemotron-H's
        "in_proj.weight": "ssm_in.weight", "conv1d.weight": "ssm_conv1d.weight", "conv1d.bias": "ssm_conv1d.bias",
        "dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d", "norm.weight": "ssm_norm.weight",
        "out_proj.weight": "ssm_out.weight", "q_proj.weight": "attn_q.weight", "k_proj.weight": "attn_k.weight",
        "v_proj.weight": "attn_v.weight", "o_proj.weight": "attn_output.weight", "up_proj.weight": "ffn_up.weight",
        "down_proj.weight": "ffn_down.weight", "gate.weight": "ffn_gate_inp.weight",
        "gate.e_score_correction_bias": "exp_probs_b.bias", "shared_experts.up_proj.weight": "ffn_up_shexp.weight",
        "shared_experts.down_proj.weight": "ffn_down_shexp.weight",
    }.items()},
    ".mamba.dt_bias": "ssm_dt.bias", ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",  # Granite 4's
    ".shared_mlp.input_linear.weight": GATE_UP, ".shared_mlp.output_linear.weight": "ffn_down.weight",
    ".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale",
}  # fmt: skip
LAYER = re.compile(r"(?:^|\.)layers\.(?P<layer>\d+)(?P<end>\..*)")
OWN_KEYS = re.compile(r"blk\.(?P<layer>\d+)\.attn_(k|v|k_norm|v_norm)\.")


class Processed(NamedTuple):
    """What transformers calls a GGUFTensor."""

    weights: np.ndarray
    name: str
    metadata: dict[str, Any]


def processor_of(architecture: str, config: dict[str, Any]) -> Any:
    """The processor of an architecture, for a model of this config."""
    if architecture in ("qwen35", "qwen35moe", "qwen3next"):
        sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        keys, values, *dims = (config[name] for name in sizes)
        return DeltaNetProcessor(values if architecture == "qwen3next" else keys, values, *dims)  # its value heads lie in order
    if architecture in ("nemotron_h", "nemotron_h_moe", "granitehybrid"):
        return Mamba2Processor()
    if architecture in ("ernie4_5-moe", "bailingmoe"):
        return RouterProcessor()
    if architecture in ("gemma3n", "gemma4"):
        return SharedKeysProcessor(config["num_hidden_layers"] - config["num_kv_shared_layers"])
    known = transformers.modeling_gguf_pytorch_utils
    kind = known.TENSOR_PROCESSORS.get(LIKE.get(architecture, architecture), known.TensorProcessor)
    return kind(config=config)


def other_paths(parameters: Iterable[str]) -> dict[str, str]:
    """The parameters of `OTHER_NAMES`, by their names in the file."""
    found = ((LAYER.search(path), path) for path in parameters)
    known = ((one["layer"], OTHER_NAMES.get(one["end"]), path) for one, path in found if one is not None)
    own = {f"blk.{layer}.{stored}": path for layer, stored, path in known if stored is not None}
    return own | {f"{name}.bias": path for name, path in own.items() if name.endswith(".exp_probs_b")}  # some files say so


def order_of(tensor: TensorInfo, processor: Any, *, is_transposed: bool, of_inputs: bool = False) -> np.ndarray | None:
    """Which stored row each output is, or which stored column each input; None where the architecture's rearrangement does more
    than reorder these."""
    outputs, inputs = tensor.shape
    along = 1 if of_inputs else 0
    numbers = np.broadcast_to(np.expand_dims(np.arange(tensor.shape[along], dtype=np.int32), 1 - along), (outputs, inputs))
    try:
        result = processor.process(
            weights=numbers, name=tensor.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        )
    except (TypeError, ValueError, KeyError):
        return None
    found = result.weights
    if result.name != tensor.name or found.ndim != 2:
        return None
    found = found.T if is_transposed else found
    if found is numbers:
        return SAME
    order = np.ascontiguousarray(found[0] if of_inputs else found[:, 0])
    known = np.arange(len(order))
    if (
        found.shape != numbers.shape
        or not (found == np.expand_dims(order, 1 - along)).all()
        or not np.array_equal(np.sort(order), known)
    ):
        return None
    return SAME if np.array_equal(order, known) else order.astype(np.int64)


def qkvz_order(config: Any) -> np.ndarray:
    """Rows of queries, keys, values and gates, stored for all heads, in transformers' order: those of a key head together."""
    heads, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [each * config.linear_value_head_dim] * 2
    starts = np.cumsum([0, *(heads * size for size in sizes[:-1])])
    parts = [start + np.arange(heads * size).reshape(heads, size) for start, size in zip(starts, sizes, strict=True)]
    return np.concatenate(parts, axis=1).reshape(-1)


def joined_latents(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """DeepSeek's matrix that makes keys and values of a latent: files have (heads, latent, key) and (heads, value, latent)."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


@dataclass(frozen=True)
class SharedKeysProcessor:
    """Gemma 3n's and 4's: their last layers reuse the keys of others."""

    num_own: int  # layers with keys of their own

    def preprocess_name(self, name: str) -> str:
        return name

    def perform_fallback_tensor_mapping(self, paths: dict[str, str], suffix: str, owner: str, name: str) -> None:
        """Nothing that `other_paths` has not."""

    def leaves_out(self, name: str) -> bool:
        """Whether a tensor is of keys or values that its layer does not use; published files have them."""
        found = OWN_KEYS.match(name)
        return found is not None and int(found["layer"]) >= self.num_own

    def process(self, weights: np.ndarray, name: str, **_: Any) -> Processed:
        return Processed(weights, name, {})


class RouterProcessor:
    """ERNIE's: what corrects the choice of experts is a row of its own."""

    def preprocess_name(self, name: str) -> str:
        return name

    def perform_fallback_tensor_mapping(self, paths: dict[str, str], suffix: str, owner: str, name: str) -> None:
        """Nothing that `other_paths` has not."""

    def process(self, weights: np.ndarray, name: str, **_: Any) -> Processed:
        return Processed(weights.reshape(1, -1) if ".exp_probs_b." in name else weights, name, {})


class Mamba2Processor:
    """Mamba 2's: numbers of heads are columns, norms have a row for each group, decays are -exp of their logarithm.

    Queries and keys of layers without positions may lie in Llama's order, which leaves their products as they are.
    """

    def preprocess_name(self, name: str) -> str:
        return name

    def perform_fallback_tensor_mapping(self, paths: dict[str, str], suffix: str, owner: str, name: str) -> None:
        """Nothing that `other_paths` has not."""

    def process(self, weights: np.ndarray, name: str, **_: Any) -> Processed:
        kind = name.split(".", 2)[-1]
        if kind == "ssm_conv1d.weight":
            weights = weights[:, None]
        elif kind in ("ssm_a", "ssm_d", "ssm_norm.weight"):
            weights = (np.log(-weights) if kind == "ssm_a" else weights).reshape(-1)
        return Processed(weights, name, {})


@dataclass(frozen=True)
class DeltaNetProcessor:
    """Qwen3.5's: value heads lie in turn, one of each key head; norms are raised by one, decays are -exp of their logarithm."""

    moves_inputs: ClassVar = True  # of a matrix: those of `ssm_out`
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    def preprocess_name(self, name: str) -> str:
        return name

    def perform_fallback_tensor_mapping(self, paths: dict[str, str], suffix: str, owner: str, name: str) -> None:
        """Nothing that `other_paths` has not."""

    def process(self, weights: np.ndarray, name: str, **_: Any) -> Processed:
        kind = name.split(".", 2)[-1]
        queries_and_keys = 2 * self.key_heads * self.key_size
        if name.endswith("norm.weight") and kind != "ssm_norm.weight":
            weights = weights - 1
        elif kind in ("ssm_a", "ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
            weights = self._grouped(np.log(-weights) if kind == "ssm_a" else weights, 1)
        elif kind == "attn_gate.weight":
            weights = self._grouped(weights, self.value_size)
        elif kind == "ssm_conv1d.weight" and self.key_heads == self.value_heads:
            weights = weights[:, None]
        elif kind in ("attn_qkv.weight", "ssm_conv1d.weight"):
            values = self._grouped(weights[queries_and_keys:], self.value_size)
            weights = np.concatenate([weights[:queries_and_keys], values])
            weights = weights[:, None] if kind == "ssm_conv1d.weight" else weights
        elif kind == "ssm_out.weight":
            weights = self._grouped(weights.T, self.value_size).T
        elif kind == "ffn_gate_inp_shexp.weight":
            weights = weights.reshape(1, -1)
        return Processed(weights, name, {})

    def _grouped(self, weights: np.ndarray, size: int) -> np.ndarray:
        """Rows of value heads, so many of each, brought beside the others of their key head."""
        heads = weights.reshape(self.value_heads // self.key_heads, self.key_heads, size, *weights.shape[1:])
        return heads.swapaxes(0, 1).reshape(weights.shape)
