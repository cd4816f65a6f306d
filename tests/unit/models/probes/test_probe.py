"""What looking at a model leaves behind when the model fails: nothing, or a later answer would be
read in its place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.models.lm import LM
from outrider.models.loading.load import build_lm
from outrider.models.probes.probe import probe_logits
from tests.helpers import tiny_llama


def test_a_pass_that_fails_leaves_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device's kernels that did not run were followed by wrong first answers: the probe's row was
    still in the cache."""
    lm = build_lm(tiny_llama(50), "tiny", torch.float32, torch.device("cpu"))
    expected = probe_logits(lm)

    def broken(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("no kernel image is available")

    with monkeypatch.context() as patch:
        patch.setattr(LM, "forward", broken)
        with pytest.raises(RuntimeError, match="kernel image"):
            probe_logits(lm)
    assert lm.kv.num_rows == 0
    assert torch.equal(probe_logits(lm), expected)
