"""Muon for the hidden matrices, AdamW for embeddings and norms, and the schedule of both.

Why not `torch.optim.Muon`: it orthogonalises one matrix at a time (4.5 s a step for the 14M target
on two CPU cores); the same five products over all matrices of one shape at once take 0.5 s.
Mathematics: Keller Jordan, "Muon", 2024, with the quintic coefficients given there.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

# quintic Newton-Schulz: steep at zero, singular values end in 0.7 .. 1.2
_A = 3.4445
_B = -4.7750
_C = 2.0315


def orthogonalise(matrices: Tensor, iterations: int) -> Tensor:
    """(M, rows, columns) -> nearest semi-orthogonal matrices, roughly, in bf16."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.size(-2) > x.size(-1)
    x = x.mT.contiguous() if tall else x
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


class BatchedMuon(torch.optim.Optimizer):
    """Muon with Nesterov momentum; all parameters of one shape are updated together."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        iterations: int = 5,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "weight_decay": weight_decay,
                "iterations": iterations,
            },
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                updates = [self._momentum(parameter, group["momentum"]) for parameter in parameters]
                directions = orthogonalise(torch.stack(updates), group["iterations"]).float()
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for parameter, update in zip(parameters, directions, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-group["lr"] * scale)

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return parameter.grad.lerp(state["momentum"], momentum)


class Optimizers:
    """Both optimizers behind one step; `scale` in 0..1 multiplies both learning rates."""

    def __init__(self, model: nn.Module, muon_lr: float, adam_lr: float) -> None:
        hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        chosen = {id(p) for p in hidden}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.rates = (muon_lr, adam_lr)
        self.parts = (
            BatchedMuon(hidden, lr=muon_lr),
            torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, scale: float) -> None:
        for part, rate in zip(self.parts, self.rates, strict=True):
            for group in part.param_groups:
                group["lr"] = rate * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def warmup_stable_decay(
    step: int, progress: float, *, warmup_steps: int = 40, decay_from: float = 0.6
) -> float:
    """Learning-rate factor. The warmup counts steps; the decay follows progress, so a wall-clock
    budget can end it.
    """
    warm = min(1.0, (step + 1) / warmup_steps)
    cool = min(1.0, (1.0 - progress) / (1.0 - decay_from))
    return warm * max(cool, 0.02)
