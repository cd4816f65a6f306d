"""Heads that come with Outrider: each is whole, small, and drafts for the model that the table names
without changing a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider import LLM, SamplingParams
from outrider.drafters.companions import Target, choose_companion, offer, published
from outrider.models.heads.on_hub import fetched_head
from outrider.models.heads.shipped import HEADS, shipped_head
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

NAMES = sorted(folder.name for folder in HEADS.iterdir() if folder.is_dir())
MAX_BYTES = 12_000_000


@pytest.mark.parametrize("name", NAMES)
def test_a_head_is_whole_and_small(name: str) -> None:
    folder = shipped_head(name)
    assert folder is not None
    assert fetched_head(name) == str(folder)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
    card = (folder / "README.md").read_text(encoding="utf-8")
    (entry,) = (each for each in published() if each.drafter == name)
    assert card.startswith("---\n")
    assert f"license: {entry.licence}\n" in card
    assert entry.target in card
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert entry.kind == config["outrider"]["head"]


@pytest.mark.parametrize("name", ["", ".", "..", "../eagle.py", "none", f"x/{NAMES[0]}"])
def test_other_names_are_no_heads(name: str) -> None:
    """Catches a path that leaves the folder of heads."""
    assert shipped_head(name) is None


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAMES[0]).mkdir()
    assert fetched_head(NAMES[0]) == NAMES[0]


def test_the_head_of_smollm2_drafts_for_it_and_changes_nothing(smollm: Path) -> None:
    """Catches a head for other states or another vocabulary: its drafts would be wrong, and a pass
    would bring hardly more than one token."""
    model = str(next(smollm.glob("*.gguf")))
    choice = choose_companion(Target(model))
    assert choice.kind == "eagle3"
    assert offer(model) is None, "it does not pay for a file in 4 bits"
    prompt = [{"role": "user", "content": "Why is the sky blue? Answer in three sentences."}]
    sampling = SamplingParams(max_tokens=64)
    with LLM(model, drafter="none") as plain:
        expected = plain.chat(prompt, sampling)[0]
    with LLM(model, draft=NAMES[0], num_draft_tokens=3) as drafted:
        answer = drafted.chat(prompt, sampling)[0]
    assert answer.token_ids == expected.token_ids
    assert answer.stats.tau > 1.5


def test_the_head_of_smollm2_is_offered_for_its_own_weights(tmp_path: Path) -> None:
    """A folder of that name and shape, as the hub has it."""
    model = tiny_llama(
        49152,
        hidden_size=576,
        intermediate_size=64,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    folder = tmp_path / "SmolLM2-135M-Instruct"
    save_checkpoint(folder, model, byte_tokenizer())
    assert offer(str(folder)) == f"{NAMES[0]} is here and drafts for this model: --draft auto"
