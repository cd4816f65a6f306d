"""Memory known before loading, and damaged files seen before loading."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, Lfm2Config, LlamaConfig

from outrider.errors import CapabilityError, CheckpointError
from outrider.models.loading.memory import (
    MemoryReport,
    available_memory,
    config_weights_bytes,
    estimate_memory,
    folder_weights_bytes,
    kv_bytes_per_token,
)
from outrider.models.loading.weight_files import safetensors_header
from outrider.models.source import resolve

LLAMA = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=100,
    max_position_embeddings=512,
)
CPU = torch.device("cpu")


def write_model(folder: Path, numel: int = 1000) -> Path:
    folder.mkdir()
    save_file({"weight": torch.zeros(numel)}, folder / "model.safetensors")
    return folder


def test_kv_counts_grouped_heads() -> None:
    """3 layers x 2 KV heads x head size 8 x keys and values x 2 bytes; GPT-2 names its fields
    differently."""
    assert kv_bytes_per_token(LLAMA, torch.bfloat16) == 3 * 2 * 8 * 2 * 2
    kinds = ["conv", "full_attention", "conv"]
    hybrid = Lfm2Config(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, layer_types=kinds
    )
    assert kv_bytes_per_token(hybrid, torch.float32) == 1 * 2 * 8 * 8 * 4, (
        "convolutions keep no keys"
    )
    assert (
        kv_bytes_per_token(GPT2Config(n_layer=2, n_embd=32, n_head=4), torch.float32)
        == 2 * 32 * 2 * 4
    )


def test_weights_in_the_dtype_they_run_in(tmp_path: Path) -> None:
    """A checkpoint stored in fp32 and run in bf16 takes half its file."""
    folder = write_model(tmp_path / "m")
    assert folder_weights_bytes(folder, torch.float32) == 4000
    assert folder_weights_bytes(folder, torch.bfloat16) == 2000


def test_integers_keep_their_size(tmp_path: Path) -> None:
    save_file({"q": torch.zeros(10, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert folder_weights_bytes(tmp_path, torch.float32) == 10


def test_sharded_checkpoints(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(10)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(20)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder_weights_bytes(tmp_path, torch.float32) == 120
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of 2 weight files, first 'two\.safetensors'"
    ):
        folder_weights_bytes(tmp_path, torch.float32)
    # saved anew as one: the index is left over
    save_file({"c": torch.zeros(30)}, tmp_path / "model.safetensors")
    assert folder_weights_bytes(tmp_path, torch.float32) == 120


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_cut_off_file_is_seen(tmp_path: Path, keep: int) -> None:
    """An interrupted download."""
    file = write_model(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="damaged"):
        safetensors_header(file)


def test_something_else_is_seen(tmp_path: Path) -> None:
    """A Git LFS pointer, or a page of HTML."""
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\n" * 4)
    with pytest.raises(CheckpointError, match="damaged"):
        safetensors_header(file)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no weights"):
        folder_weights_bytes(tmp_path, torch.float32)


def test_weights_from_the_config_alone() -> None:
    """A hub model before its download; tied embeddings count once."""
    tied = LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})
    embedding = 100 * 64 * 4
    assert (
        config_weights_bytes(LLAMA, torch.float32) - config_weights_bytes(tied, torch.float32)
        == embedding
    )


def estimate(tmp_path: Path, available: int, **options: object) -> MemoryReport:
    folders = [write_model(tmp_path / "t", 1 << 20), write_model(tmp_path / "d", 1 << 18)]
    sources = [resolve(str(folder)) for folder in folders]
    return estimate_memory(
        sources,
        [LLAMA, LLAMA],
        dtype=torch.float32,
        device=CPU,
        available_bytes=available,
        **options,
    )


def test_a_report_calls_models_what_the_user_calls_them(tmp_path: Path) -> None:
    """Catches the folder of the installed package in a message about `demo`."""
    with pytest.raises(CapabilityError, match="not enough memory on cpu: 'demo' needs"):
        estimate(tmp_path, 1 << 10, called=["demo", "demo draft"])


def test_report_adds_up(tmp_path: Path) -> None:
    report = estimate(tmp_path, 1 << 30, num_rows=2, num_tokens=100, packed=True)
    kv = 3 * 2 * 8 * 2 * 4 * 2 * 100
    assert report.weights_bytes == 2 * (4 << 20), "as loaded, and packed"
    assert report.kv_bytes == kv
    assert report.draft_bytes == 2 * (1 << 20) + kv
    assert report.needed_bytes == report.weights_bytes + report.kv_bytes + report.draft_bytes
    assert json.loads(json.dumps(report.as_dict()))["needed_bytes"] == report.needed_bytes
    assert "available on cpu" in report.one_line()


def test_not_enough_memory_names_every_part_and_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(CapabilityError) as caught:
        estimate(tmp_path, 1 << 20)
    message = str(caught.value)
    for part in ("needs 5.", "weights 4.0 MiB", "KV ", "draft 1.", "1.0 MiB available", "try "):
        assert part in message


@pytest.mark.parametrize(
    ("available", "advice"),
    [((5 << 20) + 200_000, "--max-model-len"), ((4 << 20) + 500_000, "--drafter ngram")],
)
def test_advice_fits_the_problem(tmp_path: Path, available: int, advice: str) -> None:
    """Too long a context, or a draft that does not fit beside the target."""
    with pytest.raises(CapabilityError, match=advice):
        estimate(tmp_path, available, num_tokens=512)


def test_advised_length_fits(tmp_path: Path) -> None:
    """Following the advice must work."""
    with pytest.raises(CapabilityError) as caught:
        estimate(tmp_path, (5 << 20) + 200_000)
    length = int(str(caught.value).split("--max-model-len ")[1].rstrip("."))
    again = tmp_path / "again"
    again.mkdir()
    assert estimate(again, (5 << 20) + 200_000, num_tokens=length).num_tokens == length


def test_available_memory_is_a_plausible_number() -> None:
    assert 1 << 20 < available_memory(CPU) < 1 << 50
