"""A loss over a large vocabulary without all its logits: positions are judged a few at a time, and
only gradients are kept.

Logits of N positions over V tokens are N x V numbers, and a loss makes some ten tensors of that
size: 2 GB with 1,000 positions and 49,152 tokens. Here a chunk's tensors live until the gradient of
its logits is known. The output layer's product and its gradient take several chunks at once: the
gradient is as large as the layer itself, and is added up once for all of them. All this happens in
the forward pass, since the loss is a sum over positions; the backward pass scales the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Both get (n,) int64: which of all positions these are.
Output = Callable[[Tensor, Tensor], Tensor]  # states (n, H) -> logits (n, V)
# logits (n, V) -> (loss of each (n,), acceptance of each (n,))
Judge = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
# most logits of a chunk: 16 MB in fp32, which glibc's allocator uses again instead of mapping it
# anew
CHUNK_NUMBERS = 1 << 22
# of the output layer on a CPU: logits and their gradient are two of a loss's ten tensors, in half
# its bytes
CHUNKS_AT_ONCE = 8
# On a device a chunk costs a hundred launches whatever its size: chunks as large as a quarter of
# the free memory allows.
# ten tensors in fp32
BYTES_OF_A_NUMBER = 40
FREE_SHARE = 0.25


class Judged(NamedTuple):
    """The weighted sum of all losses, with a gradient; losses and acceptances of the N positions,
    without."""

    total: Tensor
    losses: Tensor
    accepted: Tensor


def judged_in_chunks(
    output: Output,
    judge: Judge,
    states: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    size: int,
) -> Judged:
    """sum_i weights[i] * losses[i] over states (N, H), `size` positions at a time.

    `parameters`: what `output` reads and is trained. The sum equals that of one chunk up to its
    order.
    """
    return Judged(
        *_InChunks.apply(output, judge, size, torch.is_grad_enabled(), states, weights, *parameters)
    )


def chunk_size(vocab_size: int, device: torch.device) -> int:
    """Positions whose logits are `CHUNK_NUMBERS`, or on a device what its free memory allows; at
    least one."""
    numbers = CHUNK_NUMBERS
    if device.type == "cuda":
        numbers = max(
            numbers, int(FREE_SHARE * torch.cuda.mem_get_info(device)[0]) // BYTES_OF_A_NUMBER
        )
    return max(1, numbers // vocab_size)


class _InChunks(torch.autograd.Function):
    """Gradients are made with the sum, and wait for its scale."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Output,
        judge: Judge,
        size: int,
        with_gradient: bool,
        states: Tensor,
        weights: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = [with_gradient and tensor.requires_grad for tensor in (states, *parameters)]
        trained = [
            parameter for parameter, needed in zip(parameters, wanted[1:], strict=True) if needed
        ]
        gradients = [
            torch.zeros_like(tensor)
            for tensor, needed in zip((states, *parameters), wanted, strict=True)
            if needed
        ]
        losses, accepted = (torch.zeros(len(states), device=states.device) for _ in range(2))
        at_once = size * CHUNKS_AT_ONCE if states.device.type == "cpu" else size
        for positions in torch.arange(len(states), device=states.device).split(at_once):
            part = states[positions].detach().requires_grad_(wanted[0])
            with torch.set_grad_enabled(any(wanted)):
                logits = output(part, positions)
            slopes = torch.empty_like(logits) if any(wanted) else None
            for begin in range(0, len(positions), size):
                chunk = logits[begin : begin + size].detach().requires_grad_(any(wanted))
                which = positions[begin : begin + size]
                with torch.set_grad_enabled(any(wanted)):
                    each, accept = judge(chunk, which)
                    summed = (each * weights[which]).sum()
                losses[which], accepted[which] = each.detach(), accept.detach()
                if slopes is not None:
                    slopes[begin : begin + size] = torch.autograd.grad(summed, chunk)[0]
            if slopes is not None:
                partials = list(
                    torch.autograd.grad(logits, [*([part] if wanted[0] else []), *trained], slopes)
                )
                if wanted[0]:
                    gradients[0][positions] = partials.pop(0)
                for whole, partial_ in zip(gradients[int(wanted[0]) :], partials, strict=True):
                    whole += partial_
        total = (losses * weights).sum()
        ctx.wanted = wanted
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(losses, accepted)
        return total, losses, accepted

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        states, *parameters = (next(saved) * scale if wanted else None for wanted in ctx.wanted)
        return (None, None, None, None, states, None, *parameters)
