"""The target's features of padded texts, computed and from the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from outrider.train.feature_cache import FeatureCache
from outrider.train.features import FeatureSource
from outrider.train.texts import TrainingText, collate
from tests.helpers import tiny_llama
from tests.unit.train.head_material import VOCAB, target_module

TEXTS = [
    TrainingText("long", [5, 6, 7], list(range(10, 30))),
    TrainingText("short", [8], [9, 10, 11]),
]
CPU = torch.device("cpu")


def test_padding_changes_nothing_before_a_text_ends() -> None:
    """The pass has no mask: catches padding on the left, which every token would see."""
    source = FeatureSource(target_module(), (1, 2))
    both = source.features(collate(TEXTS, [0, 1], CPU))
    for row, text in enumerate(TEXTS):
        alone = source.features(collate(TEXTS, [row], CPU))
        length = len(text.tokens)
        torch.testing.assert_close(both.logits[row, :length], alone.logits[0])
        for layer in (1, 2):
            torch.testing.assert_close(both.hidden[layer][row, :length], alone.hidden[layer][0])


@pytest.mark.parametrize("capped", [False, True])
def test_the_cache_gives_back_what_was_computed(tmp_path: Path, capped: bool) -> None:
    """Logits are kept only where the output layer alone does not make them: a target that scales
    its logits is one."""
    module = tiny_llama(VOCAB, num_hidden_layers=3).requires_grad_(False)
    if capped:
        plain = module.forward
        module.forward = lambda **given: _halved(plain(**given))
    source = FeatureSource(module, (1,), FeatureCache(tmp_path, 10**6))
    batch = collate(TEXTS, [0, 1], CPU)
    computed = source.features(batch)
    cached = source.features(batch)
    torch.testing.assert_close(cached.logits[batch.mask], computed.logits[batch.mask])
    for row, text in enumerate(TEXTS):
        length = len(text.tokens)
        assert torch.equal(cached.hidden[1][row, :length], computed.hidden[1][row, :length])
    with safe_open(tmp_path / "train-0.safetensors", "pt") as kept:
        assert ("logits" in kept.keys()) == capped  # noqa: SIM118


def _halved(output: Any) -> Any:
    output.logits = output.logits / 2
    return output
