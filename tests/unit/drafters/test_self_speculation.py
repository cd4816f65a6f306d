"""Drafts made of the target's own weights, where the target is compiled: in a program of their own, on native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.drafters.programs import ProgramLoop
from outrider.models import compile as compiling
from outrider.models import native
from outrider.models.draft_loop import DraftLoop
from outrider.models.picking import Draws
from outrider.models.quantised_linear import QuantisedPanels
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint, tiny_llama

PROMPT = [5, 17, 3, 60, 41, 8, 22]
GREEDY = SamplingParams(max_tokens=60)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        compiling.cannot_compile() is not None or not native.is_supported(torch.device("cpu"), torch.bfloat16),
        reason="needs a C++ compiler and AVX2 or AVX-512",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), tiny_llama(257, sharpness=2.0), byte_tokenizer())


def decoder_of(folder: Path, compiled: str, drafter: str, **settings: object) -> Decoder:
    options = Options(
        target=str(folder), dtype="bfloat16", compile=compiled, drafter=drafter, drafter_options=settings, threads=2,
        num_draft_tokens=None if drafter == "none" else 4,
    )  # fmt: skip
    return build(options).decoder


class CountedLoop(DraftLoop):
    """Counts its calls."""

    calls = 0

    def __call__(self, pending: Sequence[list[int]], draws: Draws, num_tokens: int) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().__call__(pending, draws, num_tokens)


@pytest.mark.parametrize("how", [("quantised", {"bits": 8}), ("early-exit", {"exit_layer": 1})], ids=str)
def test_a_compiled_target_has_a_compiled_draft(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: tuple[str, dict[str, object]]
) -> None:
    """Catches a program with other weights than the draft's, on another cache than the target's, or never called; and a text that
    depends on it."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    name, settings = how
    decoder = decoder_of(folder, "on", name, **settings)
    drafter, target = decoder.drafter, decoder.target
    decoder.add(make_row(PROMPT, GREEDY))
    with torch.inference_mode():
        target.catch_up([PROMPT])
        drafted = drafter.propose(decoder.rows, [4])
        stepwise = drafter._propose_stepwise(decoder.rows, drafter._catch_up(decoder.rows), [4])
    assert drafted.tokens.tolist() == stepwise.tokens.tolist()
    loop = CountedLoop(drafter.lm, drafter._loop._loop._programs)
    drafter._loop = ProgramLoop(loop)
    row = run_to_end(decoder)[0]
    assert loop.calls >= row.stats.steps - 1
    plain = decoder_of(folder, "on", "none")
    plain.add(make_row(PROMPT, GREEDY))
    assert run_to_end(plain)[0].tokens == row.tokens
    assert decoder_of(folder, "auto", name, **settings).drafter._loop is not None, "auto takes the program that is there"
    if name == "quantised":
        assert isinstance(drafter.lm.run.module.lm_head, QuantisedPanels)
        assert row.stats.accepted > 0.8 * row.stats.tested
