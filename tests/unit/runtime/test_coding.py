"""bf16 weights in 12 bits a number: every number comes back, passes keep their bits, and a
measurement decides where they lie so."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider.cache import cache_folder
from outrider.demo import demo_paths
from outrider.errors import ConfigError
from outrider.models.linear.panel import to_panels
from outrider.models.loading.load import build_lm
from outrider.runtime import coding, library
from outrider.runtime.coding import ALWAYS, LARGE, NEVER, SWITCH, Coder, coder_for, kept_gain
from outrider.runtime.lower import lower
from outrider.runtime.ops import Code
from outrider.runtime.run import NativeRun
from outrider.runtime.structures import OpStruct, WeightFormat
from tests.unit.runtime.compiled import printed
from tests.unit.runtime.families import make
from tests.unit.runtime.passes import every_pass

CPU = torch.device("cpu")
CODED = int(WeightFormat.PANELS_CODED)


@pytest.fixture(scope="module")
def coder(library_path: Path) -> Coder:
    native = library.load(library_path)
    return Coder(native, library.workers(native, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("coded")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["avx2", "avx512", "neon"])
def test_all_numbers_come_back_and_products_keep_their_bits(kind: str, folder: Path) -> None:
    """All 65,536 as weights, in every kernel by vectors: catches a wrong place, a lost escape, a
    part of a panel that another row reads."""
    found = printed("coded", kind, folder)
    assert all(line.startswith("same") for line in found), found
    assert found[:2] == [
        "same 61376",
        "same 60928",
    ]  # escapes, where numbers are as often as others
    assert len(found) == 22


def _weight(outputs: int, inputs: int, rare: float) -> Tensor:
    """Normal numbers, and this share of any that are finite."""
    torch.manual_seed(outputs + inputs)
    weight = torch.randn(outputs, inputs).mul(0.02).bfloat16()
    others = torch.randint(-(1 << 15), 1 << 15, weight.shape).to(torch.int16).view(torch.bfloat16)
    return torch.where((torch.rand(weight.shape) < rare) & others.isfinite(), others, weight)


def _coded(coder: Coder) -> Tensor:
    """Panels of two weights with escapes."""
    weights = [_weight(70, 256, 0.001), _weight(70, 256, 0.002)]
    panels = coder.panels(weights.__getitem__, 2, (70, 256))
    assert panels is not None
    return panels


def test_panels_that_are_whole_are_known(coder: Coder) -> None:
    panels = _coded(coder)
    assert coding.are_whole(panels, 2, (70, 256))
    assert not coding.are_whole(panels, 1, (70, 256))
    assert not coding.are_whole(panels, 2, (70, 252))
    assert not coding.are_whole(panels, 2, (102, 256))
    assert not coding.are_whole(panels[:-4], 2, (70, 256))
    assert not coding.are_whole(panels[:100], 2, (70, 256))
    assert not coding.are_whole(torch.cat([panels, panels[-4:]]), 2, (70, 256))


def test_panels_that_would_be_read_outside_are_refused(coder: Coder) -> None:
    """Each header's place and number of escapes, and each escape: a reader writes to the place that
    an escape names, and goes on from the one before."""
    whole = _coded(coder)
    size = coding.HEADER + 256 // coding.EACH * coding.FOUR
    headers = [number * size for number in range(6)]
    escapes = range(6 * size, len(whole), 4)
    changes = [
        (header + field, 8, value)
        for header in headers
        for field in (16, 24)
        for value in (-(1 << 62), -1, 1, 1 << 40)
    ]
    changes += [
        (escape, 4, place << 8) for escape in escapes for place in (256 * 32, (1 << 23) - 1)
    ]
    changes += [(escape, 4, 0) for escape in escapes[1:2]]
    for at, width, value in changes:
        panels = whole.clone()
        dtype = torch.int64 if width == 8 else torch.int32
        field = panels[at : at + width].view(dtype)
        field.copy_(field + value if width == 8 else torch.tensor([value], dtype=dtype))
        assert not coding.are_whole(panels, 2, (70, 256)), (at, value)


def _op(kind: WeightFormat, panels: Tensor, weight: Tensor) -> OpStruct:
    op = OpStruct(format=int(kind), N=weight.shape[0], K=weight.shape[1], weight=panels.data_ptr())
    op.out.is_bf16 = 1
    return op


def _product(coder: Coder, op: OpStruct, x: Tensor) -> Tensor:
    out = torch.empty(len(x), op.N, dtype=torch.bfloat16)
    coder.library.outrider_runtime_linear(
        ctypes.addressof(op), x.data_ptr(), len(x), out.data_ptr(), coder.workers
    )
    return out.view(torch.int16)


@pytest.mark.parametrize("rare", [0.0, 0.002])
@pytest.mark.parametrize("shape", [(1, 64), (33, 132), (200, 1000), (96, 2052)])
def test_products_have_the_bits_of_plain_panels(
    shape: tuple[int, int], rare: float, coder: Coder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same on the library, by matrix tiles where there are some: whole steps and a rest of
    inputs, tiles of one and of two dozen rows, more than share one reading."""
    monkeypatch.setattr(coding, "MAX_SHARE", 1.0)
    weight = _weight(*shape, rare)
    panels = coder.panels(lambda _: weight, 1, shape)
    assert panels is not None
    plain = to_panels(weight)
    for rows in (1, 2, 5, 8, 16, 17, 32, 33, 70, 128):
        x = torch.randn(rows, shape[1]).bfloat16()
        expected = _product(coder, _op(WeightFormat.PANELS_BF16, plain, weight), x)
        found = _product(coder, _op(WeightFormat.PANELS_CODED, panels, weight), x)
        assert torch.equal(found, expected), rows


