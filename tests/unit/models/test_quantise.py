"""Quantised linears against the weights they were made from, and the copy of a model that has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import CapabilityError
from outrider.models import quantise
from outrider.models.derive import linear_shape, num_weights, weight_of
from outrider.models.pack import PackedLinear, can_pack
from outrider.models.panel import PanelLinear
from outrider.models.quantise import (
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
    added_bytes,
    check_kernels,
    estimated_bytes,
    quantised_copy,
)
from tests.helpers import tiny_llama

SHAPES = [(64, 64), (257, 40), (33, 33), (1, 5), (80, 200)]  # outputs, inputs: also those the bare kernels refuse or misread
KINDS: dict[str, Callable[[nn.Module], QuantisedLinear]] = {
    "int8": Int8Linear,
    "int4-32": lambda layer: Int4Linear(layer, 32),
    "int4-64": lambda layer: Int4Linear(layer, 64),
    "int4-128": lambda layer: Int4Linear(layer, 128),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs + inputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def kept_weight(layer: QuantisedLinear) -> Tensor:
    """The weight (out, in) a layer stands for, read out with unit vectors."""
    out = layer(torch.eye(layer.in_features)).float()
    return (out if layer.bias is None else out - layer.bias.float()).t()


@every_kind
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_weights_are_kept_to_half_a_step(make: Callable, outputs: int, inputs: int) -> None:
    """Catches codes, scales or zeros at the wrong output, group or padding: each weight is off by half a step at most."""
    layer = linear(outputs, inputs, bias=False)
    quantised = make(layer)
    weight = layer.weight
    if isinstance(quantised, Int8Linear):
        step = weight.abs().amax(dim=1, keepdim=True) / 127
    else:
        size = quantised.input_unit
        groups = F.pad(weight, (0, -inputs % size)).view(outputs, -1, size)
        step = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(size, dim=1)[:, :inputs]
    rounding = 2**-8 * weight.abs().amax(dim=1, keepdim=True)  # scales, zeros and the product itself are bf16
    assert ((kept_weight(quantised) - weight).abs() <= step / 2 + 2 * rounding).all()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_the_kept_weights(make: Callable, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """Catches a kernel that reads beyond its input (bf16, 40 wide: garbage or a crash), a lost bias, dtype or dimension."""
    quantised = make(linear(outputs, inputs, dtype))
    for num_rows in (1, 2, 3, 9):
        x = torch.randn(num_rows, 1, inputs).to(dtype)
        y = quantised(x)
        exact = F.linear(x.bfloat16().double(), kept_weight(quantised).double(), quantised.bias.double())
        assert (y.shape, y.dtype) == ((num_rows, 1, outputs), dtype)
        assert (y.double() - exact).abs().max() <= 0.02 * exact.abs().max() + 0.02


@every_kind
def test_a_row_has_the_same_bits_beside_any_other(make: Callable) -> None:
    """Catches a kernel whose sums depend on the batch: a row's drafts would change with its neighbours."""
    quantised, x = make(linear(96, 64, torch.bfloat16)), torch.randn(40, 64).bfloat16()
    alone = torch.cat([quantised(x[i : i + 1]) for i in range(40)])
    for count in (2, 3, 8, 40):
        assert torch.equal(quantised(x[:count]), alone[:count])


@every_kind
def test_blocks_of_outputs_make_no_difference(make: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a packed layout that does not survive being made in parts, as it is for large output layers."""
    layer = linear(208, 64)
    whole = make(layer)
    monkeypatch.setattr(quantise, "ROWS_AT_ONCE", 64)
    parts = make(layer)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scales, whole.scales)


@every_kind
def test_a_layer_of_zeros_stays_zero(make: Callable) -> None:
    """Catches 0/0 in the codes."""
    layer = linear(32, 64, bias=False)
    layer.weight.zero_()
    assert torch.equal(make(layer)(torch.randn(3, 64)), torch.zeros(3, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [64, 33])
def test_weights_are_read_back_from_every_layout(dtype: torch.dtype, outputs: int) -> None:
    """Catches a transposed, padded or unpacked-wrong weight: what is quantised must be the target's, bit for bit."""
    plain = linear(outputs, 48, dtype)
    transposed = Conv1D(outputs, 48).to(dtype).requires_grad_(False)
    transposed.weight = nn.Parameter(plain.weight.t().contiguous(), requires_grad=False)
    layers = [plain, transposed]
    if can_pack(torch.device("cpu"), dtype):
        layers += [PackedLinear(plain), PackedLinear(transposed)]
    if dtype == torch.bfloat16:
        layers.append(PanelLinear(plain))
    for layer in layers:
        assert torch.equal(weight_of(layer), plain.weight), type(layer)
        assert linear_shape(layer) == (outputs, 48), type(layer)
        assert num_weights(layer) in (outputs * 48, outputs * 48 + outputs), type(layer)


def test_a_copy_shares_all_but_its_linears() -> None:
    """Catches a copy that quantises the target itself, doubles its embeddings, or forgets `head`."""
    model = tiny_llama(96)
    kinds = {type(part) for part in model.modules()}
    for head in (True, False):
        copy = quantised_copy(model, 4, 32, head=head, name="tiny")
        assert copy.model.embed_tokens is model.model.embed_tokens
        assert copy.model.norm is model.model.norm
        assert copy.model.layers[1].input_layernorm is model.model.layers[1].input_layernorm
        assert isinstance(copy.model.layers[1].self_attn.q_proj, Int4Linear)
        assert (copy.lm_head is model.lm_head) == (not head)
        assert added_bytes(copy) == estimated_bytes(model, 4, 32, head=head)
    assert {type(part) for part in model.modules()} == kinds
    assert added_bytes(model) == 0


def test_eight_bits_are_counted() -> None:
    """Catches an estimate that would let a copy in that does not fit: inputs are multiples of 16 here, so it is exact."""
    model = tiny_llama(96)
    assert added_bytes(quantised_copy(model, 8, 32, head=True, name="tiny")) == estimated_bytes(model, 8, 32, head=True)


def test_refusals() -> None:
    """What has no kernel or no linear layers is refused by name."""
    with pytest.raises(CapabilityError, match="CPU kernels, but the model is on cuda"):
        check_kernels(torch.device("cuda"))
    check_kernels(torch.device("cpu"))
    with pytest.raises(CapabilityError, match="'tiny' has no linear layers"):
        quantised_copy(nn.Sequential(nn.LayerNorm(4)), 8, 32, head=True, name="'tiny'")
