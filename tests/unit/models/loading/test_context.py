"""The length of the context: what cannot be held is refused with both numbers, what is held to less
is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.build import notes_of_drafter
from outrider.cli import app
from outrider.configuration import Configuration
from outrider.engine.engine import make_engine
from outrider.errors import ConfigError
from outrider.lab.runner import Runner
from outrider.llm import LLM
from outrider.options import Options
from outrider.sampling.params import SamplingParams
from tests.contract.test_architectures import GROUPED, HELD, REACH, VOCAB, make_module
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

QUIET: dict[str, Any] = {"runtime": "eager", "dtype": "float32"}
# tokens that the models hold
TARGET = 256
DRAFT = 64


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("target"),
        tiny_llama(96, max_position_embeddings=TARGET),
        word_tokenizer(96),
    )


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(
        tmp_path_factory.mktemp("draft"),
        tiny_llama(96, 1, max_position_embeddings=DRAFT),
        word_tokenizer(96),
    )


def test_more_than_the_config_names_is_refused(target: Path) -> None:
    """It was lowered in silence, to be found out when a long prompt was refused."""
    with pytest.raises(ConfigError) as refused:
        LLM(target, drafter="none", max_model_len=TARGET + 1, **QUIET)
    assert str(refused.value) == (
        f"max_model_len 257 is more than '{target}' can hold: 256 tokens (max_position_embeddings in its config.json). "
        "Give at most 256, or leave it out; a longer context takes a checkpoint that was made for one."
    )
    with pytest.raises(ConfigError, match="max_model_len 257 is more than"):
        make_engine(Options(target=str(target), drafter="none", max_model_len=257, **QUIET))
    for asked in (TARGET, 17):
        assert (
            LLM(target, drafter="none", max_model_len=asked, **QUIET).config["max_model_len"]
            == asked
        )


@pytest.mark.slow
def test_yarn_stretches_what_the_config_names(tmp_path: Path) -> None:
    """Qwen's cards say to add the factor alone; vLLM multiplies, too. Positions behind the named
    ones are the stretched ones."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny_llama(96, max_position_embeddings=40, rope_parameters=yarn)
    folder = save_checkpoint(tmp_path, model, word_tokenizer(96))
    prompt = [3 + number % 90 for number in range(60)]
    llm = LLM(folder, drafter="none", max_model_len=128, dtype="float32")
    assert LLM(folder, drafter="none", **QUIET).config["max_model_len"] == 128
    found = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[
        0
    ].token_ids
    own = model.eval().generate(
        torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
    )
    assert list(found) == own[0, 60:].tolist()
    with pytest.raises(
        ConfigError, match=r"max_model_len 129 is more than .* can hold: 128 tokens"
    ):
        LLM(folder, drafter="none", max_model_len=129, **QUIET)


def test_the_command_line_refuses_it_before_loading(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        app.run(["generate", str(target), "w3", "--max-model-len", "9999", "--drafter", "none"])
        == 2
    )
    errors = capsys.readouterr().err
    assert "max_model_len 9999 is more than" in errors
    assert "loading" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-moe", "phimoe"])
def test_a_context_that_our_attention_shortens_is_reported(name: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, make_module(*HELD[name]), word_tokenizer(96))
    llm = LLM(folder, drafter="none", **QUIET)
    assert llm.config["max_model_len"] == REACH
    held = f"'{folder}' holds {REACH} tokens here, not the 128 of its config"
    assert f"{held}: after them its code hides tokens" in llm.notes[0]
    assert LLM(folder, drafter="none", max_model_len=REACH, **QUIET).notes == llm.notes[1:]
    with pytest.raises(
        ConfigError,
        match=rf"max_model_len 100 is more than '.*' can hold here: {REACH} tokens \(after them",
    ):
        LLM(folder, drafter="none", max_model_len=100, **QUIET)


