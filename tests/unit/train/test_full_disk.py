"""Disks that fill up: what is written is whole or not there, and one line says why and how to go
on."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider.errors import OutriderError
from outrider.models.heads.eagle_files import save_eagle
from outrider.models.heads.medusa import MedusaConfig, MedusaHeads, save_medusa
from outrider.train.checkpoint import why_unwritten, write_checkpoint
from outrider.train.export import Target, export
from outrider.train.run import save_drafter
from tests.heads import random_eagle
from tests.helpers import byte_tokenizer, tiny_llama


@contextmanager
def no_file_above(num_bytes: int) -> Iterator[None]:
    """Files that grow beyond this fail to be written, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def target() -> Target:
    module = tiny_llama(257, num_hidden_layers=3).requires_grad_(False)
    return Target("/models/target", module, byte_tokenizer(), "demo")


@pytest.mark.parametrize("layout", ["raw", "speculators", "medusa", "vllm"])
@pytest.mark.parametrize("is_there", [False, True])
def test_an_export_is_whole_or_not_there(
    layout: str, is_there: bool, tmp_path: Path, target: Target
) -> None:
    source = tmp_path / "source"
    out = tmp_path / "new" / "out"
    if layout in ("raw", "speculators"):
        save_eagle(random_eagle("eagle3", target.module.config), source)
    else:
        save_medusa(MedusaHeads.new(MedusaConfig(64, 257, 2), target.module), source)
    if is_there:
        out.mkdir(parents=True)
    with no_file_above(20_000), pytest.raises(OutriderError, match="cannot be written") as caught:
        export(source, layout, out, target)
    assert len(str(caught.value).splitlines()) == 1
    assert "nothing of it was kept" in str(caught.value)
    assert list(out.iterdir()) == [] if is_there else not out.exists()
    export(source, layout, out, target)
    assert {file.suffix for file in out.iterdir()} > {".json"}
    assert not list(out.glob(".*"))


def test_a_checkpoint_and_a_drafter_say_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without our look at the disk nobody would see that it is full: torch does not say so."""
    path = tmp_path / "checkpoint.pt"
    write_checkpoint(path, {"a": torch.ones(3)})
    before = path.read_bytes()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    again = "the same command with --resume continues"
    with (
        no_file_above(4096),
        pytest.raises(OutriderError, match=f"the disk is full: make room.*is whole.*{again}"),
    ):
        write_checkpoint(path, {"a": torch.ones(100_000)})
    assert [path.read_bytes(), *tmp_path.iterdir()] == [before, path]
    with (
        no_file_above(4096),
        pytest.raises(OutriderError, match=f"drafter cannot be written.*make room.*{again}"),
    ):
        save_drafter(
            lambda folder: torch.save(torch.ones(100_000), folder / "a.pt"), tmp_path / "drafter"
        )
    assert list(tmp_path.iterdir()) == [path]


def test_why_something_was_not_written(tmp_path: Path) -> None:
    full = "the disk is full: make room"
    assert why_unwritten(tmp_path, OSError(28, "No space left on device")) == full
    assert (
        why_unwritten(tmp_path, RuntimeError("I/O error: No space left on device (os error 28)"))
        == full
    )
    assert (
        why_unwritten(tmp_path, OSError(13, "Permission denied")) == "[Errno 13] Permission denied"
    )
