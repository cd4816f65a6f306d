"""The evidence behind `exact`: kernels that add in another order now and then must be found out,
also in half precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.kv import LayerShape
from outrider.models import attention
from outrider.models.loading.load import build_lm, finish
from outrider.models.pass_plan import QUERY_BLOCK, PassPlan
from outrider.models.probes import pass_limits, sum_order
from outrider.models.probes.pass_limits import WIDTHS, find_pass_limits
from outrider.models.probes.sum_order import (
    AttentionKind,
    attention_samples,
    linear_samples,
    same_bits,
    trees_keep_bits,
)
from tests.contract.test_architectures import GROUPED, make_module
from tests.helpers import tiny_llama
from tests.unit.runtime.families import make

CPU = torch.device("cpu")
HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
KINDS = [
    AttentionKind(4, LayerShape(2, 16, 16), None),
    AttentionKind(4, LayerShape(4, 16, 8), None),
    AttentionKind(4, LayerShape(2, 16, 16), 30.0),
    AttentionKind(4, LayerShape(2, 16, 16), None, has_sinks=True),
    AttentionKind(4, LayerShape(4, 16, 16), None, has_slopes=True),
    AttentionKind(4, LayerShape(1, 24, 16, True), None),
]
Attend = Callable[..., Tensor]


class HalvedLinear(nn.Linear):
    """Adds both halves of a product by themselves where a pass has three tokens."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 3:
            return _in_fp32(x, self.weight, self.in_features)
        return _in_fp32(x, self.weight, self.in_features // 2)


def _in_fp32(x: Tensor, weight: Tensor, piece: int) -> Tensor:
    """x W^T with fp32 sums over pieces of the inputs, token by token: the same for every number of
    tokens."""
    total: Any = 0
    for start in range(0, weight.shape[1], piece):
        part = slice(start, start + piece)
        total = total + (x[..., None, part].float() * weight[:, part].float()).sum(-1)
    return total.to(x.dtype)


def make_lm(dtype: torch.dtype) -> tuple[Any, Any]:
    attention.register()
    module = tiny_llama(96).to(dtype)
    return build_lm(module, "tiny", dtype, CPU), module


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_linear_layer_that_sums_otherwise_at_one_width(dtype: torch.dtype) -> None:
    """Catches a probe that looks at too few numbers: one in 10,000 of bfloat16 shows another order."""
    lm, module = make_lm(dtype)
    torch.manual_seed(1)
    module.extra = HalvedLinear(64, 48, bias=False).to(dtype)
    samples = list(linear_samples(nn.ModuleList([module.extra]), lm, WIDTHS))
    assert len(samples) == 1
    assert same_bits(samples[0], [width for width in WIDTHS if width != 3])
    assert not same_bits(samples[0], [2, 3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_attention_does_not_keep_the_bits_of_trees(
    dtype: torch.dtype, kind: AttentionKind
) -> None:
    """It sums over whole blocks of keys, where other branches lie between those of a path. Catches
    luck in half precision."""
    lm, _ = make_lm(dtype)
    assert not trees_keep_bits(kind, lm)


def _over_reversed_keys(at_width: int, real: Attend) -> Attend:
    """Attention that walks the keys backwards in passes of one width."""

    def attend(
        plan: PassPlan, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        real(plan, layer, query, key, value, **options)  # writes keys and values
        num_keys = plan.mask.shape[3]
        num_queries = query.shape[2]
        keys = plan.keys[0][:1, :num_keys].transpose(1, 2)
        values = plan.values[0][:1, :num_keys].transpose(1, 2)
        order = list(range(num_keys))[:: -1 if num_queries == at_width else 1]
        groups = query.shape[1] // keys.shape[1]
        keys, values = (
            t[:, :, order].repeat_interleave(groups, dim=1).float() for t in (keys, values)
        )
        mask = plan.mask[:, :, :num_queries, order].float()
        scores = mask
        for d in range(query.shape[3]):
            scores = scores + query[..., d, None].float() * keys[:, :, None, :, d]
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        total = torch.zeros(*query.shape[:3], values.shape[3])
        for at in range(num_keys):
            total = total + weights[..., at, None] * values[:, :, None, at]
        return total.to(query.dtype).transpose(1, 2)

    return attend


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_attention_that_sums_otherwise_at_one_width(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches samples whose sums do not depend on their order."""
    lm, _ = make_lm(dtype)
    monkeypatch.setattr(sum_order, "PREFIXES", (24,))
    monkeypatch.setattr(sum_order, "attend", _over_reversed_keys(5, sum_order.attend))
    samples = list(attention_samples(KINDS[0], lm, (4, 5, 8)))
    assert all(same_bits(sample, [4, 8]) for sample in samples)
    assert not same_bits(samples[0], [4, 5]), "values that cancel do not show the order"


@pytest.mark.slow
def test_what_samples_show_reaches_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches evidence that is gathered and not used."""
    lm, module = make_lm(torch.bfloat16)
    torch.manual_seed(1)
    finish(lm, module)
    assert lm.limits.max_tokens_per_pass > 3
    wide = lm.limits.granularity
    module.extra = HalvedLinear(64, 48, bias=False).to(torch.bfloat16)
    assert find_pass_limits(lm, module).granularity == QUERY_BLOCK >= wide
    monkeypatch.setattr(pass_limits, "trees_keep_bits", lambda kind, lm: True)
    monkeypatch.setattr(pass_limits, "tree_path_is_exact", lambda lm, block: True)
    assert find_pass_limits(lm, module).exact_trees
    monkeypatch.setattr(pass_limits, "trees_keep_bits", lambda kind, lm: False)
    assert not find_pass_limits(lm, module).exact_trees


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_experts_are_never_exact_by_luck(dtype: torch.dtype) -> None:
    """An expert's sums depend on how many tokens it is given, which half precision hides in most
    passes: whole passes of this model in float16 all agree."""
    attention.register()
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    module = make_module(
        "Qwen3Moe", {**GROUPED, "hidden_size": 96, **experts, "initializer_range": 0.1}, dtype
    )
    lm = build_lm(module, "experts", dtype, CPU)
    block = module.model.layers[0].mlp
    hidden = torch.randn(1, 400, 96, generator=torch.Generator().manual_seed(3)).to(dtype)
    with torch.inference_mode():
        together = block(hidden)
        pairs = torch.cat([block(hidden[:, at : at + 2]) for at in range(0, 400, 2)], dim=1)
    promised = find_pass_limits(lm, module).exact_rows
    assert promised == torch.equal(together, pairs)


def test_experts_that_are_called_otherwise_are_not_exact() -> None:
    """Catches a promise about experts that could not be sampled."""
    lm, module = make_lm(torch.float32)
    assert find_pass_limits(lm, module).exact_rows

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 8, 8))

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden

    module.extra = Experts()
    assert not find_pass_limits(lm, module).exact_rows
    module.extra = nn.Conv1d(8, 8, 3)  # its weight has three dimensions, too
    assert find_pass_limits(lm, module).exact_rows


def test_every_kind_of_attention_that_a_model_has_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches heads, caps and sinks that are taken from a config, which counts otherwise or does
    not name them."""
    attention.register()
    module = make("mimo_v2_flash")
    lm = build_lm(module, "mimo", torch.float32, CPU)
    sampled = []
    monkeypatch.setattr(
        pass_limits, "attention_samples", lambda kind, lm, widths: sampled.append(kind) or iter(())
    )
    find_pass_limits(lm, module)
    assert sampled == [
        AttentionKind(4, LayerShape(2, 16, 8), None),
        AttentionKind(4, LayerShape(4, 16, 8), None, has_sinks=True),
    ]
