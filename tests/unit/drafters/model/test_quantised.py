"""The quantised target as a draft: what it drafts, what it costs, what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.build import Built, Options, build
from outrider.drafters.model import quantised
from outrider.errors import CapabilityError, ConfigError
from outrider.models.derived.derive import own_module
from outrider.models.lm import LM
from outrider.sampling.params import SamplingParams
from tests.helpers import byte_tokenizer, make_row, run_to_end, save_checkpoint, tiny_llama

PROMPT = [5, 17, 3, 60, 41, 8, 22]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("model"), tiny_llama(257, sharpness=2.0), byte_tokenizer()
    )


def built(folder: Path, dtype: str = "float32", **settings: object) -> Built:
    return build(
        Options(
            target=str(folder),
            dtype=dtype,
            runtime="eager",
            drafter="quantised",
            drafter_options=settings,
            num_draft_tokens=4,
        )
    )


@torch.inference_mode()
def continued(draft: LM, target: LM, tokens: list[int], count: int) -> list[int]:
    """Greedy decoding by hand behind a prompt that the target has read, all new tokens fed again
    for each."""
    lm = target.twin()
    text = list(tokens)
    lm.kv.add_row()
    lm.catch_up([text])
    lm.run = draft.run
    for _ in range(count):
        text.append(int(lm.forward(torch.tensor([text[len(tokens) - 1 :]])).logits[0, -1].argmax()))
    return text[len(tokens) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"bits": 8}, {"group_size": 128, "quantise_head": False}], ids=str
)
def test_it_drafts_what_the_quantised_model_says(folder: Path, settings: dict[str, object]) -> None:
    """Catches drafting with the target itself, and a draft that does not begin behind the target's
    own keys and values."""
    decoder = built(folder, **settings).decoder
    drafter = decoder.drafter
    expected = continued(drafter.lm, decoder.target, PROMPT, 4)
    decoder.add(make_row(PROMPT, SamplingParams(max_tokens=20)))
    with torch.inference_mode():
        decoder.target.catch_up([PROMPT])
        assert drafter.propose(decoder.rows, [4]).tokens[0].tolist() == expected
        decoder.target.kv.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bits_are_nearly_always_right(folder: Path, dtype: str) -> None:
    """Catches weights that are quantised to something else: 8 bits of the right ones agree nearly
    everywhere."""
    decoder = built(folder, dtype, bits=8).decoder
    decoder.add(make_row(PROMPT, SamplingParams(max_tokens=60)))
    stats = run_to_end(decoder)[0].stats
    assert stats.accepted > 0.8 * stats.tested


@pytest.mark.slow
def test_memory_is_reported_and_weighed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy that no note reports, and one that is made where it does not fit."""
    drafter = built(folder, bits=8).decoder.drafter
    # embeddings are shared
    parameters = sum(p.numel() for p in tiny_llama(257).parameters() if p.dim() > 1) - 257 * 64
    assert parameters < drafter.added_bytes < 1.1 * parameters
    assert drafter.notes == ["the int8 draft takes 0.1 MiB alongside the target"]
    assert drafter.lm.kv.allocated_bytes == 0, "keys and values are the target's"
    monkeypatch.setattr(quantised, "available_memory", lambda device: 1000)
    with pytest.raises(
        CapabilityError, match=r"not enough memory for the int8 draft.*try bits=4, "
    ):
        built(folder, bits=8)
    with pytest.raises(CapabilityError, match="try --drafter early-exit"):
        built(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "bits must be 4 or 8, got 5"),
        ({"bits": 8, "group_size": 64}, "group_size is for bits=4"),
        ({"group_size": 48}, "group_size must be 32, 64 or 128, got 48"),
    ],
)
def test_bad_settings(settings: dict[str, object], message: str) -> None:
    """Refused by name, before a model is read: the folder does not even exist."""
    with pytest.raises(ConfigError, match=message):
        built(Path("nowhere"), **settings)


def test_a_module_that_was_not_kept() -> None:
    """Catches an AttributeError deep inside instead of a sentence."""
    with pytest.raises(CapabilityError, match="'quantised' runs on the target's own weights"):
        own_module(None, "quantised")
