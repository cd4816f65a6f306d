"""Calibrated confidences by sequential temperature scaling (DSpark, 2607.05147).

A confidence c_k is the chance that draft token k is accepted, given that those before it are;
drafting decides by the product c_1 ... c_k. So each position gets a temperature of its own, left to
right: that which makes the PRODUCT up to it best calibrated, the temperatures before it being
fixed. One number per position cannot overfit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_BINS = 10
GRID = torch.logspace(-1.0, 1.0, 41, base=4.0)  # temperatures 1/4 .. 4, 1 among them


@dataclass(frozen=True)
class Calibration:
    """Temperatures by position, and the mean calibration error of the products without and with
    them."""

    temperatures: tuple[float, ...]
    error_before: float
    error_after: float


def sequential_temperatures(logits: Tensor, accepted: Tensor, counts: Tensor) -> Calibration:
    """`logits` (N, K) of the confidences, `accepted` (N, K) the true chances, `counts` (N, K) bool
    which are known.

    Where a position has no sample its temperature is 1.
    """
    logits = logits.double()
    accepted = accepted.double()
    truth = accepted.cumprod(dim=1)
    before = torch.sigmoid(logits).cumprod(dim=1)
    product = torch.ones_like(truth[:, 0])
    temperatures = []
    errors = []
    plain = []
    for k in range(logits.shape[1]):
        known = counts[:, k]
        best = 1.0
        if bool(known.any()):
            trials = [
                (
                    expected_calibration_error(
                        (product * torch.sigmoid(logits[:, k] / t))[known], truth[known, k]
                    ),
                    abs(t.log()),
                    t,
                )
                for t in GRID.double()
            ]  # among equals the temperature nearest to 1
            error, _, chosen = min(trials)
            best = float(chosen)
            errors.append(error)
            plain.append(expected_calibration_error(before[known, k], truth[known, k]))
        product = product * torch.sigmoid(logits[:, k] / best)
        temperatures.append(round(best, 4))
    num = max(len(errors), 1)
    return Calibration(tuple(temperatures), sum(plain) / num, sum(errors) / num)


def expected_calibration_error(confidence: Tensor, true: Tensor) -> float:
    """Calibration error over ten equal bins of the confidences: mean of |mean confidence - mean
    true|, weighted by size. (N,) each.
    """
    bins = (confidence * NUM_BINS).long().clamp(0, NUM_BINS - 1)
    size = torch.zeros(NUM_BINS, dtype=confidence.dtype, device=confidence.device)
    # |sum of differences| = size times the gap of the means
    gap = size.index_add(0, bins, confidence - true)
    return float(gap.abs().sum() / max(len(confidence), 1))
