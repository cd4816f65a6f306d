"""What a step and a target pass cost on this machine, measured before anything is predicted from it.

Steps are timed whole, with the real drafter and verifier, while the draft length sweeps over the lengths of interest step by
step: so a slow moment of the machine hits all lengths alike, and nothing that a step does is forgotten. Passes of the target
alone show where its kernels jump (on CPUs a ninth token costs a third more).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

from outrider.lab.runner import Contender
from outrider.models.lm import LM
from outrider.rows import Rows
from outrider.step import StepFacts

SKIPPED = 2  # first steps of a run, which touch new memory
PASS_REPEATS = 9


class Sweep:
    """A `Control` that asks for another length every step, round and round."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.asked: list[int] = []  # step by step, what rows had room for aside

    def choose(self, rows: Rows) -> list[int]:
        asked = self.lengths[len(self.asked) % len(self.lengths)]
        self.asked.append(asked)
        return [max(0, min(asked, row.room - 1)) for row in rows]

    def observe(self, facts: StepFacts) -> None:
        """Nothing to learn."""

    def summary(self) -> dict[str, Any]:
        return {"sweep": self.lengths}


@contextmanager
def sweeping(contender: Contender, lengths: Sequence[int]) -> Iterator[Sweep]:
    """While it lasts, `contender` sweeps over draft lengths (none above the one it was built for)."""
    sweep, decoder = Sweep(lengths), contender.built.decoder
    own, decoder.control = decoder.control, sweep
    try:
        yield sweep
    finally:
        decoder.control = own


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
