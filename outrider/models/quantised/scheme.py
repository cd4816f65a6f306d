"""Which scheme a config says its weights are quantised by, and whether it is one that we read and
multiply as it is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.errors import CapabilityError
from outrider.lazy import transformers
from outrider.models.quantised.floats import SmallFloats, fp8, mxfp4, nvfp4
from outrider.models.quantised.formats import (
    Codes,
    awq,
    bits_in_words,
    bits_of,
    gptq,
    integers,
    packed,
    wanted,
)

BITS = (4, 8)
MXFP4 = "mxfp4"
# tensors of compressed-tensors, and its formats
WORDS = "weight_packed"
SCALE = "weight_scale"
ZERO = "weight_zero_point"
PACKED = "pack-quantized"
INTEGERS = "int-quantized"
FLOATS = "float-quantized"
# what configs call them
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
AUTO_ROUND = ("auto-round", "intel/auto-round", "inc")  # what its versions, and vLLM, call it
KNOWN = (
    "GPTQ in 4 and 8 bits, AutoRound in 4 and 8, AWQ (gemm) in 4, compressed-tensors pack-quantized and int-quantized in 4 and "
    "8, fp8, mxfp4, NVFP4 (widened), and groups of these"
)


@dataclass(frozen=True)
class Scheme:
    """How one checkpoint's linear layers are stored. `main`: the tensor of a layer that holds its
    codes."""

    method: str
    main: str
    beside: tuple[str, ...]
    bits: int
    zeros_are_less: bool = False
    is_mixed: bool = False  # layers may have their own bits
    is_float: bool = False  # fp8
    is_nvfp4: bool = False  # of which loading makes plain weights
    is_mxfp4: bool = False  # of single layers
    is_awq: bool = False  # the order of what its words hold
    # outputs and inputs that share a scale, of floats in blocks
    block: tuple[int, int] | None = None
    others: tuple[Scheme, ...] = ()  # of layers that are stored otherwise

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The stored type of codes, by safetensors' names."""
        if self.is_float:
            return ("F8_E4M3",)
        if self.main == WORDS:
            return ("U8",) if self.is_nvfp4 or self.is_mxfp4 else ("I32",)
        return ("I8", "U8", "I32")

    @property
    def is_widened(self) -> bool:
        """Whether loading makes plain weights of some layers because of their format."""
        return any(each.is_nvfp4 for each in (self, *self.others))

    @property
    def note(self) -> str:
        """How its weights are kept."""
        if self.others:
            return f"the weights of each layer in the format that it is stored in ({self.method})"
        if self.is_nvfp4:
            return "no weights in 4 bits: groups of 16 that share a scale (NVFP4) fit no layout of ours"
        if self.method == MXFP4:
            return "its experts in 4 bits, as mxfp4 stores them"
        mixed = ", or those of the layer" if self.is_mixed else ""
        return f"its weights in {self.bits} bits{mixed}, as {self.method} stores them"

    @property
    def rounded(self) -> str:
        """The values besides weights that the native kernels round; empty where no kernel of ours
        takes part."""
        if self.is_nvfp4:
            return ""
        if self.is_float and not self.others:
            return "passes are in bfloat16"
        which = (
            ", but for layers in fp8"
            if self.others
            else " for these"
            if self.method == MXFP4
            else ""
        )
        return f"passes are in bfloat16, and activations rounded to 8 bits{which}"

    def read(self, parts: Mapping[str, Tensor]) -> Codes | SmallFloats:
        """A layer's tensors, by their names within it. Raises MalformedError."""
        if self.is_float:
            return fp8(
                parts,
                next((name for name in self.beside if name in parts), self.beside[0]),
                self.block,
            )
        if self.is_nvfp4:
            return nvfp4(parts, self.main)
        if self.is_mxfp4:
            return mxfp4(wanted(parts, WORDS).unflatten(-1, (-1, 16)), wanted(parts, SCALE))
        if self.is_awq:
            return awq(parts, self.bits)
        if self.main == "qweight":
            return gptq(
                parts,
                bits_of(parts) if self.is_mixed else self.bits,
                zeros_are_less=self.zeros_are_less,
            )
        if self.main == WORDS:
            return packed(parts, bits_in_words(parts) if self.is_mixed else self.bits)
        return integers(parts)


COMPRESSED = {  # by format; those that stay as they are stored first
    PACKED: Scheme("compressed-tensors", WORDS, (SCALE, ZERO, "weight_shape", "weight_g_idx"), 4),
    INTEGERS: Scheme("compressed-tensors", "weight", (SCALE, ZERO), 8),
    FLOATS: Scheme("compressed-tensors", "weight", (SCALE,), 8, is_float=True),
    "mxfp4-pack-quantized": Scheme("compressed-tensors", WORDS, (SCALE,), 4, is_mxfp4=True),
    "nvfp4-pack-quantized": Scheme(
        "compressed-tensors", WORDS, (SCALE, "weight_global_scale"), 4, is_nvfp4=True
    ),
}


