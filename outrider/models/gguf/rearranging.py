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

LIKE = {  # architectures whose tensors differ as those of another one do, which transformers knows
    "gemma": "gemma2", "granite": "llama", "mistral3": "llama", "smollm3": "llama", "qwen3vlmoe": "qwen3moe",
}  # fmt: skip

OTHER_NAMES = {  # ends of parameters' names in a layer, and the tensors of files that gguf's table has under another name
    ".linear_attn.dt_bias": "ssm_dt.bias", ".mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
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
    if architecture in ("qwen35", "qwen35moe"):
        sizes = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
        return DeltaNetProcessor(*(config[name] for name in sizes))
    if architecture == "gemma4":
        return Gemma4Processor(config["num_hidden_layers"] - config["num_kv_shared_layers"])
    known = transformers.modeling_gguf_pytorch_utils
    kind = known.TENSOR_PROCESSORS.get(LIKE.get(architecture, architecture), known.TensorProcessor)
    return kind(config=config)


def other_paths(parameters: Iterable[str]) -> dict[str, str]:
    """The parameters of `OTHER_NAMES`, by their names in the file."""
    found = ((LAYER.search(path), path) for path in parameters)
    known = ((one["layer"], OTHER_NAMES.get(one["end"]), path) for one, path in found if one is not None)
    return {f"blk.{layer}.{stored}": path for layer, stored, path in known if stored is not None}


def joined_latents(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """DeepSeek's matrix that makes keys and values of a latent: files have (heads, latent, key) and (heads, value, latent)."""
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, values.shape[2])


@dataclass(frozen=True)
class Gemma4Processor:
    """Gemma 4's: its last layers reuse the keys of others."""

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
