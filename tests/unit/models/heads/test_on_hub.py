"""A hub id that means a trained head becomes its folder; one that means a model stays a name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from outrider.build import Options, choose
from outrider.errors import CheckpointError
from outrider.models.heads import on_hub
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.heads.on_hub import fetched_head
from tests.heads import HEADS, random_eagle
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama
from tests.hub_cache import put

TARGET = tiny_llama(257, num_hidden_layers=3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_a_head_in_the_cache_drafts_by_its_hub_id(kind: str, cache: Path) -> None:
    """Before, it was taken for a draft model, whose tokenizer is missing."""
    folder = put(cache, "x/head", lambda folder: HEADS[kind](TARGET, folder))
    assert fetched_head("x/head") == str(folder)
    _, parts = choose(Options("target", draft="x/head"))
    assert (parts.drafter_name, parts.requirements.head_folder) == (kind, str(folder))


def test_models_and_what_is_not_there_stay_names(cache: Path) -> None:
    put(cache, "x/model", lambda folder: save_checkpoint(folder, TARGET, byte_tokenizer()))
    put(cache, "x/broken", lambda folder: (folder / "config.json").write_text("{"))
    for name in ("x/model", "x/broken", "x/nothing", str(cache), "model.gguf", "x/y:Q4_0"):
        assert fetched_head(name) == name


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"speculators_model_type": "eagle3"},
        {"model_type": "gemma4_assistant"},
        {"outrider": {"head": "eagle3"}},
    ],
)
def test_a_config_tells_where_a_tokenizer_is_beside(fields: dict[str, object], cache: Path) -> None:
    folder = put(cache, "x/head", lambda folder: save_checkpoint(folder, TARGET, byte_tokenizer()))
    (folder / "config.json").write_text(json.dumps(fields))
    assert fetched_head("x/head") == str(folder)


def test_a_folder_without_a_tokenizer_is_no_model(cache: Path) -> None:
    """As EAGLE's own authors publish theirs, whose config could be a model's."""
    head = random_eagle("eagle", TARGET.config)
    folder = put(cache, "x/head", lambda folder: save_eagle(head, folder))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert fetched_head("x/head") == str(folder)


def test_a_download_that_fails_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that hold weights are asked for, of one format, and nothing else."""
    head = random_eagle("eagle3", TARGET.config, draft_vocab=40)
    folder = put(cache, "x/head", lambda folder: save_eagle(head, folder))
    asked = []

    class Api:
        def list_repo_files(self, name: str) -> list[str]:
            return ["config.json", "README.md", "model.safetensors", "pytorch_model.bin"]

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        raise OSError("the line is cut\nmore")

    monkeypatch.setattr(on_hub.hub, "only_cached", lambda name: False)
    client = on_hub.huggingface_hub
    monkeypatch.setattr(client, "HfApi", Api, raising=False)
    monkeypatch.setattr(
        client, "hf_hub_download", lambda name, file: str(folder / file), raising=False
    )
    monkeypatch.setattr(client, "snapshot_download", download, raising=False)
    with pytest.raises(CheckpointError, match=r"cannot fetch the head 'x/head': the line is cut$"):
        fetched_head("x/head")
    assert asked == [["config.json", "*.safetensors"]]
