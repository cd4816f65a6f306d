"""Weights stored as other tools store them, written down from their definitions, number by number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word the output 8 n + i stands


@dataclass(frozen=True)
class Integers:
    """What is stored: w[o, i] = scales[o, g] * (codes[o, i] - zeros[o, g])."""

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor  # of each input

    def weight(self) -> Tensor:
        """fp32, as the formats define it."""
        return self.scales.float()[:, self.groups] * (self.codes - self.zeros[:, self.groups])


def some(
    outputs: int,
    inputs: int,
    group: int,
    *,
    bits: int = 4,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
    act_order: bool = False,
    seed: int = 0,
) -> Integers:
    """Random integers with scales that this type holds."""
    generator = torch.Generator().manual_seed(seed)
    count = inputs // group
    limit = 1 << bits
    codes = torch.randint(0, limit, (outputs, inputs), generator=generator)
    zeros = torch.randint(1, limit, (outputs, count), generator=generator)
    zeros = torch.full_like(zeros, limit // 2) if symmetric else zeros
    scales = (0.01 + torch.rand(outputs, count, generator=generator) / 8).to(dtype)
    groups = torch.arange(inputs) // group
    if act_order:
        groups = groups[torch.randperm(inputs, generator=generator)]
    return Integers(bits, codes, scales, zeros, groups)


def words(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """(rows, n) -> (rows, n / per word) int32: the number i of a word in its bits `order[i]`, or i."""
    per = 32 // bits
    rows, count = numbers.shape
    padded = torch.nn.functional.pad(numbers, (0, -count % per))
    found = torch.zeros(rows, padded.shape[1] // per, dtype=torch.int64)
    for i in range(padded.shape[1]):
        slot = (order or tuple(range(per)))[i % per]
        found[:, i // per] |= padded[:, i] << bits * slot
    return torch.where(found >= 1 << 31, found - (1 << 32), found).to(torch.int32)


def gptq(own: Integers, *, less: int = 1) -> dict[str, Tensor]:
    return {
        "qweight": words(own.codes, own.bits).t().contiguous(),
        "qzeros": words((own.zeros - less).t(), own.bits),
        "scales": own.scales.t().contiguous(),
        "g_idx": own.groups.to(torch.int32),
    }


def auto_round(own: Integers) -> dict[str, Tensor]:
    """AutoRound's own packing: GPTQ's words, zeros as they are, inputs in order."""
    return {name: tensor for name, tensor in gptq(own, less=0).items() if name != "g_idx"}


def awq(own: Integers) -> dict[str, Tensor]:
    return {
        "qweight": words(own.codes.t(), 4, AWQ_ORDER),
        "qzeros": words(own.zeros.t(), 4, AWQ_ORDER),
        "scales": own.scales.t().contiguous(),
    }


def packed(own: Integers) -> dict[str, Tensor]:
    """compressed-tensors: signed numbers raised by half their range are those that `own` has."""
    found = {
        "weight_packed": words(own.codes, own.bits),
        "weight_scale": own.scales,
        "weight_shape": torch.tensor(own.codes.shape),
    }
    if (own.zeros != 1 << own.bits - 1).any():
        found["weight_zero_point"] = words(own.zeros.t(), own.bits).t().contiguous()
    return found


def integers(own: Integers) -> dict[str, Tensor]:
    return {"weight": (own.codes - 128).to(torch.int8), "weight_scale": own.scales}


def compressed(layout: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


IN_4_AND_8 = compressed("pack-quantized", 4)
IN_4_AND_8["config_groups"] |= {
    "group_1": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 8, "type": "int"}}
}


@dataclass(frozen=True)
class Stored:
    """A format: how a layer is made, and what config.json says."""

    make: Callable[[int, int, int], Integers]
    write: Callable[[Integers], dict[str, Tensor]]
    config: dict[str, Any]


GPTQ = {"quant_method": "gptq", "group_size": 32, "desc_act": False, "sym": True}
AUTO_ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
}  # fmt: skip
FORMATS = {
    "gptq-4-symmetric": Stored(lambda o, i, s: some(o, i, 32, symmetric=True, seed=s), gptq, {**GPTQ, "bits": 4}),
    "gptq-4": Stored(lambda o, i, s: some(o, i, 32, seed=s), gptq, {**GPTQ, "bits": 4}),
    "gptq-4-act-order": Stored(
        lambda o, i, s: some(o, i, 32, act_order=True, seed=s), gptq, {**GPTQ, "bits": 4, "desc_act": True}
    ),
    "gptq-8": Stored(lambda o, i, s: some(o, i, i, bits=8, symmetric=True, seed=s), gptq, {**GPTQ, "bits": 8, "group_size": -1}),
    "gptq-v2": Stored(
        lambda o, i, s: some(o, i, 64, seed=s), lambda own: gptq(own, less=0),
        {**GPTQ, "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-dynamic": Stored(  # GPTQModel's: some layers have 8 bits
        lambda o, i, s: some(o, i, 32 if s % 2 else 64, bits=4 if s % 2 else 8, symmetric=True, seed=s), gptq,
        {**GPTQ, "bits": 4, "dynamic": {r"+:.*\.\d+\.mlp\..*": {"bits": 8, "group_size": 64}}},
    ),
    "auto-round": Stored(
        lambda o, i, s: some(o, i, 32, symmetric=True, seed=s), auto_round, {**AUTO_ROUND, "packing_format": "auto_round"}
    ),
    "auto-round-zeros": Stored(
        lambda o, i, s: some(o, i, 64, seed=s), auto_round, {**AUTO_ROUND, "packing_format": "auto_round:gptqmodel"}
    ),
    "auto-round-gptq": Stored(
        lambda o, i, s: some(o, i, 32 if s % 2 else 64, bits=4 if s % 2 else 8, symmetric=True, seed=s),
        lambda own: {name: tensor for name, tensor in gptq(own).items() if name != "g_idx"},
        {**AUTO_ROUND, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 8, "group_size": 64}}},
    ),
    "auto-round-awq": Stored(
        lambda o, i, s: some(o, i, 64, seed=s), lambda own: awq(own), {**AUTO_ROUND, "packing_format": "auto_round:auto_awq"}
    ),
    "awq": Stored(
        lambda o, i, s: some(o, i, 64, seed=s), awq,
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    ),
    "compressed-4": Stored(
        lambda o, i, s: some(o, i, 32, symmetric=True, dtype=torch.bfloat16, seed=s), packed, compressed("pack-quantized", 4)
    ),
    "compressed-4-zeros": Stored(
        lambda o, i, s: some(o, i, 64, dtype=torch.bfloat16, seed=s), packed, compressed("pack-quantized", 4)
    ),
    "compressed-4-and-8": Stored(  # groups of layers with bits of their own
        lambda o, i, s: some(o, i, 32, bits=4 if s % 2 else 8, symmetric=True, seed=s), packed, IN_4_AND_8
    ),
    "compressed-8-in-32": Stored(
        lambda o, i, s: some(o, i, 32, bits=8, symmetric=True, seed=s), packed, compressed("pack-quantized", 8)
    ),
    "compressed-8": Stored(lambda o, i, s: some(o, i, 64, bits=8, seed=s), packed, compressed("pack-quantized", 8)),
    "compressed-int8": Stored(
        lambda o, i, s: some(o, i, i, bits=8, symmetric=True, dtype=torch.bfloat16, seed=s), integers,
        compressed("int-quantized", 8),
    ),
}  # fmt: skip
