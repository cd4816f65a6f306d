"""Packed linears against the plain ones they replace."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.models.linear.pack import PackedLinear, can_pack, pack_linears

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this torch has no oneDNN")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_equals_plain(dtype: torch.dtype, bias: bool) -> None:
    """Catches a wrong layout or a forgotten bias. Tolerance: one rounding of the dtype on sums of
    48 products."""
    if not can_pack(CPU, dtype):
        pytest.skip(f"oneDNN has no {dtype} on this CPU")
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias).to(dtype)
    x = torch.randn(2, 5, 48).to(dtype)
    with torch.inference_mode():
        torch.testing.assert_close(
            PackedLinear(plain)(x),
            plain(x),
            rtol=2e-2,
            atol=1e-2 if dtype != torch.float32 else 1e-5,
        )


def test_conv1d_of_gpt2_is_packed_transposed() -> None:
    """GPT-2 stores (in, out): packing it as it lies would still give the right shape when it is
    square."""
    torch.manual_seed(0)
    plain = Conv1D(32, 32)
    nn.init.normal_(plain.bias)
    x = torch.randn(3, 32)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(plain)(x), plain(x), rtol=1e-5, atol=1e-6)


def test_every_linear_is_replaced_and_subclasses_are_left_alone() -> None:
    """A subclass may do more than its matrix: replacing it would drop that silently."""

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), Scaled(4, 4))
    assert pack_linears(model) == 2
    assert isinstance(model[1][0], PackedLinear)
    assert isinstance(model[2], Scaled)
