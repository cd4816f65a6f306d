"""DSpark heads of DeepSeek V4 on disk: the tensors under `mtp.` of the target's own checkpoint.

    mtp.0.main_proj, mtp.0.main_norm                            what makes the context of the target's states
    mtp.K.{attn, ffn, attn_norm, ffn_norm, hc_attn_*, hc_ffn_*} layer K
    mtp.LAST.{norm, hc_head_*, markov_head, confidence_head}    the end

transformers drops them when it loads the target, so they are read here, and nothing else of the checkpoint is. Weights in fp8 are
widened by their scales; without scales, or in other numbers, a head is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.errors import CapabilityError, CheckpointError
from outrider.lazy import transformers
from outrider.models.heads.block_config import BlockConfig
from outrider.models.heads.block_names import dspark_tensors
from outrider.models.heads.block_v4 import V4BlockHead
from outrider.models.heads.fp8 import FLOATS, FP8, SCALES, widened
from outrider.models.heads.tensors import read_config

FAMILY = "deepseek_v4"
NAMES = (  # patterns of checkpoints and what the head's modules call them; {last}: the last layer
    (r"mtp\.0\.main_proj\.", "fc."), (r"mtp\.0\.main_norm\.", "hidden_norm."), (r"mtp\.{last}\.norm\.", "norm."),
    (r"mtp\.{last}\.(markov_head|confidence_head)\.", r"\1."), (r"mtp\.{last}\.hc_head_(\w+)$", r"hc_head.hc_\1"),
    (r"mtp\.(\d+)\.", r"layers.\1."), (r"\.hc_(attn|ffn)_(\w+)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."), (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.attn_sink$", ".self_attn.sinks"), (r"\.attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.attn\.wkv\.", ".self_attn.kv_proj."), (r"\.attn\.w(q|o)_(a|b)\.", r".self_attn.\1_\2_proj."),
    (r"\.attn\.", ".self_attn."), (r"\.ffn\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."), (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."), (r"\.ffn\.", ".mlp."),
)  # fmt: skip
_EXPERT = re.compile(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.(w[123])\.weight")


def load_v4(folder: Path, target_hidden: int, vocab_size: int, num_layers: int) -> V4BlockHead:
    """The head in a checkpoint for a target with these sizes. Raises CheckpointError for lacking, strange or damaged tensors and
    another target, CapabilityError for another family and weights in numbers that are not read."""
    head, read = _fitted(folder, target_hidden, vocab_size, num_layers, "cpu")
    head.load_state_dict({name: read(name, tensor.shape) for name, tensor in head.state_dict().items()})
    return head.eval().requires_grad_(False)


def outline_v4(folder: Path, target_hidden: int, vocab_size: int, num_layers: int) -> V4BlockHead:
    """The head without its weights, on torch's meta device. Raises as `load_v4`."""
    return _fitted(folder, target_hidden, vocab_size, num_layers, "meta")[0]


def _fitted(folder: Path, target_hidden: int, vocab_size: int, num_layers: int, device: str) -> tuple[V4BlockHead, _TensorReader]:
    """A fresh head, and what reads its weights."""
    what, stored = f"head '{folder}'", read_config(folder)
    if (kind := (stored.get("text_config") or stored).get("model_type")) != FAMILY:
        raise CapabilityError(f"{what} is DSpark of a '{kind}' under mtp.*; only that of {FAMILY} is known")
    text = transformers.AutoConfig.from_pretrained(str(folder)).get_text_config()
    sizes, asked = (text.hidden_size, text.vocab_size, text.num_hidden_layers), (target_hidden, vocab_size, num_layers)
    if sizes != asked:
        raise CheckpointError(
            f"{what} is for a target with hidden_size, vocab_size and num_hidden_layers {sizes}; this one has {asked}"
        )
    values: dict[str, Any] = {}
    for name in ("block_size", "noise_token_id", "target_layer_ids"):
        values[name] = (stored.get("text_config") or stored).get(f"dspark_{name}")
        if values[name] is None:
            raise CheckpointError(f"{what}: config.json does not say 'dspark_{name}', which its DSpark head needs")
    reader = _TensorReader(folder, what)
    config = BlockConfig(
        hidden_size=text.hidden_size, intermediate_size=text.intermediate_size, num_layers=reader.num_layers,
        num_heads=text.num_attention_heads, num_kv_heads=1, head_dim=text.head_dim, vocab_size=vocab_size,
        block_size=int(values["block_size"]), target_hidden_size=target_hidden,
        target_layers=tuple(int(layer) + 1 for layer in values["target_layer_ids"]), num_target_layers=num_layers,
        mask_token_id=int(values["noise_token_id"]), window=text.sliding_window, window_layers=tuple(range(reader.num_layers)),
        window_before_block=True, norm_eps=text.rms_norm_eps, max_positions=text.max_position_embeddings,
        markov_rank=reader.rank, confidence=reader.has("confidence_head.proj.weight"),
        confidence_bias=reader.has("confidence_head.proj.bias"), trained_for=str(folder),
    )  # fmt: skip
    if any(not 0 < layer <= num_layers for layer in config.target_layers) or not 0 <= config.mask_token_id < vocab_size:
        raise CheckpointError(
            f"{what}: dspark_target_layer_ids {values['target_layer_ids']} or dspark_noise_token_id {config.mask_token_id} name "
            f"what a target with {num_layers} layers and {vocab_size} tokens does not have"
        )
    text.num_hidden_layers = config.num_layers
    text.layer_types, text.mlp_layer_types = ["sliding_attention"] * config.num_layers, ["moe"] * config.num_layers
    with torch.device(device):
        head = V4BlockHead(config, text)
    reader.check(head.state_dict())
    return head, reader


