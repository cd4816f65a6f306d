"""Heads are told apart by what is in their files: for `tune`, which takes what is no head for a
model, and for `export`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.build import Built, Options, build
from outrider.errors import CapabilityError, CheckpointError, ConfigError
from outrider.models.heads.exit import ExitConfig, ExitHead
from outrider.models.heads.kinds import head_kind
from outrider.models.source import resolve
from outrider.train.export import writer_for
from tests.heads import ACCEPTANCE, HEADS
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

KINDS = [*HEADS, *ACCEPTANCE, "early-exit"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every kind, and a whole model."""
    root = tmp_path_factory.mktemp("kinds")
    target = tiny_llama(257, num_hidden_layers=4)
    save_checkpoint(root / "model", target, byte_tokenizer())
    for kind, write in {**HEADS, **ACCEPTANCE}.items():
        write(target, root / kind)
    ExitHead(ExitConfig(64, 2, 4, 4, "mine")).save(root / "early-exit")
    return root


def write(folder: Path, config: Any, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_by_its_files(root: Path, kind: str, tmp_path: Path) -> None:
    """Not by what its folder is called; pickled as published EAGLE heads are, too."""
    link = tmp_path / "something"
    pickled = tmp_path / "pickled"
    link.symlink_to(root / kind)
    assert head_kind(resolve(str(link))) == kind
    pickled.mkdir()
    (pickled / "config.json").write_text((root / kind / "config.json").read_text())
    weights = next((root / kind).glob("*.safetensors"), None)
    if weights is not None:
        torch.save(load_file(weights), pickled / "pytorch_model.bin")
        assert head_kind(resolve(str(pickled))) == kind


def test_what_is_no_head(root: Path, tmp_path: Path) -> None:
    """A model, nothing at all, and configs that say what no config should."""
    assert head_kind(resolve(str(root / "model"))) is None
    assert head_kind(resolve(str(tmp_path))) is None
    for number, config in enumerate(
        ({"model_type": ["?"]}, {"outrider": "eagle3"}, {"outrider": {"head": ""}})
    ):
        assert (
            head_kind(resolve(str(write(tmp_path / str(number), config, x=torch.ones(1))))) is None
        )


def test_a_damaged_head_is_of_the_kind_it_says(tmp_path: Path) -> None:
    """So that loading can say which tensor is gone."""
    folder = write(tmp_path / "head", {"outrider": {"head": "eagle3"}}, x=torch.ones(1))
    assert head_kind(resolve(str(folder))) == "eagle3"


@pytest.mark.parametrize(
    ("kind", "layout"), [("eagle3", "raw"), ("medusa", "vllm"), ("block", "speculators")]
)
def test_export_reads_the_same(root: Path, kind: str, layout: str) -> None:
    assert writer_for(root / kind, layout)[0] == kind


def test_what_export_takes_for_a_draft_model_and_what_it_refuses(
    root: Path, tmp_path: Path
) -> None:
    """A model has a tokenizer beside it. What cannot be exported is refused with how it is used."""
    assert writer_for(root / "model", "transformers")[0] == "draft-model"
    with pytest.raises(CapabilityError, match='--drafter "early-exit head='):
        writer_for(root / "early-exit", "raw")
    with pytest.raises(CapabilityError, match=r"stop=acceptance acceptance_head=.*acceptance"):
        writer_for(root / "acceptance", "raw")
    with pytest.raises(CheckpointError, match=r"no drafter that we know; it has the tensors x"):
        writer_for(write(tmp_path / "head", {}, x=torch.ones(1)), "raw")
    with pytest.raises(CheckpointError, match="there is no folder"):
        writer_for(tmp_path / "none", "raw")


@pytest.mark.slow
def test_a_dspark_head_inside_its_targets_checkpoint_is_not_read(
    root: Path, tmp_path: Path
) -> None:
    """DeepSeek V4 ships one under `mtp.`. 'auto' leaves it, and who asks for it is told."""
    folder = tmp_path / "target"
    shutil.copytree(root / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "mtp.0.main_proj.weight": torch.zeros(2, 2)},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert head_kind(resolve(str(folder))) is None
    assert built(folder).options.drafter == "suffix"
    with pytest.raises(
        ConfigError, match="drafter 'block' needs a head trained for this target: --draft FOLDER"
    ):
        built(folder, drafter="block")
    with pytest.raises(CheckpointError, match="is no block head"):
        built(folder, drafter="block", draft=str(folder))
    with pytest.raises(
        CheckpointError,
        match=r"an MTP head of a layout that is not read \(tensor 'mtp.0.main_proj.weight'\)",
    ):
        built(folder, drafter="mtp")


def built(folder: Path, **options: Any) -> Built:
    return build(
        Options(target=str(folder), dtype="float32", threads=1, runtime="eager", **options)
    )