def test_long_rope_is_reported(tmp_path: Path) -> None:
    """Phi-3 with 128k tokens: held to the original 4k."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 32,
    }
    folder = save_checkpoint(
        tmp_path,
        tiny_llama(96, max_position_embeddings=128, rope_parameters=rope),
        word_tokenizer(96),
    )
    llm = LLM(folder, drafter="none", **QUIET)
    held = f"'{folder}' holds 32 tokens here, not the 128 of its config"
    assert f"{held}: its positions beyond are scaled by LongRoPE" in llm.notes[0]


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 5.0, 6.0, 7.0],
    "original_max_position_embeddings": 64,
}  # fmt: skip
CHANGING = {
    "phi3": ("Phi3", {"original_max_position_embeddings": 64, "rope_parameters": {  # as Phi-4 mini
        **LONG_ROPE, "short_factor": [1.0, 1.5, 2.0], "long_factor": [4.0, 5.0, 6.0], "partial_rotary_factor": 0.75}}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}),
    "by kind": ("Gemma3", {"head_dim": 8, "layer_types": ["full_attention"] * 2, "rope_parameters": {
        "full_attention": LONG_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGING)
def test_positions_that_would_change_beyond_the_context_run_natively_within(
    name: str, tmp_path: Path
) -> None:
    """Catches tables of the other factors, which transformers' code makes once it is asked for one
    position too many."""
    family, options = CHANGING[name]
    longest = 64 if name == "dynamic" else 256
    module: Any = make_module(
        family, {**GROUPED, "num_hidden_layers": 2, "max_position_embeddings": longest, **options}
    )
    folder = save_checkpoint(tmp_path, module, word_tokenizer(VOCAB))
    llm = LLM(folder, drafter="ngram", dtype="float32", threads=1)
    assert llm.config["runtime"] == "native"
    assert llm.config["max_model_len"] == 64
    assert llm.config["exact"] is True
    prompt = [5, 6, 7, 8, 5, 6, 7]
    found = llm.generate([prompt], SamplingParams(max_tokens=57, ignore_eos=True))[0].token_ids
    expected = module.generate(
        torch.tensor([prompt]),
        max_new_tokens=57,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert found == expected[0, len(prompt) :].tolist()
    # from what the first start kept
    again = LLM(folder, drafter="none", dtype="float32", threads=1)
    assert (
        again.generate([prompt], SamplingParams(max_tokens=57, ignore_eos=True))[0].token_ids
        == found
    )


@pytest.mark.slow
def test_a_draft_with_a_shorter_context_says_so_once(target: Path, draft: Path) -> None:
    """It drafts nothing in a longer text: only a server reported so."""
    llm = LLM(target, draft=draft, **QUIET)
    note = (
        f"the draft '{draft}' holds 64 tokens, rows may have 256: beyond 64 nothing is drafted "
        "(--max-model-len 64, a draft with a longer context, or its option window=auto)"
    )
    assert llm.notes.count(note) == 1
    assert llm.generate([[3] * (DRAFT + 1)], SamplingParams(max_tokens=4))[0].stats.drafted == 0
    assert note not in LLM(target, draft=draft, max_model_len=DRAFT, **QUIET).notes
    assert note in make_engine(Options(target=str(target), draft=str(draft), **QUIET)).notes


def test_the_command_line_says_so_once_and_in_json(
    target: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "generate",
        str(target),
        "w3 w4",
        "--draft",
        str(draft),
        "--max-tokens",
        "2",
        "--json",
    ]
    arguments += ["--runtime", "eager"]
    assert app.run(arguments) == 0
    found = capsys.readouterr()
    assert found.err.count("holds 64 tokens, rows may have 256") == 1
    assert (
        sum("holds 64 tokens, rows may have 256" in note for note in json.loads(found.out)["notes"])
        == 1
    )


def test_bench_says_so_once(target: Path, draft: Path) -> None:
    """Its results take the notes of the loaded models, and those of each drafter."""
    configuration = Configuration.parse("draft-model")
    runner = Runner(Options(target=str(target), draft=str(draft), **QUIET), [configuration])
    built = runner.open(configuration).built
    drafters = notes_of_drafter(built.decoder.drafter, built.draft, built.context)
    notes = [*runner.models.notes, *drafters]
    assert sum("holds 64 tokens, rows may have 256" in note for note in notes) == 1


def test_a_full_context_is_reported(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--max-tokens beyond the context ended as "the length limit", which nobody had asked for."""
    arguments = ["generate", str(target), "w3 w4", "--drafter", "none", "--json"]
    arguments += ["--runtime", "eager", "--max-model-len", "9"]
    assert app.run([*arguments, "--max-tokens", "50"]) == 0
    found = capsys.readouterr()
    note = "the context of 9 tokens is full: 7 of up to 50 new tokens after 2 of the prompt"
    assert note in found.err
    assert note in json.loads(found.out)["notes"]
    assert app.run([*arguments, "--max-tokens", "7"]) == 0
    assert "is full" not in capsys.readouterr().err


def test_threads_by_the_thousand_are_refused(target: Path) -> None:
    """They did not come to an end."""
    with pytest.raises(
        ConfigError, match=r"threads must be between 1 and \d+ on this machine, got 4096"
    ):
        LLM(target, drafter="none", threads=4096, **QUIET)


def test_a_revision_of_a_local_folder_is_refused(target: Path) -> None:
    """It was ignored: a folder has one version."""
    for name in (str(target), "demo"):
        with pytest.raises(
            ConfigError,
            match=f"revision 'v2' names a version on the hub, but '{name}' is a local folder",
        ):
            LLM(name, drafter="none", revision="v2", **QUIET)