def _rows(coder: Coder, op: OpStruct) -> Tensor:
    tokens = torch.arange(op.N)
    out = torch.empty(op.N, op.K, dtype=torch.bfloat16)
    coder.library.outrider_runtime_rows(
        ctypes.addressof(op), tokens.data_ptr(), op.N, out.data_ptr()
    )
    return out


def test_trained_weights_come_back_from_three_quarters_of_their_bytes(coder: Coder) -> None:
    """The demo target's: its matrices, and its table of embeddings, whose rows are read."""
    target, _ = demo_paths()
    matrices = {k: w for k, w in load_file(target / "model.safetensors").items() if w.dim() == 2}
    assert len(matrices) > 20
    before = after = 0
    for name, weight in matrices.items():
        weight = weight.bfloat16()
        shape = (weight.shape[0], weight.shape[1])
        panels = coder.panels(lambda _, weight=weight: weight, 1, shape)
        assert panels is not None, name
        rows = _rows(coder, _op(WeightFormat.PANELS_CODED, panels, weight))
        assert torch.equal(rows.view(torch.int16), weight.view(torch.int16)), name
        before += weight.nbytes
        after += panels.nbytes
    assert after <= 0.77 * before


def test_numbers_without_a_pattern_stay_as_they_are(coder: Coder) -> None:
    """Too many escapes, inputs that are no fours, and a panel with more numbers than escapes can
    name."""
    shape = (64, 1024)
    anything = torch.randint(-(1 << 15), 1 << 15, shape).to(torch.int16).view(torch.bfloat16)
    assert coder.panels(lambda _: anything, 1, shape) is None
    for other in [(64, 1022), (32, (1 << 19) + 4), (0, 64), (64, 0)]:
        assert coder.panels(lambda _: pytest.fail("was read"), 1, other) is None


@pytest.mark.parametrize(
    ("family", "codes"),
    [
        ("llama", {Code.LINEAR}),
        ("gemma", {Code.LINEAR, Code.EMBED}),  # tied
        ("gpt2", {Code.LINEAR, Code.EMBED}),  # tied, and transposed weights
        ("qwen3_moe", {Code.LINEAR, Code.EXPERTS}),
        ("gpt_oss", {Code.LINEAR, Code.EXPERTS}),  # transposed
        ("deepseek_v3", {Code.LINEAR, Code.EXPERTS, Code.HEADS}),
    ],
)
def test_passes_have_the_same_bits(
    family: str, codes: set[Code], library_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds of weights of a model, coded: catches a panel, an expert or a table that lies
    elsewhere."""
    monkeypatch.setattr(coding, "MAX_SHARE", 2.0)
    found = {}
    for choice in (NEVER, ALWAYS):
        monkeypatch.setenv(SWITCH, choice)
        torch.manual_seed(0)
        module = make(family, torch.bfloat16)
        lm = build_lm(module, family, torch.bfloat16, CPU)
        run = lm.run = NativeRun(lm, module, lower(module), library_path)
        found[choice] = every_pass(lm)
        ops = run.executor._binding._ops
        assert {op.code for op in ops if op.format == CODED} == (
            codes if choice == ALWAYS else set()
        )
    for what, logits in found[NEVER].items():
        assert torch.equal(found[ALWAYS][what], logits), what


def test_a_measurement_decides_and_is_kept(
    library_path: Path, coder: Coder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for a machine, and never for a model that caches hold."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH, raising=False)
    gains = [1.2, 1.01]
    monkeypatch.setattr(coding, "_measured_gain", lambda coder: gains.pop(0))

    def found(threads: int, num_bytes: int = LARGE) -> bool:
        return coder_for(library_path, coder.library, threads, num_bytes) is not None

    assert not found(2, LARGE - 1)
    assert len(gains) == 2
    assert kept_gain(library_path.name, 2) is None
    assert found(2)
    assert found(2)
    assert kept_gain(library_path.name, 2) == 1.2
    assert not found(3)  # other threads are another machine
    assert not found(3)
    assert gains == []
    for content in ({"gain": -1.0}, {"gain": "fast"}, [], {"gain": float("nan")}):
        for file in (cache_folder() / "coding").iterdir():
            file.write_text(json.dumps(content))
        gains.append(1.3)
        assert found(2)  # measured anew
        assert gains == []


def test_the_switch_is_honoured_or_refused(
    library_path: Path, coder: Coder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coding, "_measured_gain", lambda coder: pytest.fail("was measured"))
    monkeypatch.setenv(SWITCH, ALWAYS)
    assert coder_for(library_path, coder.library, 2, 0) == coder
    monkeypatch.setenv(SWITCH, NEVER)
    assert coder_for(library_path, coder.library, 2, LARGE) is None
    monkeypatch.setenv(SWITCH, "alway")
    with pytest.raises(ConfigError, match=r"'alway', which is none.*Did you mean 'always'"):
        coder_for(library_path, coder.library, 2, 0)


def test_both_ways_are_timed(coder: Coder) -> None:
    assert 0.1 < coding._measured_gain(coder) < 10
