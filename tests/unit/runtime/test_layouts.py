"""Operations on single tokens whose numbers lie side by side, apart, or fill no whole vector: the
same bits."""

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

SIZE = 48  # three vectors
Function = Callable[[Tensor, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "sum": lambda a, b: a + b, "difference": lambda a, b: a - b, "product": lambda a, b: a * b, "quotient": lambda a, b: a / b,
    "larger": torch.maximum, "one number": lambda a, b: a * b[..., 3:4] + 0.1, "wider": lambda a, b: a.float() * b,
    "gated": lambda a, b: nn.functional.silu(a) * b, "gelu": lambda a, b: nn.functional.gelu(a + b, approximate="tanh"),
    "tanh": lambda a, b: torch.tanh(-a), "heads": lambda a, b: (a.unflatten(-1, (-1, 1)) * b[..., :1, None]).flatten(-2),
}  # fmt: skip
OF_WHOLE_ROWS: dict[str, Function] = {
    "mean": lambda a, b: a - a.mean(-1, keepdim=True), "softmax": lambda a, b: torch.softmax(a, -1),
    "norm": lambda a, b: nn.functional.rms_norm(a, (SIZE,)),
}  # fmt: skip


class Applied(nn.Module):
    """A function of what a view makes of both halves of the inputs."""

    def __init__(self, function: Function, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.view(x[..., start : start + 2 * SIZE]) for start in (0, 2 * SIZE))
        return self.function(first, second).to(x.dtype)


def made(module: nn.Module, x: Tensor, path: Path) -> Tensor:
    """What the executor makes of `x` (tokens, numbers)."""

    def recorded(
        ids: Tensor, positions: Tensor, inputs: list[Tensor], cache: RecordedCache
    ) -> tuple[dict[int, Tensor], Tensor]:
        found = module(inputs[0])
        return {AFTER_NORM: found}, found

    program = program_of(module, record_part(module, 9, [(x.shape[1], x.dtype)], recorded))
    return bind(program, module, (), x.dtype, path).executor.map(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FUNCTIONS, *OF_WHOLE_ROWS])
def test_how_numbers_lie_changes_no_bit(name: str, dtype: torch.dtype, library_path: Path) -> None:
    """Catches a way of reading or writing that skips a vector, rounds twice, or takes another row's
    or operand's step."""
    function = {**FUNCTIONS, **OF_WHOLE_ROWS}[name]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    numbers = torch.randn(5, 2, SIZE, generator=torch.Generator().manual_seed(3)).to(dtype)
    nothing = torch.zeros_like(numbers)
    beside = torch.cat([numbers, nothing], -1).flatten(1)
    apart = torch.stack([numbers, nothing], -1).flatten(1)
    found = made(Applied(function, lambda x: x[..., :SIZE]), beside, library_path)
    torch.testing.assert_close(
        found, function(numbers[:, 0], numbers[:, 1]).to(dtype), rtol=tolerance, atol=tolerance
    )
    assert torch.equal(made(Applied(function, lambda x: x[..., ::2]), apart, library_path), found)
    if name in FUNCTIONS:
        fewer = made(Applied(function, lambda x: x[..., : SIZE - 1]), beside, library_path)
        assert torch.equal(fewer, found[:, : SIZE - 1])
