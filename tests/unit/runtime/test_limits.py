"""Bits of a row on the executor: samples that another order of a sum could not pass, and the short
check made at load.

The samples show that the kernels keep their order of sums in passes of every width; each test of a
kind has its mutation, a kernel that does not, which the same samples find out.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kv import LayerShape
from outrider.models.lm import LM, PassLimits, Run
from outrider.models.loading.load import build_lm
from outrider.models.pass_plan import PassPlan
from outrider.models.probes.sum_order import (
    AttentionKind,
    attention_samples,
    same_bits,
    trees_keep_bits,
)
from outrider.runtime.limits import find_native_limits
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun
from tests.unit.runtime.families import FAMILIES, make
from tests.unit.runtime.samples import WIDTHS, NativeAttention, linear_sample, sample_inputs

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
# inputs, outputs, biased
SHAPES = [(576, 1536, False), (1536, 576, True), (50, 97, False), (64, 5000, False)]
KINDS = [
    AttentionKind(9, LayerShape(3, 64, 64), None), AttentionKind(4, LayerShape(4, 80, 80), 20.0),
    AttentionKind(8, LayerShape(1, 128, 96), None), AttentionKind(6, LayerShape(2, 64, 64), None, has_sinks=True),
    AttentionKind(4, LayerShape(4, 64, 64), None, has_slopes=True), AttentionKind(4, LayerShape(2, 16, 16), None),
    AttentionKind(16, LayerShape(1, 96, 64, True), None), AttentionKind(5, LayerShape(1, 50, 34, True), None),
]  # fmt: skip
NO_LIMITS = PassLimits(granularity=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs", "biased"), SHAPES)
def test_linear_layers_add_in_one_order(
    inputs: int,
    outputs: int,
    biased: bool,
    transposed: bool,
    dtype: torch.dtype,
    library_path: Path,
) -> None:
    """Catches a tile, tail or group of rows that adds up another way."""
    weight = some_weight(inputs, outputs, dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    sample = linear_sample(
        weight.t().contiguous() if transposed else weight, bias, library_path, transposed=transposed
    )
    expected = F.linear(
        sample_inputs(weight, inputs, outputs)[: len(sample[1])].float(), weight.float()
    )
    assert (sample[1] - expected - (0 if bias is None else bias.float())).abs().max() < (
        1e-3 if dtype == torch.float32 else 0.1
    )
    assert same_bits(sample, list(WIDTHS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_layer_that_adds_in_another_order_is_found_out(
    dtype: torch.dtype, library_path: Path
) -> None:
    """Fails for a sample that could pass by luck: the sums of one width are made in two halves."""
    weight = some_weight(576, 1536, dtype)
    sample = linear_sample(weight, None, library_path)
    x = sample_inputs(weight, 576, 1536)[: len(sample[7])].float()
    w = weight.float()
    sample[7] = (x[:, :288] @ w[:, :288].T + x[:, 288:] @ w[:, 288:].T).to(dtype).float()
    assert not same_bits(sample, list(WIDTHS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.inference_mode()
def test_attention_adds_in_one_order(
    kind: AttentionKind, dtype: torch.dtype, library_path: Path
) -> None:
    """Catches a sum over keys that follows the pass's width, the slots in the cache, or the shape
    of a tree."""
    lm = on_executor("llama", dtype, library_path)
    attend = NativeAttention(kind, dtype, library_path)
    assert all(
        same_bits(sample, list(WIDTHS)) for sample in attention_samples(kind, lm, WIDTHS, attend)
    )
    assert trees_keep_bits(kind, lm, attend)


@torch.inference_mode()
def test_attention_that_takes_keys_as_they_lie_is_found_out(library_path: Path) -> None:
    """torch's attention does, so trees on it must fail the samples that the executor passes."""
    lm = on_executor("llama", torch.float32, library_path)
    assert not trees_keep_bits(KINDS[-1], lm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_at_load_finds_no_limits(
    family: str, dtype: torch.dtype, library_path: Path
) -> None:
    lm = on_executor(family, dtype, library_path)
    assert find_native_limits(lm) == NO_LIMITS
    assert lm.kv.num_rows == 0


class Broken:
    """A run whose last digit follows something that it must not."""

    def __init__(self, run: Run, what: str) -> None:
        self._run = run
        self._what = what

    def __call__(self, ids: Tensor, positions: Tensor, plan: PassPlan, columns: Tensor) -> Tensor:
        logits = self._run(ids, positions, plan, columns)
        width = ids.shape[1]
        is_tree = bool((positions.diff(dim=1) != 1).any())
        wrong = {
            "single": width == 1,
            "wide": width >= 6,
            "rows": len(ids) > 1,
            "trees": is_tree,
            "cut": 1 < width < 6,
        }[self._what]
        return torch.nextafter(logits, torch.tensor(torch.inf)) if wrong else logits

    def with_hidden(self, *unused: object) -> tuple[Tensor, list[Tensor]]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("what", "exact_trees", "exact_rows"),
    [
        ("single", True, False),
        ("wide", True, False),
        ("rows", True, False),
        ("cut", True, False),
        ("trees", False, True),
    ],
)
def test_the_check_at_load_sees_one_digit(
    what: str, exact_trees: bool, exact_rows: bool, library_path: Path
) -> None:
    """Fails for a check that makes no pass of one kind, or compares no bits."""
    lm = on_executor("llama", torch.float32, library_path)
    lm.run = Broken(lm.run, what)
    assert find_native_limits(lm) == PassLimits(
        granularity=1, exact_trees=exact_trees, exact_rows=exact_rows
    )


def some_weight(inputs: int, outputs: int, dtype: torch.dtype) -> Tensor:
    return (
        torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) / inputs**0.5
    ).to(dtype)


def on_executor(family: str, dtype: torch.dtype, path: Path) -> LM:
    """A model of the family with its passes on the executor."""
    module = make(family, dtype)
    plain = build_lm(module, family, dtype, CPU)
    return LM(NativeRun(plain, module, lower(module), path), plain.shape, dtype, CPU)
