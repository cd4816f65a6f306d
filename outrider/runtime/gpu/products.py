"""Products of a few tokens with a weight, in one order of sums however many tokens there are."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from outrider.runtime.gpu.kernels import narrow_product

NARROW = 64  # tokens of a pass that are multiplied so; a library is faster for more
# tokens of a program: tensor cores multiply both by the same instruction
FEW = 16
SEVERAL = 32


def narrow(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x (tokens, in) -> (tokens, out), for a contiguous bf16 weight (out, in)."""
    outputs, inputs = weight.shape
    step, stages, warps = _shape(outputs, inputs)

    def multiply(x: Tensor) -> Tensor:
        output = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
        lines = FEW if len(x) <= FEW else SEVERAL
        block = _block(len(x), outputs)
        narrow_product[(triton.cdiv(len(x), lines), triton.cdiv(outputs, block))](
            x,
            weight,
            weight if bias is None else bias,
            output,
            len(x),
            x.stride(0),
            INPUTS=inputs,
            OUTPUTS=outputs,
            BIASED=bias is not None,
            BLOCK=block,
            STEP=step,
            LINES=lines,
            num_warps=warps,
            num_stages=stages,
        )
        return output

    return multiply


def _block(num_tokens: int, outputs: int) -> int:
    """Outputs of a program: few, so that there are programs for all multiprocessors, but each reads
    the tokens once more."""
    if num_tokens <= SEVERAL:
        return 16
    return 64 if outputs >= 16384 else 32


def _shape(outputs: int, inputs: int) -> tuple[int, int, int]:
    """Inputs read at once, reads under way, and warps of a program: what was fastest on an H100
    (docs/results/gpu.md)."""
    if outputs >= 16384 or (inputs < 2048 <= outputs):
        return 128, 4, 2
    return (256, 4, 4) if inputs >= 2048 else (128, 5, 4)
