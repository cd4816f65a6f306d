"""What cannot be loaded is reported in one line, at once: no such model and no network, a config
that transformers refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import Gemma3Config, LlamaConfig

from outrider.errors import CheckpointError
from outrider.models.loading import hub, load
from outrider.models.loading.load import load_config, load_tokenizer
from outrider.models.probes.probe import AttentionCall, find_layers
from outrider.models.source import ModelSource, resolve
from tests.helpers import byte_tokenizer, save_checkpoint, tiny_llama

NOBODY = "http://127.0.0.1:9"  # refuses connections


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Online, with a hub that does not answer and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    forget = hub._answers.cache_clear
    yield
    forget()


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_no_such_model_and_no_network(silent: None, load: Callable[[ModelSource], Any]) -> None:
    """The client alone would try for 23 seconds."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as refused:
        load(resolve("gpt2x"))
    assert time.monotonic() - began < 15
    assert str(refused.value) == (
        "no model 'gpt2x': there is no folder of that name, the hub's cache does not have it, and http://127.0.0.1:9 does not "
        "answer. Give a folder with config.json, a .gguf file, a hub id, or 'demo'."
    )
    with pytest.raises(CheckpointError, match="'one/two/three'"):
        load(resolve("one/two/three"))  # no id at all: its own reason


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    """Catches "no model folder", with the file itself as the nearest name."""
    (tmp_path / "notes.md").write_text("# Notes")
    with pytest.raises(CheckpointError, match=r"notes\.md' is a file, and no GGUF file"):
        load_config(resolve(str(tmp_path / "notes.md")))


def test_offline_by_choice() -> None:
    """As all tests are."""
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids to ask the hub"):
        load_config(resolve("gpt2x"))


def test_folders_ask_nobody(silent: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(endpoint: str, minute: int) -> bool:
        raise AssertionError(f"{endpoint} was asked")

    monkeypatch.setattr(hub, "_answers", ask)
    folder = save_checkpoint(tmp_path / "model", tiny_llama(257), byte_tokenizer())
    assert load_config(resolve(str(folder))).vocab_size == 257
    assert load_tokenizer(resolve(str(folder))) is not None


def test_refused_configs_are_one_line(tmp_path: Path) -> None:
    """What is wrong, not only that something is: the reason stands on the library's second line."""
    save_checkpoint(tmp_path, tiny_llama(257), None)
    config = json.loads((tmp_path / "config.json").read_text())
    cases = [
        ({**config, "hidden_size": "wide"}, "hidden_size"),
        ({**config, "num_attention_heads": 7}, "7"),
    ]
    for content, word in cases:
        (tmp_path / "config.json").write_text(json.dumps(content))
        with pytest.raises(CheckpointError) as refused:
            load_config(resolve(str(tmp_path)))
        reason = str(refused.value).partition(": ")[2]
        assert "\n" not in reason
        assert word in reason
        assert not reason.endswith(":")


@pytest.mark.parametrize(
    ("own", "device", "onednn", "kernels", "expected"),
    [
        (torch.bfloat16, "cpu", True, False, torch.bfloat16),
        (torch.bfloat16, "cpu", False, True, torch.bfloat16),
        # torch would multiply number by number
        (torch.bfloat16, "cpu", False, False, torch.float32),
        (torch.bfloat16, "cuda", False, False, torch.bfloat16),
        (torch.float16, "cpu", True, True, torch.float32),
        (torch.float32, "cpu", False, False, torch.float32),
        (None, "cpu", True, True, torch.float32),
    ],
)
def test_auto_dtype_is_one_that_the_processor_is_fast_in(
    monkeypatch: pytest.MonkeyPatch,
    own: torch.dtype | None,
    device: str,
    onednn: bool,
    kernels: bool,
    expected: torch.dtype,
) -> None:
    monkeypatch.setattr(load, "has_fast_bf16", lambda: onednn)
    monkeypatch.setattr(load, "of_this_cpu", lambda: "avx512" if kernels else None)
    config = LlamaConfig(dtype=own)
    on = torch.device(device)
    assert load.resolve_dtype("auto", config, on) == expected
    assert load.resolve_dtype("bfloat16", config, on) == torch.bfloat16  # asked for is asked for


def test_a_dtype_that_only_the_text_names_is_the_checkpoints() -> None:
    """Qwen3-VL's and Qwen3.5's config.json; as fp32 they would take twice the memory."""
    config = Gemma3Config(text_config={"dtype": "bfloat16"})
    assert config.dtype is None
    assert load.own_dtype(config) == torch.bfloat16


def test_a_template_of_the_processor_alone_is_taken(tmp_path: Path) -> None:
    """LLaVA's and SmolVLM's folders: chats were refused for want of a template."""
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(resolve(str(tmp_path))).chat_template is None
    (tmp_path / "chat_template.json").write_text(
        json.dumps({"chat_template": "{{ messages[0].content }}"})
    )
    assert load_tokenizer(resolve(str(tmp_path))).chat_template == "{{ messages[0].content }}"


def test_training_is_not_served_by_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "has_fast_bf16", lambda: False)
    monkeypatch.setattr(load, "of_this_cpu", lambda: "avx512")
    config = SimpleNamespace(dtype=torch.bfloat16)
    assert load.resolve_dtype("auto", config, torch.device("cpu"), ours=False) == torch.float32


def test_windows_of_two_sizes_are_left_to_transformers_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our passes would hide from the wider layer what only the narrower one must not see."""

    def with_windows(module: Any, count: int) -> list[AttentionCall]:
        return [
            layer._replace(window=window)
            for layer, window in zip(find_layers(module, count), (8, 4), strict=True)
        ]

    monkeypatch.setattr(load, "find_layers", with_windows)
    lm = load.build_lm(tiny_llama(257), "tiny", torch.float32, torch.device("cpu"))
    assert lm.why_own_cache is not None
    assert "windows of different sizes ([4, 8])" in lm.why_own_cache
