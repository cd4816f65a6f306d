"""Passes of every kind over a model, to be made with one run and compared with another's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from outrider.models.lm import LM
from outrider.models.probes.probe import probe_tokens

PREFIX = 41  # tokens: beyond the windows of `families.py`
SHORT = 7
PARENTS = [[-1, -1, 0, 1, 2, 1, 4], [-1, 0, 0, 1, 2, 3, 3]]


@torch.inference_mode()
def every_pass(lm: LM, capture: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """Logits by the kind of pass, and hidden states of `capture` in each; the cache is empty before
    and after."""
    tokens = probe_tokens(lm.shape.vocab_size, PREFIX + 16, lm.device)
    found: dict[str, Tensor] = {}

    def note(what: str, *inputs: Any, **options: Any) -> None:
        output = lm.forward(*inputs, **options, capture=capture)
        found[what] = output.logits.float()
        found.update(
            {f"{what}, hidden {key}": states.float() for key, states in output.hidden.items()}
        )

    for _ in range(2):
        lm.kv.add_row()
    for row, length in enumerate((PREFIX, SHORT)):
        note(f"prompt {row}", tokens[:, :length], first_row=row)
        lm.kv.advance(row, length)
    behind = torch.stack([tokens[0, PREFIX : PREFIX + 8], tokens[0, SHORT : SHORT + 8]])
    note("trees", behind, torch.tensor(PARENTS, device=lm.device))
    note("one tree", behind[:1], torch.tensor(PARENTS[:1], device=lm.device))
    note("chains", behind)
    note("last column", behind, columns=torch.tensor([7], device=lm.device))
    note("single tokens", behind[:, :1])
    note("second row", behind[1:], first_row=1)
    for _ in range(2):
        lm.kv.swap_remove(0)
    return found


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference as a share of the largest number, by the kind of pass."""
    assert found.keys() == expected.keys()
    return {
        what: ((found[what] - numbers).abs().max() / numbers.abs().max()).item()
        for what, numbers in expected.items()
    }
