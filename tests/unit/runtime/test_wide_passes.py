"""Passes of hundreds and thousands of tokens, as prompts are read in, and attention far back: the
bits of one token at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.instructions import of_this_cpu
from outrider.kv import KVCache, LayerShape
from outrider.models.probes.sum_order import AttentionKind
from outrider.runtime import building, library
from tests.unit.runtime.samples import NativeAttention, with_sinks

TOTAL = 2048
CUTS = ((2048,), (73, 128, 500, 1347), (64, 1, 1983), (1024, 1024))
KINDS = [
    (AttentionKind(9, LayerShape(3, 64, 64), None), 0), (AttentionKind(4, LayerShape(2, 34, 18), 20.0), 0),
    (AttentionKind(8, LayerShape(1, 128, 96), None), 0), (AttentionKind(9, LayerShape(3, 64, 64), None), 300),
    (AttentionKind(8, LayerShape(2, 64, 64), None, has_sinks=True), 300),
    (AttentionKind(4, LayerShape(2, 34, 18), 20.0, has_sinks=True), 0),
    (AttentionKind(8, LayerShape(4, 64, 64), None, has_slopes=True), 0),
    (AttentionKind(20, LayerShape(1, 96, 64, True), None), 0), (AttentionKind(3, LayerShape(1, 50, 34, True), None), 300),
]  # fmt: skip


class Text:
    """One layer's queries, keys and values of a long text, read by the executor in passes of given
    widths."""

    def __init__(self, kind: AttentionKind, window: int, dtype: torch.dtype, path: Path) -> None:
        generator = torch.Generator().manual_seed(5)
        shape = kind.shape
        self.parts = [
            torch.randn(1, heads, TOTAL, size, generator=generator).to(dtype) * scale
            for heads, size, scale in (
                (kind.num_heads, shape.key_size, 0.2),
                (shape.num_kv_heads, shape.key_size, 1.0),
                (shape.num_kv_heads, shape.value_size, 1.0),
            )
        ]
        if shape.values_in_keys:
            self.parts[2] = self.parts[1][..., : shape.value_size]
        self._kind = kind
        self._dtype = dtype
        self._attend = NativeAttention(kind, dtype, path, rows=TOTAL, window=window)

    def read(self, widths: tuple[int, ...]) -> Tensor:
        """(tokens, heads * value size)"""
        kv = KVCache([self._kind.shape], self._dtype, "cpu")
        found = []
        kv.add_row()
        kv.reserve(1, TOTAL)
        for width in widths:
            start = kv.lengths[0]
            query, key, value = (part[:, :, start : start + width] for part in self.parts)
            found.append(self._attend(kv, query, key, value, None))
            kv.advance(0, width)
        return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "window"), KINDS, ids=str)
def test_a_long_text_has_the_same_bits_however_it_is_cut(
    kind: AttentionKind, window: int, dtype: torch.dtype, library_path: Path
) -> None:
    """Catches a sum over keys that follows the pass's width or where it begins, among blocks of
    queries, ranges and spans."""
    text = Text(kind, window, dtype, library_path)
    whole = text.read(CUTS[0])
    assert all(torch.equal(text.read(widths), whole) for widths in CUTS[1:])
    for start in (0, 63, 64, 511, 512, 1500):
        alone = text.read((*((start,) if start else ()), *[1] * 8))
        assert torch.equal(alone[start:], whole[start : start + 8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_do_not_change_a_long_text(
    dtype: torch.dtype, library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches spans that are put together as their threads come; with eight threads even wide
    passes are divided into spans."""
    kind = KINDS[0][0]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    alone = Text(kind, 0, dtype, library_path).read((2000, 7, 1, 40))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert torch.equal(Text(kind, 0, dtype, library_path).read((2000, 7, 1, 40)), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "window"), KINDS, ids=str)
def test_a_wide_pass_is_torchs(
    kind: AttentionKind, window: int, dtype: torch.dtype, library_path: Path
) -> None:
    """Catches keys beyond a span, a block of queries or a window that are left out, or weighed
    wrongly."""
    text = Text(kind, window, dtype, library_path)
    found = text.read((500, 700, 848)).view(TOTAL, kind.num_heads, -1)
    query, key, value = (part[0].float() for part in text.parts)
    group = kind.num_heads // kind.shape.num_kv_heads
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2)
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    apart = torch.arange(TOTAL)[:, None] - torch.arange(TOTAL)
    if (slopes := kind.slopes()) is not None:
        scores = scores - slopes[:, None, None] * apart
    unseen = (apart < 0) | (apart >= (window or TOTAL))
    scores = with_sinks(scores.masked_fill(unseen, -torch.inf), kind)
    expected = scores.softmax(-1)[..., :TOTAL] @ value.repeat_interleave(group, 0)
    assert (found.transpose(0, 1) - expected).abs().max() < (
        1e-4 if dtype == torch.float32 else 3e-2
    )


@pytest.mark.nightly  # each compiles the library: these try the tests above, not the kernels
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "(weight[0] + weight[1]) + (weight[2] + weight[3])",
            "(count > 3 ? weight[0] + weight[2] + (weight[1] + weight[3]) : "
            "(weight[0] + weight[1]) + (weight[2] + weight[3]))",
        ),
        # the same order: must pass
        ("SPAN = 512, LANES", "SPAN = 448 + 64 * (sizeof(long) == 8), LANES"),
        ("lowest() / RANGE * RANGE)", "(pass.tokens > 1 ? 0 : start() % 32))"),
    ],
)
def test_another_order_is_found_out(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails for samples that could pass by luck: kernels are built whose sums follow the pass."""
    kind = of_this_cpu()
    if kind is None or building.compiler() is None:
        pytest.skip("needs AVX2 or AVX-512, and a C++ compiler")
    shutil.copytree(building.HERE / "native", tmp_path / "native")
    header = tmp_path / "native" / "attend.h"
    before = header.read_text(encoding="utf-8")
    assert right in before
    header.write_text(before.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(
        building, "SOURCES", tuple(tmp_path / "native" / path.name for path in building.SOURCES)
    )
    monkeypatch.setattr(building, "HERE", tmp_path)
    # a third of the time; sums keep their order
    monkeypatch.setattr(building, "FLAGS", ("-O1", *building.FLAGS[1:]))
    building.build(tmp_path / "mutated.so", kind)
    library.load(tmp_path / "mutated.so")
    text = Text(KINDS[0][0], 0, torch.float32, tmp_path / "mutated.so")
    whole = text.read(CUTS[0])
    same = torch.equal(text.read((1000, *[1] * 40))[1000:], whole[1000:1040])
    assert same == ("448" in wrong)
