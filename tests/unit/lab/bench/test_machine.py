"""The roof, and the bytes that drafting adds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.configuration import Configuration
from outrider.drafters.model.early_exit import EarlyExitDrafter
from outrider.lab.bench.bench_result import TargetInfo
from outrider.lab.bench.machine import added_memory, bandwidth, pass_bytes, roof_tokens_per_s
from outrider.models.card import ModelCard, unknown_card


def card(**values: Any) -> ModelCard:
    return replace(unknown_card(vocab_size=100), **{"hidden_size": 8, **values})


def target(**changes: Any) -> TargetInfo:
    values = {
        "name": "t",
        "dtype": "bfloat16",
        "device": "cpu",
        "runtime": "eager",
        "threads": 1,
        "context": 64,
        "weights_bytes": 9000,
        "pass_bytes": 8000,
        "kv_bytes_per_token": 10,
        "bandwidth_bytes_per_s": 100_000.0,
    }
    return TargetInfo(**{**values, **changes})


def test_an_embedding_of_its_own_is_not_read() -> None:
    assert pass_bytes(5000, card(), torch.bfloat16) == 5000 - 100 * 8 * 2
    assert pass_bytes(5000, card(), torch.float32) == 5000 - 100 * 8 * 4


def test_a_shared_embedding_is_read_as_the_output_layer() -> None:
    assert pass_bytes(5000, card(ties_embeddings=True), torch.bfloat16) == 5000
    rounded = pass_bytes(5000, card(ties_embeddings=True), torch.bfloat16, 4)
    assert rounded == 5000 - 100 * 8 * 2, "its output layer was rounded apart from the table"


def test_mixtures_and_unknown_weights_have_no_roof() -> None:
    assert pass_bytes(5000, card(has_experts=True), torch.bfloat16) is None
    assert pass_bytes(0, card(), torch.bfloat16) is None
    assert roof_tokens_per_s(target(pass_bytes=None), 1, 10.0) is None
    assert roof_tokens_per_s(target(bandwidth_bytes_per_s=None), 1, 10.0) is None


def test_the_roof_of_a_row_falls_with_rows_and_context() -> None:
    """Weights are read once for all rows, keys and values by each."""
    assert roof_tokens_per_s(target(), 1, 0.0) == pytest.approx(100_000 / 8000)
    assert roof_tokens_per_s(target(), 4, 50.0) == pytest.approx(100_000 / (8000 + 10 * 4 * 50))


@pytest.mark.parametrize(("runtime", "added"), [("eager", 0), ("native", 9000)])
def test_early_exit_adds_weights_only_beside_a_native_target(runtime: str, added: int) -> None:
    """Its draft is the target's own layers in the target's own cache; a native target has packed
    weights of its own."""
    drafter = EarlyExitDrafter.__new__(EarlyExitDrafter)
    built = SimpleNamespace(
        decoder=SimpleNamespace(drafter=drafter, verifier=SimpleNamespace(lossless=True)),
        memory=SimpleNamespace(draft=None, target=SimpleNamespace(weights_bytes=9000)),
        options=SimpleNamespace(runtime=runtime),
        target=SimpleNamespace(lm=SimpleNamespace(dtype=torch.bfloat16), config=None),
    )
    contender = SimpleNamespace(built=built, configuration=Configuration("early-exit"))
    assert added_memory(contender) == (added, 0)  # type: ignore[arg-type]


def test_only_memory_that_we_can_read_is_measured() -> None:
    assert bandwidth(torch.device("meta")) is None
