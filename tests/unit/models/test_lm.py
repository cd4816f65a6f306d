"""How passes are split and padded, whatever model runs them."""

from __future__ import annotations

import pytest
import torch

from outrider.models.lm import PassLimits
from outrider.models.loading.load import build_lm
from tests.helpers import tiny_llama


@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16, 17])
@torch.inference_mode()
def test_no_pass_has_a_single_token(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the row that is left over when a batch is one larger than passes may be: alone it
    would take other kernels."""
    lm = build_lm(tiny_llama(50), "tiny", torch.float32, torch.device("cpu"))
    lm.limits = PassLimits(granularity=2, max_tokens_per_pass=8)
    shapes: list[tuple[int, ...]] = []
    run = lm.run
    monkeypatch.setattr(
        lm, "run", lambda ids, *rest: shapes.append(tuple(ids.shape)) or run(ids, *rest)
    )
    for _ in range(num_rows):
        lm.kv.add_row()
    logits = lm.forward(torch.full((num_rows, 1), 7)).logits
    assert logits.shape == (num_rows, 1, 50)
    assert all(1 < rows * tokens <= 8 for rows, tokens in shapes), shapes
    assert sum(rows for rows, _ in shapes) == num_rows
