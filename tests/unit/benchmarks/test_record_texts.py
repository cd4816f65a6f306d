"""Recorded texts must say what any length would really have met."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import Options, build
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, make_row, save_checkpoint, tiny_llama

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
NUM_TOKENS = 60


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("record_texts")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.3])
def test_every_length_meets_what_was_recorded(
    recording: Any, tmp_path: Path, temperature: float
) -> None:
    """Catches a position that is one off, a token that is not the text's, and lengths of which one
    writes another text."""
    folder = save_checkpoint(tmp_path, tiny_llama(257), byte_tokenizer())
    threads = torch.get_num_threads()
    fixed = {
        "drafter": "ngram",
        "dtype": "float32",
        "runtime": "eager",
        "threads": 1,
        "verifier": "gumbel",
    }
    params = SamplingParams(
        temperature=temperature, max_tokens=NUM_TOKENS + recording.MAX_NODES, ignore_eos=True
    )
    prompt = [5, 6, 7, 5, 6, 7, 5]
    decoder = recording.OneByOne(
        build(Options(target=str(folder), num_draft_tokens=recording.MAX_NODES, **fixed)).decoder
    )
    decoder.add(make_row(prompt, params))
    for _ in range(NUM_TOKENS):
        assert decoder.step() == [1]
    text = decoder.rows[0].output
    assert len(decoder.kept) == len(text) == NUM_TOKENS
    for length in (1, 3, recording.MAX_NODES):
        other = build(Options(target=str(folder), num_draft_tokens=length, **fixed)).decoder
        other.add(make_row(prompt, params))
        kept = []
        while len(other.rows[0].output) < NUM_TOKENS - recording.MAX_NODES:
            position = len(other.rows[0].output)
            (taken,) = other.step()
            assert taken == 1 + min(length, decoder.kept[position])
            kept.append(taken - 1)
        emitted = other.rows[0].output[:NUM_TOKENS]
        assert emitted == text[: len(emitted)]
        assert max(kept) > length // 2, (
            "hardly anything was ever kept, so hardly anything was tested"
        )
    torch.set_num_threads(threads)
