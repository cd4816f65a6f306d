"""Quantised linears against the weights they were made from, and the copy of a model that has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import CapabilityError
from outrider.models.derived import quantised_linear
from outrider.models.derived.derive import linear_shape, num_weights, weight_of
from outrider.models.derived.quantise import (
    added_bytes,
    check_kernels,
    estimated_bytes,
    quantised_copy,
)
from outrider.models.derived.quantised_linear import (
    Int4Linear,
    Int8Linear,
    QuantisedLinear,
    QuantisedPanels,
)
from outrider.models.linear.pack import PackedLinear, can_pack
from outrider.models.linear.panel import PanelLinear
from outrider.models.linear.rounding import eight_bits, four_bits
from outrider.runtime.layers import use_kernels
from tests.helpers import in_bytes, tiny_llama

# outputs, inputs: also those the bare kernels refuse or misread
SHAPES = [(64, 64), (257, 40), (33, 33), (1, 5), (80, 200)]
KINDS: dict[str, Callable[[nn.Module], QuantisedLinear]] = {
    "int8": Int8Linear,
    "int4-32": lambda layer: Int4Linear(layer, 32),
    "int4-64": lambda layer: Int4Linear(layer, 64),
    "int4-128": lambda layer: Int4Linear(layer, 128),
}
# bits, group size
PANELS: dict[str, tuple[int, int]] = {
    "4-32": (4, 32),
    "4-64": (4, 64),
    "4-128": (4, 128),
    "8": (8, 32),
}
every_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
every_panel = pytest.mark.parametrize(("bits", "group_size"), PANELS.values(), ids=PANELS)


def linear(
    outputs: int, inputs: int, dtype: torch.dtype = torch.float32, *, bias: bool = True
) -> nn.Linear:
    torch.manual_seed(outputs + inputs)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def kept_weight(layer: QuantisedLinear) -> Tensor:
    """The weight (out, in) a layer stands for, read out with unit vectors."""
    out = layer(torch.eye(layer.in_features)).float()
    return (out if layer.bias is None else out - layer.bias.float()).t()


@every_kind
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_weights_are_kept_to_half_a_step(make: Callable, outputs: int, inputs: int) -> None:
    """Catches codes, scales or zeros at the wrong output, group or padding: each weight is off by
    half a step at most."""
    layer = linear(outputs, inputs, bias=False)
    quantised = make(layer)
    weight = layer.weight
    if isinstance(quantised, Int8Linear):
        step = weight.abs().amax(dim=1, keepdim=True) / 127
    else:
        size = quantised.input_unit
        groups = F.pad(weight, (0, -inputs % size)).view(outputs, -1, size)
        step = ((groups.amax(2) - groups.amin(2)) / 15).repeat_interleave(size, dim=1)[:, :inputs]
    # scales, zeros and the product itself are bf16
    rounding = 2**-8 * weight.abs().amax(dim=1, keepdim=True)
    assert ((kept_weight(quantised) - weight).abs() <= step / 2 + 2 * rounding).all()


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_products_are_those_of_the_kept_weights(
    make: Callable, dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    """Catches a kernel that reads beyond its input (bf16, 40 wide: garbage or a crash), a lost
    bias, dtype or dimension."""
    quantised = make(linear(outputs, inputs, dtype))
    for num_rows in (1, 2, 3, 9):
        x = torch.randn(num_rows, 1, inputs).to(dtype)
        y = quantised(x)
        exact = F.linear(
            x.bfloat16().double(), kept_weight(quantised).double(), quantised.bias.double()
        )
        assert (y.shape, y.dtype) == ((num_rows, 1, outputs), dtype)
        assert (y.double() - exact).abs().max() <= 0.02 * exact.abs().max() + 0.02


@every_kind
def test_a_row_has_the_same_bits_beside_any_other(make: Callable) -> None:
    """Catches a kernel whose sums depend on the batch: a row's drafts would change with its
    neighbours."""
    quantised = make(linear(96, 64, torch.bfloat16))
    x = torch.randn(40, 64).bfloat16()
    alone = torch.cat([quantised(x[i : i + 1]) for i in range(40)])
    for count in (2, 3, 8, 40):
        assert torch.equal(quantised(x[:count]), alone[:count])


@every_kind
def test_blocks_of_outputs_make_no_difference(
    make: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a packed layout that does not survive being made in parts, as it is for large output
    layers."""
    layer = linear(208, 64)
    whole = make(layer)
    monkeypatch.setattr(quantised_linear, "ROWS_AT_ONCE", 64)
    parts = make(layer)
    assert torch.equal(parts.codes, whole.codes)
    assert torch.equal(parts.scales, whole.scales)


@every_kind
def test_a_layer_of_zeros_stays_zero(make: Callable) -> None:
    """Catches 0/0 in the codes."""
    layer = linear(32, 64, bias=False)
    layer.weight.zero_()
    assert torch.equal(make(layer)(torch.randn(3, 64)), torch.zeros(3, 32))


def dequantised(layer: nn.Linear, bits: int, group_size: int) -> Tensor:
    """The weight (out, in) that any kernel stands for, in fp64."""
    weight = layer.weight.float()
    if bits == 8:
        codes, scales = eight_bits(weight)
        return codes.double() * scales.double()[:, None]
    padded = F.pad(weight, (0, -weight.shape[1] % group_size))
    codes, scales, zeros = four_bits(padded, group_size)
    steps = codes.view(len(weight), -1, group_size).double() - 8
    return (steps * scales.double()[..., None] + zeros.double()[..., None]).view_as(padded)[
        :, : weight.shape[1]
    ]


