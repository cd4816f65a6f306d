"""How transformers loads a checkpoint with quantised weights: whether they are widened to plain
numbers, or stay."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from outrider.errors import CheckpointError
from outrider.lazy import transformers
from outrider.models.quantised.scheme import KNOWN, scheme_of

COMPRESSED = "compressed-tensors"
# endings of what only quantised checkpoints have
SCALES_OF_WEIGHTS = (".weight_scale", "_scale_inv", ".scales")


def quantisation_of(config: Any) -> str | None:
    """The method a config names ("fp8", "gptq", "bitsandbytes"); None for plain weights."""
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return None
    method = (
        quantisation.get("quant_method")
        if isinstance(quantisation, dict)
        else quantisation.quant_method
    )
    return str(getattr(method, "value", method) or "unknown")


def name_quantisation(config: Any) -> None:
    """Name the method of a model's text where the whole's is looked for: Kimi K2.5's config has it
    in `text_config` alone."""
    text = config.get_text_config()
    quantisation = getattr(text, "quantization_config", None)
    if text is not config and quantisation is not None:
        if getattr(config, "quantization_config", None) is None:
            config.quantization_config = quantisation
        del text.quantization_config


def how_quantised(config: Any) -> str:
    """Words for an error: the method, and what is read without a library of another's; empty for
    plain weights."""
    method = quantisation_of(config)
    return (
        ""
        if method is None
        else f", which are quantised by {method} (what needs no further library: {KNOWN})"
    )


def refuse_unused_scales(name: str, config: Any, unused: Iterable[str]) -> None:
    """Raise CheckpointError for quantised weights whose scales were left out: their codes would be
    taken for weights.

    `unused`: tensors that the module has no place for.
    """
    scales = sorted(tensor for tensor in unused if tensor.endswith(SCALES_OF_WEIGHTS))
    if scales and (method := quantisation_of(config)) is not None:
        raise CheckpointError(
            f"'{name}': transformers leaves out {len(scales)} scales of its weights ({method}), "
            f"first '{scales[0]}', and would "
            f"make another model of it. Use a checkpoint in bf16. What can be read: {KNOWN}."
        )
    if scales:
        raise CheckpointError(
            f"'{name}' has quantised weights (scales such as '{scales[0]}'), and its config.json "
            "does not say how: it has no "
            f"quantization_config. Use a checkpoint that has one. What can be read: {KNOWN}."
        )


def widen_on_cpu(config: Any, device: torch.device) -> None:
    """Ask for plain weights where a CPU gains nothing from quantised ones: compressed-tensors would
    widen them at the first pass anyway, and round every layer's input in each pass."""
    quantisation = getattr(config, "quantization_config", None)
    if (
        device.type == "cpu"
        and quantisation_of(config) == COMPRESSED
        and isinstance(quantisation, dict)
    ):
        quantisation["dequantize"] = True


def is_widened(config: Any, device: torch.device) -> bool:
    """Whether the quantised weights take as much memory as plain ones once loaded, as transformers'
    own quantizer decides here. False where it cannot say: loading then names what is missing."""
    method = quantisation_of(config)
    quantisation = getattr(config, "quantization_config", None)
    if (scheme := scheme_of(config, device)) is not None:
        return scheme.is_widened
    if method is None or (method == COMPRESSED and device.type == "cpu"):
        return method is not None
    try:
        quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
            copy.deepcopy(quantisation), pre_quantized=True
        )
        quantizer.validate_environment(device_map=None)
    except Exception:  # noqa: BLE001  an absent library or device; loading says which
        return False
    if method == COMPRESSED:  # widened at the first pass, but for layers on fp8 kernels
        return not quantizer.use_fp8_kernel
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def bits_per_weight(config: Any) -> int:
    """Bits of a weight in packed tensors, by the first group of layers that the config names; 4
    where it names none."""
    quantisation = getattr(config, "quantization_config", None)
    groups = (quantisation.get("config_groups") if isinstance(quantisation, dict) else None) or {}
    return next(
        (group["weights"]["num_bits"] for group in groups.values() if group.get("weights")), 4
    )


def to_one_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Give weights that were widened to bfloat16 the dtype of the rest, in place."""
    for parameter in module.parameters():
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.to(dtype)
