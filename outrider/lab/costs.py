"""What passes of a target take on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from outrider.models.lm import LM

PASS_REPEATS = 9


@torch.inference_mode()
def measure_passes(
    target: LM, num_tokens: Sequence[int], *, rows: int = 1, context: int = 256, repeats: int = PASS_REPEATS
) -> dict[int, float]:
    """Query tokens per row -> median seconds of one target pass over `rows` rows with `context` cached tokens each."""
    kv = target.kv
    filler = torch.arange(context) % (target.shape.vocab_size - 1)
    for _ in range(rows):
        kv.add_row()
    try:
        target.catch_up([[*filler.tolist(), 0]] * rows)
        times: dict[int, list[float]] = {count: [] for count in num_tokens}
        for _ in range(repeats):
            for count, found in times.items():
                tokens = torch.zeros(rows, count, dtype=torch.int64, device=target.device)
                target.forward(tokens)  # the change from another width is not to be timed
                start = time.perf_counter()
                target.forward(tokens).logits.max().item()  # waits for a device, too
                found.append(time.perf_counter() - start)
    finally:
        for _ in range(rows):
            kv.swap_remove(0)
    return {count: median(found) for count, found in times.items()}
