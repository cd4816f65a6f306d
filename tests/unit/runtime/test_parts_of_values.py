"""Linear layers on the executor that read a part of a larger value, or one number many times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from outrider.models.signals import AFTER_NORM
from outrider.runtime.lower import program_of
from outrider.runtime.record import RecordedCache, record_part
from outrider.runtime.run import bind

WIDE = 48
SIZE = 16
PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "first": lambda x: x[..., :SIZE],
    "last": lambda x: x[..., -SIZE:],
    "every third": lambda x: x[..., ::3],
    "one number": lambda x: x[..., 5:6].expand(*x.shape[:-1], SIZE),
    "few numbers": lambda x: (
        x.unflatten(-1, (SIZE, 3))[..., :2, :1].expand(-1, -1, 2, SIZE // 2).flatten(-2)
    ),
    "turned": lambda x: (
        x.unflatten(-1, (3, SIZE)).transpose(-1, -2).flatten(-2)[..., SIZE : 2 * SIZE]
    ),
}


class Two(nn.Module):
    def __init__(self, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.part = part
        self.first = nn.Linear(8, WIDE)
        self.second = nn.Linear(SIZE, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.part(self.first(x)))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)], ids=str
)
def test_a_layer_reads_its_own_numbers_of_every_token(
    part: str, dtype: torch.dtype, tolerance: float, library_path: Path
) -> None:
    """Catches rows taken to lie as far apart as the layer has inputs, and a step of 0 taken for 1."""
    torch.manual_seed(0)
    module = Two(PARTS[part]).requires_grad_(False).to(dtype)

    def recorded(
        ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
    ) -> tuple[dict[int, Tensor], Tensor]:
        found = module(inputs[0])
        return {AFTER_NORM: found}, found

    program = program_of(module, record_part(module, 9, [(8, dtype)], recorded))
    x = torch.randn(7, 8).to(dtype)
    found = bind(program, module, (), dtype, library_path).executor.map(x)
    torch.testing.assert_close(found, module(x[None])[0], rtol=tolerance, atol=tolerance)
