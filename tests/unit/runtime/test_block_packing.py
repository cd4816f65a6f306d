"""Panels that the native library makes of a file's blocks are those that torch makes, byte for
byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES

from outrider.errors import CapabilityError
from outrider.models.gguf.experts import SAME
from outrider.models.gguf.formats import FORMS
from outrider.models.gguf.header import TensorInfo
from outrider.models.gguf.packing import by_torch, panels_in
from outrider.runtime import block_packing, library
from outrider.runtime.block_packing import by_library
from tests.gguf_files import Kind, random_blocks

OFFSET = 36  # a file's tensors begin anywhere


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path / "tensors"


def _stored(path: Path, kind: Kind, shape: tuple[int, ...], seed: int = 0) -> TensorInfo:
    outputs = int(np.prod(shape[:-1]))
    blocks = random_blocks(kind, outputs, shape[-1], seed)
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before + b"\xff" * OFFSET + blocks.tobytes())
    return TensorInfo("tensor", shape, kind, path, len(before) + OFFSET, blocks.nbytes)


@pytest.mark.parametrize("kind", [Kind[name] for name in FORMS], ids=lambda kind: kind.name)
def test_both_ways_make_one_thing(kind: Kind, scratch: Path, library_path: Path) -> None:
    """Catches a bit of a code, a step or a scale from elsewhere, rows out of order, and 32 outputs
    not filled."""
    native = library.load(library_path)
    dice = np.random.default_rng(0)
    alone = _stored(scratch, kind, (45, 512))
    more = _stored(scratch, kind, (32, 512), seed=1)
    experts = _stored(scratch, kind, (3, 40, 256), seed=2)
    others = _stored(scratch, kind, (3, 8, 256), seed=3)
    for tensors, count in (
        ([alone], 45),
        ([alone, more], 77),
        ([experts], 40),
        ([experts, others], 48),
    ):
        for order in (SAME, dice.permutation(count)):
            made = by_library(native, (tensors, order))
            expected = by_torch((tensors, order))
            assert made.shape == expected.shape
            assert torch.equal(made, expected), (len(tensors), order)


@pytest.mark.parametrize("kind", [Kind[name] for name in FORMS], ids=lambda kind: kind.name)
def test_every_bit_has_its_place(kind: Kind, scratch: Path, library_path: Path) -> None:
    """A row for each bit of a block, with that bit alone or all but it. Catches a bit that gets
    lost or spills into a neighbour, which random blocks could hide."""
    inputs, size = GGML_QUANT_SIZES[kind]
    alone = np.packbits(np.eye(size * 8, dtype=np.uint8), axis=1)
    rows = np.concatenate([alone, ~alone])
    rows = rows if inputs == 256 else np.tile(rows, 256 // inputs)
    scratch.write_bytes(rows.tobytes())
    tensor = TensorInfo("tensor", (len(rows), 256), kind, scratch, 0, rows.nbytes)
    made = by_library(library.load(library_path), ([tensor], SAME))
    assert torch.equal(made, by_torch(([tensor], SAME)))


def test_a_format_without_panels_is_refused(scratch: Path, library_path: Path) -> None:
    tensor = _stored(scratch, Kind.Q4_0, (32, 256))
    rows = block_packing._addresses(tensor.read())
    room = torch.zeros(1, dtype=torch.uint8)
    native = library.load(library_path)
    assert not native.outrider_pack_blocks(
        rows.ctypes.data, 32, 256, int(Kind.TQ1_0), room.data_ptr()
    )


def test_where_there_is_no_library_torch_makes_them(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation without a library and compiler, or whose compiler fails, loads GGUF files all
    the same."""

    def fails(cache: Path) -> Path:
        raise CapabilityError("no C++ compiler found")

    monkeypatch.setattr(library, "find", fails)
    monkeypatch.setattr(block_packing, "_library", block_packing._library.__wrapped__)
    stored = [([_stored(scratch, kind, (45, 512))], SAME) for kind in (Kind.Q4_K, Kind.Q6_K)]
    made = panels_in(stored, block_packing.pack)
    assert all(torch.equal(own, by_torch(one)) for own, one in zip(made, stored, strict=True))
