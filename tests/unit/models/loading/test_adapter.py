"""LoRA folders: merged into their base as target and as draft, or refused by name; never ignored."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.cli import app
from outrider.errors import CapabilityError, CheckpointError
from outrider.llm import LLM
from outrider.models.loading import adapter
from outrider.models.loading.load import load_config, load_module, load_tokenizer
from outrider.models.loading.memory import model_memory
from outrider.models.source import resolve
from outrider.sampling.params import SamplingParams
from tests.helpers import save_checkpoint, tiny_llama, word_tokenizer

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
QUIET: dict[str, Any] = {"runtime": "eager", "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=12)
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base, the adapter that was trained on it, and both merged by hand."""
    root = tmp_path_factory.mktemp("lora")
    base = save_checkpoint(root / "base", tiny_llama(96), word_tokenizer(96))
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(root / "adapter")
    save_checkpoint(root / "merged", model.merge_and_unload(), word_tokenizer(96))
    return root


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Path:
    """The same folders, for a test to change."""
    return shutil.copytree(folders, tmp_path / "copy")


def edit(folder: Path, **changes: Any) -> Path:
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    return folder


@pytest.mark.slow
def test_an_adapter_is_its_base_with_its_weights_added(folders: Path) -> None:
    """It was called "no transformers checkpoint"."""
    llm = LLM(folders / "adapter", drafter="none", **QUIET)
    merged, base = (
        LLM(folders / name, drafter="none", **QUIET).generate([PROMPT], GREEDY)[0]
        for name in ("merged", "base")
    )
    found = llm.generate([PROMPT], GREEDY)[0].token_ids
    assert found == merged.token_ids
    assert found != base.token_ids
    assert llm.config["adapters"] == {
        "target": {
            "folder": str(folders / "adapter"),
            "base": str(folders / "base"),
            "kind": "LORA",
        }
    }
    assert (
        llm.notes[0]
        == f"'{folders / 'adapter'}' is an adapter (LORA), merged into '{folders / 'base'}'"
    )


@pytest.mark.slow
def test_a_draft_may_be_an_adapter(folders: Path) -> None:
    llm = LLM(folders / "merged", draft=folders / "adapter", num_draft_tokens=3, **QUIET)
    done = llm.generate([PROMPT], GREEDY)[0]
    assert done.stats.accepted == done.stats.tested > 0
    assert list(llm.config["adapters"]) == ["draft"]
    assert "adapters" not in LLM(folders / "merged", drafter="ngram", **QUIET).config


@pytest.mark.slow
def test_a_config_beside_the_adapter_does_not_hide_it(folders: Path, copied: Path) -> None:
    """With one, transformers loads the base alone where peft is missing, and says nothing."""
    shutil.copy(copied / "base" / "config.json", copied / "adapter")
    merged = LLM(folders / "merged", drafter="none", **QUIET).generate([PROMPT], GREEDY)[0]
    assert (
        LLM(copied / "adapter", drafter="none", **QUIET).generate([PROMPT], GREEDY)[0].token_ids
        == merged.token_ids
    )


def test_whole_weights_and_an_adapter_in_one_folder_are_refused(copied: Path) -> None:
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(copied / "adapter" / file, copied / "merged")
    with pytest.raises(
        CheckpointError, match=r"weights of a whole model \(model\.safetensors\) and an adapter for"
    ):
        LLM(copied / "merged", drafter="none", **QUIET)


def test_peft_is_named_where_it_is_missing(
    folders: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(
        CapabilityError,
        match=r"by peft, .* not installed: pip install peft, or pip install '\.\[lora\]'",
    ):
        LLM(folders / "merged", draft=folders / "adapter", **QUIET)
    assert app.run(["generate", str(folders / "adapter"), "w3", "--drafter", "none"]) == 2
    assert "pip install peft, or pip install '.[lora]' in a checkout" in capsys.readouterr().err


@pytest.mark.parametrize("named", ["/nowhere/base", "base", "../base", "lost/base"])
def test_the_base_is_found_beside_the_adapter(copied: Path, named: str) -> None:
    """A path of the machine that trained it, most often."""
    edit(copied / "adapter", base_model_name_or_path=named)
    assert Path(adapter.adapter_in(str(copied / "adapter")).base).resolve() == copied / "base"


def test_a_base_that_is_not_there(copied: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"is an adapter for '/nowhere/else', and no such folder is there\. Put the base",
    ):
        LLM(
            edit(copied / "adapter", base_model_name_or_path="/nowhere/else"),
            drafter="none",
            **QUIET,
        )
    with pytest.raises(
        CheckpointError,
        match=r"is an adapter for 'some/model', which cannot be loaded: no model 'some/model'",
    ):
        LLM(edit(copied / "adapter", base_model_name_or_path="some/model"), drafter="none", **QUIET)
    (copied / "base" / "config.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"is an adapter for .*base', which cannot be loaded: .* has no config\.json",
    ):
        LLM(edit(copied / "adapter", base_model_name_or_path="base"), drafter="none", **QUIET)


@pytest.mark.slow
def test_an_adapter_of_another_model(copied: Path) -> None:
    """Its tensors do not fit: one line."""
    save_checkpoint(copied / "base", tiny_llama(96, hidden_size=32), word_tokenizer(96))
    edit(copied / "adapter", base_model_name_or_path="base")
    with pytest.raises(CheckpointError, match=r"the adapter '.*' does not fit its base") as refused:
        LLM(copied / "adapter", drafter="none", **QUIET)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.slow
def test_an_adapter_with_missing_tensors(copied: Path) -> None:
    """peft leaves them as it drew them, with a warning that the command line hides."""
    file = copied / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    save_file(tensors, file)
    with pytest.raises(
        CheckpointError, match=r"does not fit its base .* Found missing adapter keys"
    ):
        LLM(copied / "adapter", drafter="none", **QUIET)


def test_damaged_and_incomplete_folders(copied: Path) -> None:
    (copied / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"has adapter_config\.json but no adapter_model\.safetensors: incomplete adapter",
    ):
        load_config(resolve(str(copied / "adapter")))
    (copied / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is damaged: it names no base_model_name_or_path"):
        load_config(resolve(str(copied / "adapter")))


def test_prompt_tuning_is_refused_by_its_kind(copied: Path) -> None:
    """Nothing to merge: it puts vectors before the text."""
    model = AutoModelForCausalLM.from_pretrained(copied / "base")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(model, settings).save_pretrained(copied / "prompt")
    with pytest.raises(
        CapabilityError,
        match="is an adapter of kind PROMPT_TUNING, which cannot be merged into weights",
    ):
        LLM(copied / "prompt", drafter="none", **QUIET)


def test_tokenizer_and_memory(folders: Path, copied: Path) -> None:
    """The adapter's own tokenizer counts where it has one; its weights are there beside the base's
    while they are merged."""
    assert len(load_tokenizer(resolve(str(copied / "adapter")))) == 96
    word_tokenizer(90).save_pretrained(copied / "adapter")
    assert len(load_tokenizer(resolve(str(copied / "adapter")))) == 90
    config = load_config(resolve(str(folders / "adapter")))
    held = [
        model_memory(resolve(str(folders / name)), config, torch.float32).weights_bytes
        for name in ("adapter", "base")
    ]
    assert held[0] - held[1] == (folders / "adapter" / "adapter_model.safetensors").stat().st_size
    module = load_module(resolve(str(folders / "adapter")), config, torch.float32, CPU)
    assert not any("lora" in name for name, _ in module.named_modules())
