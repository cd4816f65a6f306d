"""Panels that a start takes from files are those that it would make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.models.gguf.experts import SAME
from outrider.models.gguf.header import TensorInfo
from outrider.models.gguf.packing import Stored, by_torch
from outrider.models.loading import kept_weights
from outrider.runtime import block_packing, kept_panels, library
from outrider.runtime.kept_panels import NEVER, SWITCH, KeptPanels, block_panels
from tests.gguf_files import Kind, random_blocks

SHAPES = {"wide": (96, 512), "odd": (45, 256), "experts": (3, 40, 256), "tall": (3200, 256)}
KINDS = (Kind.Q4_0, Kind.Q4_K, Kind.MXFP4, Kind.Q8_0)


@pytest.fixture(params=["mapped", "copied"], autouse=True)
def system(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, library_path: Path
) -> None:
    """One that keeps files in huge pages, and one that did so when it was asked alone."""
    steps = iter(range(0, 1 << 60, 1 << 40)) if request.param == "mapped" else None
    monkeypatch.setattr(kept_weights, "_huge_bytes", lambda: 0 if steps is None else next(steps))
    monkeypatch.setattr(kept_weights, "is_local", lambda folder: True)
    monkeypatch.setattr(kept_panels, "is_mapped_huge", lambda folder: True)
    monkeypatch.setattr(kept_panels, "unthrottled_bytes", lambda: 1 << 30)
    monkeypatch.setattr(kept_panels, "LEAST", 1)
    native = library.load(library_path)
    monkeypatch.setattr(block_packing, "_library", lambda: native)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Stored]:
    """Tensors of a file, two of them in another order."""
    path = tmp_path / "tensors"
    tensors: dict[str, Stored] = {}
    dice = np.random.default_rng(0)
    for (name, shape), kind in zip(SHAPES.items(), KINDS, strict=True):
        blocks = random_blocks(kind, int(np.prod(shape[:-1])), shape[-1])
        before = path.read_bytes() if path.exists() else b""
        path.write_bytes(before + blocks.tobytes())
        tensor = TensorInfo(name, shape, kind, path, len(before), blocks.nbytes)
        order = dice.permutation(shape[-2]) if name in ("odd", "tall") else SAME
        tensors[name] = ([tensor], order)
    return tensors


@pytest.fixture
def kept(tmp_path: Path) -> KeptPanels:
    return KeptPanels(tmp_path / "weights" / "model", "a start")


def assert_right(panels: Mapping[str, Tensor], stored: Mapping[str, Stored]) -> None:
    assert panels.keys() == stored.keys()
    for name, each in stored.items():
        expected = by_torch(each)
        assert panels[name].shape == expected.shape
        assert torch.equal(panels[name], expected)


def files(kept: KeptPanels) -> int:
    return len([*kept._stem.parent.glob(f"*{kept_weights.SUFFIX}")])


def makes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(stored: Stored) -> Tensor:
        raise AssertionError(f"{stored[0][0].name} is made again")

    monkeypatch.setattr(kept_panels, "pack", fails)
    monkeypatch.setattr(kept_panels, "parts", fails)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_a_later_start_makes_none(
    at_once: int,
    kept: KeptPanels,
    stored: dict[str, Stored],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one part for each 32 outputs, and in one alone."""
    monkeypatch.setattr(block_packing, "PART", at_once)
    assert_right(block_panels(kept, stored), stored)
    makes_nothing(monkeypatch)
    assert_right(block_panels(kept, stored), stored)


def test_starts_keep_as_many_as_the_disk_takes_without_a_wait(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    for room, expected in ((0, 0), (100_000, 1), (1 << 30, 2)):
        monkeypatch.setattr(kept_panels, "unthrottled_bytes", lambda room=room: room)
        monkeypatch.setattr("torch.get_num_threads", lambda: 1)
        assert_right(block_panels(kept, stored), stored)
        assert files(kept) == expected
    makes_nothing(monkeypatch)
    assert_right(block_panels(kept, stored), stored)


def test_a_model_does_not_push_its_own_files_out(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a start that writes what the next one needs again, for ever."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr(kept_panels, "unthrottled_bytes", lambda: 100_000)
    assert_right(block_panels(kept, stored), stored)
    (first,) = kept._stem.parent.glob(f"*{kept_weights.SUFFIX}")
    monkeypatch.setattr(kept_panels, "unthrottled_bytes", lambda: 1 << 30)
    monkeypatch.setattr(kept_weights, "MAX_BYTES", 900_000)
    for _ in range(2):
        assert_right(block_panels(kept, stored), stored)
        assert [*kept._stem.parent.glob(f"*{kept_weights.SUFFIX}")] == [first]


def test_a_cache_that_is_only_read_is_used(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one in the image of a container."""
    assert_right(block_panels(kept, stored), stored)

    def read_only(*unused: object) -> None:
        raise OSError("Read-only file system")

    makes_nothing(monkeypatch)
    monkeypatch.setattr("os.utime", read_only)
    monkeypatch.setattr(kept_panels, "is_mapped_huge", lambda folder: False)
    assert_right(block_panels(kept, stored), stored)


def test_a_large_machine_writes_few_files(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one model: all models together may have no more than some."""
    monkeypatch.setattr("torch.get_num_threads", lambda: 96)
    monkeypatch.setattr(kept_panels, "MAX_WRITERS", 2)
    assert_right(block_panels(kept, stored), stored)
    assert files(kept) == 2


def test_few_bytes_have_no_file(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_panels, "LEAST", 1 << 30)

    def tries(folder: Path) -> bool:
        raise AssertionError("a file is written to see how")

    monkeypatch.setattr(kept_panels, "is_mapped_huge", tries)
    assert_right(block_panels(kept, stored), stored)
    assert files(kept) == 0


def test_a_system_with_small_pages_keeps_none(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_panels, "is_mapped_huge", lambda folder: False)
    assert_right(block_panels(kept, stored), stored)
    assert files(kept) == 0


def test_the_environment_may_say_that_none_are_kept(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a container may write little."""
    monkeypatch.setenv(SWITCH, NEVER)
    assert_right(block_panels(KeptPanels(kept._stem, "a start"), stored), stored)
    assert files(kept) == 0
    monkeypatch.setenv(SWITCH, "nver")
    with pytest.raises(ConfigError, match="never"):
        KeptPanels(kept._stem, "a start")


def test_a_disk_that_is_full_costs_time_alone(
    kept: KeptPanels, stored: dict[str, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*unused: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(kept_weights.WeightsFile, "_put", full)
    assert_right(block_panels(kept, stored), stored)
    assert not [*kept._stem.parent.iterdir()]


def test_another_key_finds_nothing_of_this_one(kept: KeptPanels, stored: dict[str, Stored]) -> None:
    """Catches panels of a file that was there under the same name before."""
    changed = stored | {"odd": (stored["odd"][0], stored["odd"][1][::-1].copy())}
    assert_right(block_panels(kept, stored), stored)
    again = KeptPanels(kept._stem, "a start of another file")
    assert_right(block_panels(again, changed), changed)
    assert_right(block_panels(again, changed), changed)


def test_damaged_files_are_made_again(kept: KeptPanels, stored: dict[str, Stored]) -> None:
    assert_right(block_panels(kept, stored), stored)
    for file in kept._stem.parent.glob(f"*{kept_weights.SUFFIX}"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink()  # as somebody does it who does not write into a file that is in use
        file.write_bytes(content)
    assert_right(block_panels(kept, stored), stored)
    assert_right(block_panels(kept, stored), stored)