@every_panel
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("outputs", "inputs"), [*SHAPES, (300, 1000)])
def test_our_kernel_multiplies_the_kept_weights(
    bits: int, group_size: int, outputs: int, inputs: int, bias: bool, library_path: Path
) -> None:
    """Catches a code, scale or zero at the wrong position, a lost tail, a sum that overflows: exact
    but for the last rounding."""
    layer = linear(outputs, inputs, torch.bfloat16, bias=bias)
    panels = QuantisedPanels(layer, bits, group_size)
    use_kernels(panels, library_path)
    for num_rows in (1, 9, 70):  # one block of rows, two
        x = torch.randn(num_rows, inputs).bfloat16()
        exact = in_bytes(x) @ dequantised(layer, bits, group_size).t() + (
            0 if layer.bias is None else layer.bias.double()
        )
        error = (panels(x[:, None])[:, 0].double() - exact).abs()
        assert (error <= 2**-8 * exact.abs() + 1e-5 * exact.abs().max()).all()


@every_panel
def test_our_kernel_says_what_the_libraries_says(
    bits: int, group_size: int, library_path: Path
) -> None:
    """The fast path beside its reference: the same weights; only the activations are rounded once
    more."""
    layer = linear(96, 256, torch.bfloat16)
    x = torch.randn(20, 256).bfloat16()
    reference = (Int8Linear(layer) if bits == 8 else Int4Linear(layer, group_size))(x).double()
    panels = QuantisedPanels(layer, bits, group_size)
    without = panels(x).double()
    use_kernels(panels, library_path)
    ours = panels(x).double()
    # widened to bf16, where there is no kernel
    assert (without - reference).norm() <= 0.005 * reference.norm()
    assert (ours - reference).norm() <= 0.01 * reference.norm()


@every_panel
def test_a_row_has_the_same_bits_on_our_kernel_beside_any_other(
    bits: int, group_size: int, library_path: Path
) -> None:
    """Also on one thread: a draft may depend neither on its neighbours nor on who computes."""
    panels = QuantisedPanels(linear(400, 300, torch.bfloat16), bits, group_size)
    x = torch.randn(70, 300).bfloat16()
    use_kernels(panels, library_path)
    alone = torch.cat([panels(x[i : i + 1]) for i in range(70)])
    for count in (1, 2):
        use_kernels(panels, library_path, count)
        assert all(torch.equal(panels(x[:rows]), alone[:rows]) for rows in (2, 8, 9, 64, 65, 70))


@every_panel
def test_our_layout_survives_being_made_in_parts(
    bits: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = linear(208, 64, torch.bfloat16)
    whole = QuantisedPanels(layer, bits, group_size)
    monkeypatch.setattr(quantised_linear, "ROWS_AT_ONCE", 64)
    assert torch.equal(QuantisedPanels(layer, bits, group_size).codes, whole.codes)


def test_zeros_stay_zero_on_our_kernel(library_path: Path) -> None:
    """Weights without a range, and inputs without one: catches 0/0 in codes and in activations."""
    layer = linear(32, 64, torch.bfloat16)
    for bits in (4, 8):
        panels = QuantisedPanels(layer, bits, 32)
        use_kernels(panels, library_path)
        assert torch.equal(panels(torch.zeros(2, 64).bfloat16()), layer.bias.expand(2, -1))
    layer.weight.zero_()
    for bits in (4, 8):
        panels = QuantisedPanels(layer, bits, 32)
        use_kernels(panels, library_path)
        assert torch.equal(panels(torch.randn(2, 64).bfloat16()), layer.bias.expand(2, -1))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_copy_on_our_kernel_takes_the_same_memory(bits: int) -> None:
    """Catches an estimate that would let a copy in that does not fit: outputs are multiples of 32
    here, so it is exact."""
    model = tiny_llama(96).bfloat16()
    copy = quantised_copy(model, bits, 32, head=True, native=True, name="tiny")
    assert all(
        isinstance(part, QuantisedPanels)
        for part in (copy.lm_head, copy.model.layers[0].mlp.down_proj)
    )
    assert added_bytes(copy) == estimated_bytes(model, bits, 32, head=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [64, 33])
def test_weights_are_read_back_from_every_layout(dtype: torch.dtype, outputs: int) -> None:
    """Catches a transposed, padded or unpacked-wrong weight: what is quantised must be the
    target's, bit for bit."""
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
        copy = quantised_copy(model, 4, 32, head=head, native=False, name="tiny")
        assert copy.model.embed_tokens is model.model.embed_tokens
        assert copy.model.norm is model.model.norm
        assert copy.model.layers[1].input_layernorm is model.model.layers[1].input_layernorm
        assert isinstance(copy.model.layers[1].self_attn.q_proj, Int4Linear)
        assert (copy.lm_head is model.lm_head) == (not head)
        assert added_bytes(copy) == estimated_bytes(model, 4, 32, head=head)
    assert {type(part) for part in model.modules()} == kinds
    assert added_bytes(model) == 0


def test_eight_bits_are_counted() -> None:
    """Catches an estimate that would let a copy in that does not fit: inputs are multiples of 16
    here, so it is exact."""
    model = tiny_llama(96)
    copy = quantised_copy(model, 8, 32, head=True, native=False, name="tiny")
    assert added_bytes(copy) == estimated_bytes(model, 8, 32, head=True)


def test_refusals() -> None:
    """What has no kernel or no linear layers is refused by name."""
    with pytest.raises(CapabilityError, match="CPU kernels, but the model is on cuda"):
        check_kernels(torch.device("cuda"))
    check_kernels(torch.device("cpu"))
    with pytest.raises(CapabilityError, match="'tiny' has no linear layers"):
        quantised_copy(
            nn.Sequential(nn.LayerNorm(4)), 8, 32, head=True, native=False, name="'tiny'"
        )
