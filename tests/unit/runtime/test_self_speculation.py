"""Drafts made of the target's own weights, where the target runs on the native runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Options, build
from outrider.decode import Decoder
from outrider.drafters.model.self_speculation import SelfDrafter
from outrider.models.heads.exit import ExitConfig, ExitHead
from outrider.runtime.drafting import ChainLoop
from outrider.runtime.run import NativeRun
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint, tiny_llama

PROMPTS = [[5, 17, 3, 60, 41, 8, 22], [9, 9], list(range(30, 50))]
GREEDY = SamplingParams(max_tokens=40)
WARM = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9)
HOW: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("quantised", {"bits": 8}),
    "int4": ("quantised", {"bits": 4, "quantise_head": False}),
    "exit": ("early-exit", {"exit_layer": 1}),
    "skip": ("early-exit", {"skip_layers": "0"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, library_path: Path) -> Path:
    model = tiny_llama(257, sharpness=2.0, num_hidden_layers=2)
    return save_checkpoint(tmp_path_factory.mktemp("model"), model, byte_tokenizer())


def decoder_of(folder: Path, drafter: str, dtype: str = "bfloat16", **settings: object) -> Decoder:
    options = Options(
        target=str(folder),
        dtype=dtype,
        runtime="native",
        drafter=drafter,
        drafter_options=settings,
        threads=2,
        num_draft_tokens=None if drafter == "none" else 4,
    )
    return build(options).decoder


def texts(decoder: Decoder, params: SamplingParams) -> list[list[int]]:
    for number, prompt in enumerate(PROMPTS):
        decoder.add(make_row(prompt, params, seed=number, number=number))
    return [row.tokens for row in run_to_end(decoder)]


@pytest.mark.slow
@pytest.mark.parametrize("how", HOW)
def test_its_draft_is_on_the_runtime_and_changes_no_text(folder: Path, how: str) -> None:
    """Catches a draft that writes where the target reads, a loop on another cache than the
    target's, and a chain that is not the derived model's own."""
    name, settings = HOW[how]
    decoder = decoder_of(folder, name, **settings)
    drafter = decoder.drafter
    assert isinstance(drafter, SelfDrafter)
    assert isinstance(drafter.lm.run, NativeRun)
    assert isinstance(drafter._loop, ChainLoop)
    for number, prompt in enumerate(PROMPTS):
        decoder.add(make_row(prompt, WARM if number else GREEDY, seed=number, number=number))
    with torch.inference_mode():
        decoder.target.catch_up([row.tokens for row in decoder.rows])
        whole = drafter.propose(decoder.rows, [4, 4, 4])
        drafter._loop, loop = None, drafter._loop
        stepwise = drafter.propose(decoder.rows, [4, 4, 4])
        drafter._loop = loop
    assert whole.lists == stepwise.lists
    while len(decoder.rows):
        decoder.remove(0)
    assert texts(decoder, GREEDY) == texts(decoder_of(folder, "none"), GREEDY)
    assert len(texts(decoder, WARM)) == len(PROMPTS)


@pytest.mark.slow
def test_weights_that_were_left_alone_are_shared(folder: Path) -> None:
    decoder = decoder_of(folder, "early-exit", exit_layer=1)
    theirs, ours = (
        {op.weight for op in lm.run.executor._binding._ops if op.format < 2 and op.weight}  # type: ignore[attr-defined]
        for lm in (decoder.target, decoder.drafter.lm)  # type: ignore[attr-defined]
    )
    assert len(ours) > 7
    assert ours <= theirs


@pytest.mark.slow
def test_an_exit_head_is_lowered_with_the_draft(folder: Path, tmp_path: Path) -> None:
    head = ExitHead(ExitConfig(hidden_size=64, exit_layer=1, num_layers=2, rank=4, target="tiny"))
    torch.nn.init.normal_(head.up.weight, std=0.1)
    head.save(tmp_path)
    decoder = decoder_of(folder, "early-exit", head=str(tmp_path))
    assert isinstance(decoder.drafter.lm.run, NativeRun)  # type: ignore[attr-defined]
    assert texts(decoder, GREEDY) == texts(decoder_of(folder, "none"), GREEDY)


@pytest.mark.slow
def test_a_copy_that_has_no_kernel_there_runs_torchs_and_says_so(folder: Path) -> None:
    """In fp32 our kernel does not serve it."""
    decoder = decoder_of(folder, "quantised", "float32", bits=8)
    drafter = decoder.drafter
    assert isinstance(drafter, SelfDrafter)
    assert not isinstance(drafter.lm.run, NativeRun)
    assert drafter.notes[-1].endswith(
        "runs without the native runtime: weights in 4 and 8 bits multiply bfloat16 there"
    )
    assert texts(decoder, GREEDY) == texts(decoder_of(folder, "none", "float32"), GREEDY)