def scheme_of(config: Any, device: torch.device) -> Scheme | None:
    """None for plain weights and for schemes that transformers loads: on a GPU all but GPTQ, AWQ
    and AutoRound.

    Raises CapabilityError for a kind of GPTQ or AWQ that we lack, which transformers would load
    with libraries for GPUs, and for methods that it does not know, whose codes it would take for
    weights.
    """
    quantisation = getattr(config, "quantization_config", None) or getattr(
        config, "quantization", None
    )
    if not quantisation:
        return None
    settings = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    # whose first say none
    method = settings.get(
        "quant_method", "mlx" if hasattr(config, "quantization") else "bitsandbytes"
    )
    method = str(getattr(method, "value", method))
    if method in AUTO_ROUND:
        return _auto_round(settings)
    if method == "modelopt" and settings.get("quant_algo") == "FP8" and device.type == "cpu":
        method = "fp8"  # the same tensors
    if method.startswith("modelopt") and settings.get("quant_algo") == "NVFP4":
        return Scheme("modelopt", "weight", ("weight_scale", "weight_scale_2"), 4, is_nvfp4=True)
    if not any(
        known.startswith(method)
        for known in transformers.quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    ):
        raise CapabilityError(f"weights quantised by {method} cannot be read. What can: {KNOWN}.")
    if method in ("gptq", "awq"):
        return _gptq_or_awq(settings, method)
    if device.type != "cpu" or settings.get("dequantize"):
        return None
    if method == "compressed-tensors":
        return _compressed(settings)
    if method == "fp8":
        scales = ("weight_scale_inv", "weight_scale")
        block = _pair(settings.get("weight_block_size"))
        return Scheme(method, "weight", scales, 8, is_float=True, block=block)
    return Scheme(method, "", (), 4) if method == MXFP4 else None


def _pair(sizes: Sequence[int] | None) -> tuple[int, int] | None:
    return (sizes[0], sizes[1]) if sizes else None


def _gptq_or_awq(settings: Mapping[str, Any], method: str) -> Scheme:
    bits = settings.get("bits", settings.get("w_bit"))
    layout = settings.get("checkpoint_format", "gptq")
    if method == "awq":
        layout = settings.get("version", settings.get("checkpoint_format", "gemm"))
    layout = str(getattr(layout, "value", layout)).lower()
    if layout not in (("gptq", "gptq_v2") if method == "gptq" else ("gemm",)):
        raise CapabilityError(
            f"weights quantised by {method}: the layout '{layout}' cannot be read. What can: "
            f"{KNOWN}."
        )
    is_mixed = bool(settings.get("dynamic"))  # GPTQModel's settings of single layers
    return _in_words(
        method, bits, is_awq=method == "awq", zeros_are_less=layout == "gptq", is_mixed=is_mixed
    )


def _auto_round(settings: Mapping[str, Any]) -> Scheme:
    """AutoRound packs as GPTQ does, or as AWQ. `extra_config` gives layers bits of their own, or
    leaves them plain."""
    named = settings.get("packing_format") or settings.get("backend") or "auto"
    packing = "auto_round:auto_gptq" if named == "auto" else str(named)
    kind = settings.get("data_type", "int")
    rounded = settings.get("act_bits") or 16
    if (
        not packing.replace("-", "_").startswith(("auto_round", "autoround", "intel/auto_round"))
        or kind != "int"
        or ("llm_compressor" in packing or rounded < 16)
    ):
        raise CapabilityError(
            f"weights quantised by auto-round: {kind} in the packing '{packing}' with activations "
            f"in {rounded} bits cannot be "
            "read. Export the model as auto_round:auto_gptq, or use another checkpoint. What can "
            f"be read: {KNOWN}."
        )
    return _in_words(
        "auto-round",
        settings.get("bits"),
        is_awq="awq" in packing,
        is_mixed=bool(settings.get("extra_config")),
        zeros_are_less="gptq" in packing and "gptqmodel" not in packing,
    )


def _in_words(
    method: str, bits: Any, *, is_awq: bool, zeros_are_less: bool, is_mixed: bool
) -> Scheme:
    """Codes in words of 32 bits, with zeros and scales next to them."""
    if bits not in ((4,) if is_awq else BITS):
        raise CapabilityError(
            f"weights quantised by {method}: {bits} bits cannot be read. What can: {KNOWN}."
        )
    beside = ("qzeros", "scales", *(() if is_awq else ("g_idx",)))
    return Scheme(
        method,
        "qweight",
        beside,
        bits,
        zeros_are_less=zeros_are_less,
        is_mixed=is_mixed,
        is_awq=is_awq,
    )


def _compressed(settings: Mapping[str, Any]) -> Scheme | None:
    """Its groups of layers may each have bits and a format of their own. None where one of them is
    not read here."""
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        return None
    # activations are rotated before they are multiplied
    if (settings.get("transform_config") or {}).get("config_groups"):
        return None
    groups = [
        group for group in (settings.get("config_groups") or {}).values() if group.get("weights")
    ]
    kinds = [
        _kind(group.get("format") or settings.get("format"), group["weights"]) for group in groups
    ]
    blocks = {
        block
        for group in groups
        if (block := _pair(group["weights"].get("block_structure"))) is not None
    }
    if not kinds or None in kinds or len(blocks) > 1:
        return None
    bits = {
        each["num_bits"]
        for group, kind in zip(groups, kinds, strict=True)
        if kind == PACKED and (each := group["weights"])
    }
    schemes = [
        replace(scheme, bits=min(bits), is_mixed=len(bits) > 1)
        if kind == PACKED
        else replace(scheme, block=next(iter(blocks), None))
        if kind == FLOATS
        else scheme
        for kind, scheme in COMPRESSED.items()
        if kind in kinds
    ]
    return replace(schemes[0], others=tuple(schemes[1:]))


def _kind(layout: str | None, weights: Mapping[str, Any]) -> str | None:
    """The format of one group, where we read it."""
    bits = {PACKED: BITS, INTEGERS: (8,), FLOATS: (8,)}.get(layout or "", (4,))
    fits = (
        weights.get("type", "int") == ("int" if layout in (PACKED, INTEGERS) else "float")
        and weights.get("num_bits") in bits
    )
    return layout if layout in COMPRESSED and fits else None


def has_experts(config: Any) -> bool:
    """Whether a config is of a mixture of experts."""
    return any((getattr(config.get_text_config(), name, None) or 1) > 1 for name in EXPERTS)
