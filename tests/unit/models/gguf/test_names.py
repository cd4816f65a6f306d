"""What a user may type for a GGUF checkpoint, and which file it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from huggingface_hub import constants

from outrider.errors import CheckpointError
from outrider.models.gguf import names
from outrider.models.gguf.names import gguf_in, only_file
from outrider.models.source import resolve
from tests.gguf_files import Kind, add_tensor, finish


def a_file(path: Path, name: str = "a.weight", shards: int | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(path, "llama")
    if shards:
        writer.add_uint16("split.count", shards)
    add_tensor(writer, name, np.ones((4, 64)), Kind.Q8_0)
    return finish(writer, path)


def test_a_file_is_known_by_its_name_or_by_what_it_begins_with(tmp_path: Path) -> None:
    for name in ("m.gguf", "M.GGUF", "sha256-0a1b"):
        found = gguf_in(str(a_file(tmp_path / name)))
        assert found is not None
        assert found.path == tmp_path / name


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    a_file(tmp_path / "m.gguf")
    a_file(tmp_path / "mmproj-m.gguf")  # the vision part beside it
    (tmp_path / "config.json").write_text("{}")  # some repositories have it
    assert gguf_in(str(tmp_path)).path == tmp_path / "m.gguf"
    a_file(tmp_path / "n.gguf")
    with pytest.raises(
        CheckpointError,
        match=r"2 GGUF files that could be meant: m.gguf, mmproj-m.gguf, n.gguf. Name one",
    ):
        gguf_in(str(tmp_path))


def test_other_weights_in_a_folder_win(tmp_path: Path) -> None:
    """A transformers checkpoint that was converted in its own folder stays what it was."""
    a_file(tmp_path / "m.gguf")
    (tmp_path / "model.safetensors").touch()
    assert gguf_in(str(tmp_path)) is None


def test_other_names_are_not_ours(tmp_path: Path) -> None:
    for name in (str(tmp_path), "demo", "Qwen/Qwen2.5-0.5B", str(tmp_path / "absent"), "gpt2"):
        assert gguf_in(name) is None


def test_a_file_that_is_not_there_names_the_nearest(tmp_path: Path) -> None:
    a_file(tmp_path / "model-Q4_K_M.gguf")
    with pytest.raises(CheckpointError, match=r"no file '.*model-Q4_K.gguf'.*model-Q4_K_M.gguf"):
        gguf_in(str(tmp_path / "model-Q4_K.gguf"))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    first = a_file(tmp_path / "m-00001-of-00002.gguf", shards=2)
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of 2 shards, first 'm-00002-of-00002.gguf'"
    ):
        gguf_in(str(first))
    a_file(tmp_path / "m-00002-of-00002.gguf", "b.weight", shards=2)
    for name in (first, tmp_path / "m-00002-of-00002.gguf", tmp_path):
        assert [tensor.name for tensor in gguf_in(str(name)).tensors] == ["a.weight", "b.weight"]
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "renamed.gguf")
    with pytest.raises(CheckpointError, match="one of 2 shards, but its name says 1"):
        gguf_in(str(tmp_path / "renamed.gguf"))


def test_a_quantisation_names_a_file() -> None:
    files = [
        "README.md",
        "x-Q4_K_M.gguf",
        "x-Q4_K_S.gguf",
        "big/x-Q8_0-00001-of-00002.gguf",
        "big/x-Q8_0-00002-of-00002.gguf",
    ]
    assert only_file(files, "a/b", "Q4_K_M") == "x-Q4_K_M.gguf"
    assert only_file(files, "a/b", "q8_0") == "big/x-Q8_0-00001-of-00002.gguf"
    assert only_file(files, "a/b", "x-Q4_K_S.gguf") == "x-Q4_K_S.gguf"
    with pytest.raises(CheckpointError, match=r"no GGUF file 'Q4_K_L'.*x-Q4_K_M.gguf"):
        only_file(files, "a/b", "Q4_K_L")
    with pytest.raises(CheckpointError, match="3 GGUF files"):
        only_file(files, "a/b")


def cached(hub: Path, repo: str, *files: str) -> Path:
    """The hub's cache with files of a repository, as its client lays it out."""
    home = hub / f"models--{repo.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text("abc")
    for file in files:
        a_file(home / "snapshots" / "abc" / file)
    return home / "snapshots" / "abc"


def test_files_of_the_hub_come_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of every name on the hub, without one: as where it is out of reach."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = cached(tmp_path, "me/tiny-GGUF", "tiny-Q4_0.gguf")
    names._from_hub.cache_clear()
    for name in ("me/tiny-GGUF", "me/tiny-GGUF:Q4_0", "me/tiny-GGUF:tiny-Q4_0.gguf"):
        assert resolve(name).name == str(folder / "tiny-Q4_0.gguf")
    with pytest.raises(CheckpointError, match="no GGUF file 'Q8_0'"):
        resolve("me/tiny-GGUF:Q8_0")
    with pytest.raises(CheckpointError, match="no model 'me/other:Q4_0'"):
        resolve("me/other:Q4_0")
    assert resolve(str(folder / "tiny-Q4_0.gguf")).name == str(folder / "tiny-Q4_0.gguf")
