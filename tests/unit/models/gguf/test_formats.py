"""Block formats against gguf's own `dequantize`, and layers on the native kernel against their
reference."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.gguf import formats
from outrider.models.gguf.formats import FORMS, panel_bytes, panels_of, values_of
from outrider.models.gguf.linear import BlockEmbedding, BlockLinear
from outrider.runtime.layers import use_kernels
from tests.gguf_files import Kind, random_blocks
from tests.helpers import in_bytes

SHAPES = [(1, 256), (45, 512), (96, 1024)]
every_format = pytest.mark.parametrize(
    "kind", [Kind[name] for name in FORMS], ids=lambda kind: kind.name
)


def blocks_of(kind: Kind, outputs: int, inputs: int) -> Tensor:
    return torch.from_numpy(random_blocks(kind, outputs, inputs))


def reference(kind: Kind, outputs: int, inputs: int) -> Tensor:
    return torch.from_numpy(gguf.dequantize(random_blocks(kind, outputs, inputs), kind))


def linear(kind: Kind, outputs: int, inputs: int, *, bias: bool = True) -> BlockLinear:
    offsets = torch.randn(outputs).bfloat16() if bias else None
    return BlockLinear(
        panels_of(blocks_of(kind, outputs, inputs), kind),
        FORMS[kind.name],
        outputs,
        inputs,
        torch.bfloat16,
        offsets,
    )


@every_format
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_values_are_those_of_gguf(kind: Kind, outputs: int, inputs: int) -> None:
    """To the bit: catches a code, scale, step or shift taken from the wrong position, in a layout
    or on the way back."""
    panels = panels_of(blocks_of(kind, outputs, inputs), kind)
    assert panels.nbytes == panel_bytes(kind, outputs, inputs)
    assert torch.equal(
        values_of(panels, FORMS[kind.name], outputs), reference(kind, outputs, inputs)
    )


def test_panels_survive_being_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = blocks_of(Kind.Q6_K, 150, 256)
    whole = panels_of(blocks, Kind.Q6_K)
    monkeypatch.setattr(formats, "ROWS_AT_ONCE", 64)
    assert torch.equal(panels_of(blocks, Kind.Q6_K), whole)


def test_blocks_take_no_more_than_in_their_file() -> None:
    """Catches a layout that widens on the sly: K formats gain an eighth of a bit for steps and
    shifts in whole bytes."""
    sizes = {
        kind: panel_bytes(kind, 32, 1024) / random_blocks(kind, 32, 1024).nbytes
        for kind in map(Kind.__getitem__, FORMS)
    }
    plain = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q6_K)
    assert {kind.name: sizes[kind] for kind in plain} == {kind.name: 1.0 for kind in plain}
    assert sizes[Kind.Q4_K] < 1.03
    assert sizes[Kind.Q5_K] < 1.03


@every_format
def test_without_kernels_a_layer_is_its_widened_weight(kind: Kind) -> None:
    layer = linear(kind, 45, 512)
    x = torch.randn(3, 512)
    expected = F.linear(x, reference(kind, 45, 512).bfloat16().float(), layer.bias.float())
    assert torch.allclose(layer.float()(x), expected, atol=1e-4 * expected.abs().max().item())


@every_format
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_kernel_multiplies_the_values_of_gguf(
    kind: Kind, outputs: int, inputs: int, library_path: Path
) -> None:
    """Exact but for the last rounding, given activations in 8 bits for each 32: catches a code or
    factor at a wrong position."""
    for bias in (True, False):
        layer = linear(kind, outputs, inputs, bias=bias)
        use_kernels(layer, library_path)
        for num_rows in (1, 9, 70):  # one block of rows, two
            x = torch.randn(num_rows, inputs).bfloat16()
            exact = in_bytes(x) @ reference(kind, outputs, inputs).double().t() + (
                layer.bias.double() if bias else 0
            )
            error = (layer(x[:, None])[:, 0].double() - exact).abs()
            assert (error <= 2**-8 * exact.abs() + 1e-5 * exact.abs().max()).all()


@every_format
def test_rounded_activations_cost_what_is_documented(kind: Kind, library_path: Path) -> None:
    """Half a step of 8 bits for each weight, no more; a step is a block's largest activation / 127."""
    layer = linear(kind, 64, 512, bias=False)
    x = torch.randn(20, 512).bfloat16()
    weight = reference(kind, 64, 512).double()
    use_kernels(layer, library_path)
    exact = x.double() @ weight.t()
    steps = x.double().view(20, -1, 32).abs().amax(2) / 127
    bound = (steps / 2 * 1.001) @ weight.abs().view(64, -1, 32).sum(2).t()
    assert (
        (layer(x).double() - exact).abs() <= bound + 2**-8 * exact.abs() + 1e-5 * exact.abs().max()
    ).all()


@every_format
def test_a_row_has_the_same_bits_beside_any_other(kind: Kind, library_path: Path) -> None:
    """What greedy exactness rests on. 28,000 numbers a comparison: a sum in another order would
    change dozens of them."""
    layer = linear(kind, 400, 512)
    x = torch.randn(70, 512).bfloat16()
    use_kernels(layer, library_path)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(70)])
    for count in (1, 2):
        use_kernels(layer, library_path, count)
        assert all(torch.equal(layer(x[:rows]), alone[:rows]) for rows in (2, 7, 8, 9, 64, 65, 70))


@every_format
@pytest.mark.parametrize("inputs", [32, 64, 96, 352, 512])
def test_many_rows_have_the_bits_of_one(kind: Kind, inputs: int, library_path: Path) -> None:
    """Where a processor has matrix tiles, thirteen rows and more go through them: whole and begun
    sixteens, several parts of a layer, any number of blocks."""
    if inputs % gguf.GGML_QUANT_SIZES[kind][0]:
        pytest.skip("no whole blocks")
    layer = linear(kind, 45, inputs)
    x = torch.randn(290, inputs).bfloat16()
    x[5] = 0  # its scale is 0
    use_kernels(layer, library_path, 2)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(290)])
    for rows in (12, 13, 15, 16, 17, 31, 33, 128, 129, 272, 290):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@every_format
def test_rows_of_a_table_are_those_of_gguf(kind: Kind, library_path: Path) -> None:
    """To the bit of bf16, with and without the kernel."""
    weight = reference(kind, 45, 512).bfloat16()
    table = BlockEmbedding(
        panels_of(blocks_of(kind, 45, 512), kind),
        FORMS[kind.name],
        45,
        512,
        torch.bfloat16,
        torch.tensor(3.0),
    )
    tokens = torch.tensor([[0, 44, 31], [32, 7, 44]])
    for is_native in (False, True):
        if is_native:
            use_kernels(table, library_path)
        assert torch.equal(table.rows(tokens), weight[tokens])
        assert torch.equal(table(tokens), weight[tokens] * torch.tensor(3.0).bfloat16())


def test_a_token_outside_the_table_is_an_error(library_path: Path) -> None:
    """As with `nn.Embedding`; a kernel alone would read whatever lies there."""
    table = BlockEmbedding(
        panels_of(blocks_of(Kind.Q8_0, 45, 64), Kind.Q8_0), FORMS["Q8_0"], 45, 64, torch.bfloat16
    )
    use_kernels(table, library_path)
    for token in (-1, 64):
        with pytest.raises(IndexError, match="beyond"):
            table(torch.tensor([token]))
