"""A name becomes a source once: what each form of a name means, and that nothing below the source
looks at names again."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from outrider.errors import CheckpointError
from outrider.models.source import resolve, weights_folder
from tests.gguf_files import write_model
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

PACKAGE = Path(__file__).resolve().parents[3] / "outrider"
BY_NAME = {
    "gguf_in": {"models/source.py", "models/heads/source.py"},
    "adapter_in": {"models/source.py"},
}
BY_NAME["snapshot_of"] = BY_NAME["adapter_in"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "model", tiny_llama(257), byte_tokenizer())


def test_a_folder(folder: Path) -> None:
    source = resolve(str(folder))
    assert source.folder == weights_folder(source) == folder
    assert (source.gguf, source.adapter, source.base, source.weights, source.with_tokenizer) == (
        None,
        None,
        None,
        source,
        source,
    )


def test_a_gguf_file(tmp_path: Path) -> None:
    file = write_model(tmp_path / "m.gguf", tiny_llama(257), "llama")
    for name in (file, tmp_path):
        source = resolve(str(name))
        assert source.gguf is not None
        assert source.gguf.path == file
        assert (source.name, source.folder) == (str(name), None)


def test_an_adapter_and_its_base(folder: Path, tmp_path: Path) -> None:
    """A tokenizer of its own is taken, weights are the base's."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": str(folder), "peft_type": "LORA"})
    )
    (adapter / "adapter_model.safetensors").write_bytes(b"never read here")
    source = resolve(str(adapter))
    assert source.base is not None
    assert source.weights.name == source.with_tokenizer.name == str(folder)
    assert weights_folder(source) == folder
    (adapter / "tokenizer.json").write_text("{}")
    assert resolve(str(adapter)).with_tokenizer.name == str(adapter)


def test_a_model_of_the_hub_that_is_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--me--tiny"
    snapshot = home / "snapshots" / "abc"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    source = resolve("me/tiny")
    assert (source.name, source.folder) == ("me/tiny", snapshot)
    assert weights_folder(source, fetches=False) is None, "the config alone is here"
    (snapshot / "model.safetensors").write_bytes(b"")
    assert weights_folder(source, fetches=False) == snapshot


def test_what_is_not_there(tmp_path: Path) -> None:
    """A name that means nothing is a source without files, which reading the config refuses; a GGUF
    file is refused at once."""
    assert resolve("me/nobody-has-this").folder is None
    with pytest.raises(CheckpointError, match="cannot read the weights of 'me/nobody-has-this'"):
        weights_folder(resolve("me/nobody-has-this"))
    with pytest.raises(CheckpointError, match="no file"):
        resolve(str(tmp_path / "absent.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize("function", BY_NAME)
def test_names_are_read_in_one_place(function: str) -> None:
    """Catches code that is handed a name and finds out again what it means."""
    importers = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_import = isinstance(node, ast.ImportFrom) and function in {
                alias.name for alias in node.names
            }
            if is_import or (isinstance(node, ast.Attribute) and node.attr == function):
                importers.add(str(file.relative_to(PACKAGE)))
    assert importers == BY_NAME[function]