class _TensorReader:
    """The tensors of a head by the names of its modules."""

    def __init__(self, folder: Path, what: str) -> None:
        self._what, self._tensors = what, dspark_tensors(folder)
        last = max(int(name.split(".")[1]) for name in self._tensors)
        self.num_layers = last + 1
        self._names: dict[str, str] = {}  # in the checkpoint, by ours
        for name in self._tensors:
            if not self._is_scale(name):
                self._names[_ours(name, last)] = name

    def has(self, name: str) -> bool:
        return name in self._names

    @property
    def rank(self) -> int:
        """The Markov head's; 0: there is none."""
        name = self._names.get("markov_head.markov_w1.weight")
        return 0 if name is None else int(self._tensors[name][1]["shape"][1])

    def check(self, wanted: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError for tensors that are missing or that nobody asks for, and for fp8 without scales."""
        needed = {part for name in wanted for part in self._parts(name)}
        if lacking := sorted(needed - self._names.keys()):
            raise CheckpointError(f"{self._what} lacks tensors of its DSpark head: {', '.join(lacking[:3])}")
        if strange := sorted(self._names.keys() - needed):
            raise CheckpointError(f"{self._what}: {self._names[strange[0]]} is no part of a DSpark head of {FAMILY}")
        for name in self._names.values():
            kind = self._tensors[name][1]["dtype"]
            if kind == FP8 and self._scale(name) is None:
                missing = name.removesuffix("weight") + "scale"
                raise CheckpointError(f"{self._what}: '{name}' is in fp8, but its scales '{missing}' are missing")
            if kind not in (*FLOATS, FP8):
                raise CapabilityError(f"{self._what}: '{name}' is in {kind}; heads in {', '.join(FLOATS)} and fp8 are read")

    def __call__(self, name: str, shape: torch.Size) -> Tensor:
        """Weights, which must have this shape. Raises CheckpointError."""
        parts = [self._tensor(self._names[part]) for part in self._parts(name)]
        if name.endswith("experts.gate_up_proj"):
            parts = [torch.cat(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        found = torch.stack(parts) if ".experts." in name else parts[0]
        if found.shape != shape:
            raise CheckpointError(f"{self._what}: tensor '{name}' has shape {list(found.shape)}, expected {list(shape)}")
        if not found.isfinite().all():
            raise CheckpointError(f"{self._what} is damaged: tensor '{name}' has NaN or infinite values. Fetch it again.")
        return found

    def _parts(self, name: str) -> list[str]:
        """The tensors that make one of ours: experts are stored one by one."""
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".experts"):
            return [name]
        count = len({int(match[2]) for own in self._names if (match := _EXPERT.fullmatch(own)) and match[1] == experts})
        which = ("w1", "w3") if part == "gate_up_proj" else ("w2",)
        return [f"{experts}.{expert}.{each}.weight" for expert in range(count) for each in which]

    def _tensor(self, name: str) -> Tensor:
        scale = self._scale(name)
        found = [self._read(each) for each in (name, scale) if each is not None]
        return found[0] if scale is None else widened(*found)

    def _read(self, name: str) -> Tensor:
        with safe_open(self._tensors[name][0], "pt") as file:
            return file.get_tensor(name)

    def _scale(self, name: str) -> str | None:
        stem = name.removesuffix("weight")
        return next((stem + each for each in (*SCALES, "scale") if stem != name and stem + each in self._tensors), None)

    def _is_scale(self, name: str) -> bool:
        stem, _, last = name.rpartition(".")
        return last in (*SCALES, "scale") and f"{stem}.weight" in self._tensors


def _ours(name: str, last: int) -> str:
    for pattern, own in NAMES:
        name = re.sub(pattern.replace("{last}", str(last)), own, name)
    return name
