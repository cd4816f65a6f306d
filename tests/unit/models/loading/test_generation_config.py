"""What a generation config sets and does not set, by vLLM's rule, and what is reported about it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from outrider.errors import ConfigError
from outrider.models.loading.generation_config import (
    SamplingDefaults,
    asked_of,
    checked_choice,
    sampling_defaults,
)
from outrider.sampling.params import SamplingParams


def defaults(choice: str = "auto", **fields: Any) -> SamplingDefaults:
    model: Any = SimpleNamespace(
        name="hub/id", generation_config=asked_of(GenerationConfig(**fields))
    )
    return sampling_defaults(choice, model, 100)


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({}, {}),
        (
            {
                "eos_token_id": [1, 2],
                "pad_token_id": 0,
                "transformers_version": "4",
                "use_cache": True,
                "chat_format": "x",
            },
            {},
        ),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.6, "top_p": 0.95}),
        (
            {"do_sample": True, "top_k": 64, "top_p": 0.95},
            {"top_k": 64, "top_p": 0.95, "temperature": 1.0},
        ),
        ({"top_p": 0.9}, {"top_p": 0.9, "temperature": 1.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.0}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
        (
            {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0},
            {"temperature": 1.0},
        ),
        (
            {"repetition_penalty": 1.05, "min_p": 0.1},
            {"min_p": 0.1, "repetition_penalty": 1.05, "temperature": 1.0},
        ),
        ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"max_new_tokens": 256}, {"max_tokens": 256}),
    ],
)
def test_what_is_taken(fields: dict[str, Any], values: dict[str, Any]) -> None:
    """A filter without a temperature means temperature 1, as in vLLM: at ours, 0, it would be
    without effect."""
    assert defaults(**fields).values == values
    assert defaults("none", **fields).values == {}


def test_what_is_reported() -> None:
    assert defaults(eos_token_id=1).notes == ()
    assert defaults(temperature=0.6, top_p=0.95).notes == (
        "sampling defaults from generation_config.json: temperature 0.6, top_p 0.95 (generation_config=none ignores them)",
    )
    assert (
        "do_sample=false, which is not looked at"
        in defaults(do_sample=False, temperature=0.7).notes[1]
    )
    assert (
        defaults("none", temperature=0.6, num_beams=4).unused
        == "generation_config.json asks for temperature 0.6, num_beams=4"
    )
    assert defaults("none", eos_token_id=1).unused == ""


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"num_beams": 4}, "num_beams=4"),
        ({"suppress_tokens": [1, 2]}, "suppress_tokens=[1, 2]"),
        ({"begin_suppress_tokens": [220, 50257]}, "begin_suppress_tokens=[220, 50257]"),
        (
            {"forced_eos_token_id": 7, "no_repeat_ngram_size": 3},
            "no_repeat_ngram_size=3, forced_eos_token_id=7",
        ),
        ({"typical_p": 0.9}, "typical_p=0.9"),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
        ({"epsilon_cutoff": 3e-4}, "epsilon_cutoff=0.0003"),
        ({"sequence_bias": [[[1], -1.0]]}, "sequence_bias=[[[1], -1.0]]"),
        ({"min_new_tokens": 5, "stop_strings": ["\n"]}, 'min_new_tokens=5, stop_strings=["\\n"]'),
        ({"max_length": 50}, "max_length=50"),
        ({"bad_words_ids": [[n] for n in range(40)]}, "bad_words_ids=[[0], [1], [2]"),
    ],
)
def test_what_cannot_be_honoured_is_named(fields: dict[str, Any], named: str) -> None:
    """Once, whether or not something else is taken."""
    (note,) = defaults(**fields).notes
    assert note.startswith(f"generation_config.json asks for {named}")
    assert note.endswith("not supported here and ignored")


@pytest.mark.parametrize(
    "fields",
    [
        {
            "num_beams": 1,
            "no_repeat_ngram_size": 0,
            "typical_p": 1.0,
            "epsilon_cutoff": 0.0,
            "suppress_tokens": [],
        },
        {"max_length": 100},
        {"max_length": 50, "max_new_tokens": 9},
        {"max_length": 20},
        {"token_healing": False},
        {
            "do_sample": True,
            "num_return_sequences": 2,
            "early_stopping": True,
            "renormalize_logits": True,
        },
    ],
)
def test_what_changes_no_text_is_not_mentioned(fields: dict[str, Any]) -> None:
    assert not any("not supported" in note for note in defaults(**fields).notes)


def test_a_wrong_value_is_left_out_and_named() -> None:
    """A mistake in a model's file must not keep it from being used, nor reach a request that did
    not ask for it."""
    config = GenerationConfig()
    config.temperature = "hot"
    config.top_p = 0.9
    model: Any = SimpleNamespace(name="hub/id", generation_config=asked_of(config))
    found = sampling_defaults("auto", model, 100)
    assert found.values == {"top_p": 0.9, "temperature": 1.0}
    assert (
        "generation_config.json is ignored where it is wrong: temperature must be a number, got 'hot'"
        in found.notes
    )


def test_a_folder_of_one_s_own(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"temperature": 0.3}')
    assert defaults(str(tmp_path), temperature=0.9).values == {"temperature": 0.3}
    assert f"sampling defaults from {file}: temperature 0.3" in defaults(str(tmp_path)).notes[0]
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot read "):
        defaults(str(tmp_path))
    with pytest.raises(ConfigError, match="must be auto, none or a folder with generation_config"):
        checked_choice("x")


def test_older_checkpoints_have_it_in_config_json(tmp_path: Path) -> None:
    model: Any = SimpleNamespace(
        name=str(tmp_path), generation_config=asked_of(GenerationConfig(temperature=0.5))
    )
    assert (
        sampling_defaults("auto", model, 100)
        .notes[0]
        .startswith("sampling defaults from config.json: temperature 0.5")
    )
    (tmp_path / "generation_config.json").write_text("{")
    assert (
        "generation_config.json is not JSON and was not read"
        in sampling_defaults("auto", model, 9).notes[1]
    )


def test_given_values_win() -> None:
    found = defaults(temperature=0.6, top_p=0.95)
    assert found.params(temperature=0) == SamplingParams(temperature=0, top_p=0.95)
