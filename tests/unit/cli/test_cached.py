"""What the hub's cache holds, as `outrider list` shows it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from outrider.cli.cached import CachedModel, cached_models

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HOUR = 3600


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def cached(hub: Path, name: str, files: dict[str, bytes], ago_s: float = 0.0) -> Path:
    """Put a model there as the client lays it out; its snapshot."""
    repo = hub / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for number, (file, content) in enumerate(files.items()):
        blob = repo / "blobs" / f"{name.replace('/', '-')}{number}"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(content)
        os.utime(blob, (time.time() - ago_s,) * 2)
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).symlink_to(blob)
    return snapshot


def facts() -> list[tuple[str, str, int, str]]:
    """Of each model but the embedded one."""
    return [(m.name, m.format, m.num_bytes, m.used()) for m in cached_models()[1:]]


def test_the_embedded_model_is_always_there(hub: Path) -> None:
    (model,) = cached_models()
    assert (model.name, model.used()) == ("demo", "-")
    assert model.num_bytes > 50_000_000
    hub.rmdir()
    assert cached_models() == [model]


def test_checkpoints_and_gguf_files(hub: Path) -> None:
    """Each under the name that other commands take, the one used last first."""
    cached(hub, "a/plain", {"config.json": b"{}", "model.safetensors": b"1234"}, 50 * HOUR)
    cached(
        hub,
        "b/some-GGUF",
        {
            "x-Q4_0.gguf": b"12345",
            "big/y-00001-of-00002.gguf": b"123",
            "big/y-00002-of-00002.gguf": b"12",
            "README.md": b"",
        },
        2 * HOUR,
    )
    assert facts() == [
        ("b/some-GGUF:big/y-00001-of-00002.gguf", "GGUF", 5, "2 hours ago"),
        ("b/some-GGUF:x-Q4_0.gguf", "GGUF", 5, "2 hours ago"),
        ("a/plain", "safetensors", 6, "2 days ago"),
    ]


def test_what_came_in_part_is_incomplete(hub: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    files = {"model.safetensors.index.json": index.encode(), "model-1.safetensors": b"1"}
    snapshot = cached(hub, "a/half", files)
    cached(hub, "b/config-alone", {"config.json": b"{}"}, 100)
    assert [(name, format) for name, format, _, _ in facts()] == [
        ("a/half", "incomplete"),
        ("b/config-alone", "incomplete"),
    ]
    (snapshot / "model-2.safetensors").write_bytes(b"2")
    assert facts()[0][1] == "safetensors"
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors.index.json").write_text("[]")
    assert facts()[0][1] == "incomplete"


def test_datasets_and_broken_folders_are_no_models(
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached(hub, "a/plain", {"model.safetensors": b"1"})
    (hub / "models--a--plain").rename(hub / "datasets--a--plain")
    (hub / "models--b--broken").mkdir()
    assert facts() == []
    assert "note: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "words"), [(5, "just now"), (60, "1 minute ago"), (90_000, "1 day ago")]
)
def test_when_a_model_was_used(seconds: float, words: str) -> None:
    assert CachedModel("x", "GGUF", 1, time.time() - seconds).used() == words


def test_list_and_ls_show_the_same(cli: Callable[..., Any], hub: Path) -> None:
    cached(hub, "a/plain", {"model.safetensors": b"1234"})
    shown = cli("list").out
    assert shown == cli("ls", "models").out
    assert str(hub) in shown
    assert "a/plain" in shown
    assert "4 B" in shown
    rows = json.loads(cli("list", "--json").out)["models"]
    assert [row["name"] for row in rows] == ["demo", "a/plain"]
    assert "Did you mean 'models'?" in cli("ls", "model").err
