"""The native CPU kernels against torch's own, and against themselves beside other rows."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import CapabilityError
from outrider.models import attention, load, native
from outrider.models.attention import _attend
from outrider.models.layout import attention_mask, tree_depths_and_ancestors
from outrider.models.load import build_lm, finish
from outrider.models.panel import PanelLinear, fits, to_panels
from outrider.models.probe import check_same_logits, probe_logits
from outrider.runtime.layers import use_kernels
from tests.helpers import tiny_llama
from tests.unit.conftest import KERNELS

CPU = torch.device("cpu")
UNIT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    not native.can_serve(CPU, torch.bfloat16),
    reason="needs AVX2 or AVX-512, and a C++ compiler",
)


Kernel = Callable[[PanelLinear, Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def library(native_library: ctypes.CDLL) -> ctypes.CDLL:
    return native_library


@pytest.fixture(params=["operation", *native.PANEL_KERNELS])
def kernel(request: pytest.FixtureRequest, library: ctypes.CDLL, library_path: Path) -> Kernel:
    """A way to run a panel linear: as the models do, by vectors, by tiles."""
    if request.param == "operation":
        return lambda layer, x: layer(x) if use_kernels(layer, library_path) else x
    if "tiles" in request.param and not library.outrider_has_tiles():
        pytest.skip("needs matrix tiles (AMX)")
    return _by(request.param, library)


def _by(name: str, library: ctypes.CDLL) -> Kernel:
    function = getattr(library, name)

    def run(layer: PanelLinear, x: Tensor) -> Tensor:
        out = x.new_full((*x.shape[:-1], layer.out_features), float("nan"))
        bias = None if layer.bias is None else layer.bias.data_ptr()
        rows, inputs = x.numel() // x.shape[-1], x.shape[-1]
        function(x.data_ptr(), rows, inputs, layer.panels.data_ptr(), bias, out.data_ptr(), layer.out_features)
        return out

    return run


def _linear(inputs: int, outputs: int, kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer = Conv1D(outputs, inputs) if kind == "conv1d" else nn.Linear(inputs, outputs, bias=kind == "bias")
    return layer.to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("kind", ["bias", "no bias", "conv1d"])
@pytest.mark.parametrize("rows", [1, 18, 41])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (64, 33), (384, 640), (1000, 96)])
def test_panel_linear_is_the_linear(kernel: Kernel, inputs: int, outputs: int, rows: int, kind: str) -> None:
    """Catches a wrong panel, a lost tail, a missing bias: as close to exact arithmetic as torch's own linear is."""
    layer = _linear(inputs, outputs, kind)
    x = torch.randn(1, rows, inputs).bfloat16()
    weight = layer.weight.t() if kind == "conv1d" else layer.weight
    exact = F.linear(x.double(), weight.double(), None if layer.bias is None else layer.bias.double())
    error = (kernel(PanelLinear(layer), x).double() - exact).abs().max()
    assert error <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("inputs", [384, 1000])  # one part of a panel, three
def test_a_row_has_the_same_bits_beside_any_other(kernel: Kernel, inputs: int) -> None:
    """What greedy exactness rests on: one group of rows, two even and uneven ones, two blocks, another number of threads."""
    panel = PanelLinear(_linear(inputs, 200, "bias"))
    x = torch.randn(70, inputs).bfloat16()
    alone = torch.cat([kernel(panel, x[i : i + 1]) for i in range(70)])
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (2, 7, 8, 9, 16, 17, 32, 40, 64, 65, 70):
                assert torch.equal(kernel(panel, x[:rows]), alone[:rows]), (rows, count)
    finally:
        torch.set_num_threads(threads)


def test_models_multiply_by_tiles_where_there_are(library: ctypes.CDLL, library_path: Path) -> None:
    """Catches a choice that never takes them: right, and slow. Bits tell: the kernels add up in different orders."""
    layer, x = PanelLinear(_linear(1000, 640, "bias")), torch.randn(9, 1000).bfloat16()
    by_tiles = _by("outrider_panel_linear_tiles", library)(layer, x) if library.outrider_has_tiles() else None
    by_vectors = _by("outrider_panel_linear_vectors", library)(layer, x)
    use_kernels(layer, library_path)
    assert torch.equal(layer(x), by_vectors if by_tiles is None else by_tiles)
    assert by_tiles is None or not torch.equal(by_tiles, by_vectors)


def test_what_does_not_fit_is_left_alone() -> None:
    assert fits(_linear(64, 3, "bias"))
    assert not fits(nn.Linear(64, 3))  # fp32
    assert not fits(_linear(63, 3, "bias"))  # odd inputs
    assert to_panels(torch.ones(33, 4)).shape == (2, 2, 32, 2)


def _attention(heads: int, kv_heads: int, size: int, value_size: int, queries: int) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    rows, capacity = 2, 1024
    starts = torch.tensor([0, 300])
    query = torch.randn(rows, queries, heads, size).bfloat16().transpose(1, 2)  # as the models hand it over
    keys = torch.randn(rows + 1, capacity, kv_heads, size).bfloat16()
    values = torch.randn(rows + 1, capacity, kv_heads, value_size).bfloat16()
    return query, keys, values, starts


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("queries", [1, 6, 30])
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(6, 2, 64, 64), (4, 4, 32, 80), (3, 1, 20, 20)])
def test_cache_attention_is_attention(
    heads: int, kv_heads: int, size: int, value_size: int, queries: int, window: int | None
) -> None:
    """Catches a wrong head group, slot, stride, tail or mask; the first row's first query sees a single key."""
    query, keys, values, starts = _attention(heads, kv_heads, size, value_size, queries)
    mask = attention_mask(starts, queries, 512, torch.bfloat16, window)
    ours = torch.ops.outrider.cache_attention(query, keys, values, mask, 0.3)
    plain = _attend(
        query.float(), keys[:2, :512].transpose(1, 2).float(), values[:2, :512].transpose(1, 2).float(),
        mask[:, :, :queries].float(), 0.3,
    )  # fmt: skip
    torch.testing.assert_close(ours.float(), plain.transpose(1, 2), rtol=2e-2, atol=2e-2)


def test_cache_attention_of_a_query_depends_on_nothing_else() -> None:
    """Same bits alone, among others, and with more room behind it."""
    query, keys, values, starts = _attention(6, 2, 64, 64, 12)
    whole = torch.ops.outrider.cache_attention(query, keys, values, attention_mask(starts, 12, 512, torch.bfloat16), 0.1)
    wide = torch.ops.outrider.cache_attention(query, keys, values, attention_mask(starts, 12, 1024, torch.bfloat16), 0.1)
    assert torch.equal(whole, wide)
    for t in range(12):
        mask = attention_mask(starts + t, 1, 512, torch.bfloat16)
        assert torch.equal(torch.ops.outrider.cache_attention(query[:, :, t : t + 1], keys, values, mask, 0.1)[:, 0], whole[:, t])


def test_a_tree_path_has_the_bits_of_the_chain() -> None:
    """Keys of other branches in between must not move the sums into other lanes: greedy text would differ on near ties."""
    query, keys, values, starts = _attention(6, 2, 64, 64, 9)
    parents = torch.tensor([[-1, -1, 0, 1, 1, 2, 4, 0]]).expand(2, -1)
    tree = attention_mask(starts, 9, 512, torch.bfloat16, None, *tree_depths_and_ancestors(parents))
    whole = torch.ops.outrider.cache_attention(query, keys, values, tree, 0.1)
    path = torch.tensor([0, 2, 5, 7])  # pending token, then nodes 1, 4 and 6
    alone_keys, alone_values = keys.clone(), values.clone()
    for row, start in enumerate(starts.tolist()):
        alone_keys[row, start : start + 4] = keys[row, start + path]
        alone_values[row, start : start + 4] = values[row, start + path]
    mask = attention_mask(starts, 4, 512, torch.bfloat16)
    alone = torch.ops.outrider.cache_attention(query[:, :, path], alone_keys, alone_values, mask, 0.1)
    assert torch.equal(whole[:, path], alone)


def test_nan_is_not_hidden() -> None:
    """A NaN key must reach the output of whoever sees it, and of nobody else."""
    query, keys, values, starts = _attention(6, 2, 64, 64, 4)
    keys[1, 302] = float("nan")
    out = torch.ops.outrider.cache_attention(query, keys, values, attention_mask(starts, 4, 512, torch.bfloat16), 0.1)
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[1, :2]).all()
    assert out[1, 2:].isnan().all()


def test_where_onednn_has_no_bf16_plain_passes_take_the_kernels(
    monkeypatch: pytest.MonkeyPatch, library_path: Path
) -> None:
    """What a CPU without AVX-512 does, on any: linears are ours, and the logits those of the plain module."""
    attention.register()
    module = tiny_llama(97).bfloat16().eval()
    lm = build_lm(module, "tiny", torch.bfloat16, CPU)
    expected = probe_logits(lm)
    monkeypatch.setattr(load, "can_pack", lambda device, dtype: False)
    finish(lm, module, kernels=partial(use_kernels, path=library_path))
    assert module.lm_head.kernel is not None
    assert isinstance(module.lm_head, PanelLinear)
    check_same_logits(lm, expected)  # as of a compiled program: within the rounding of bf16


def test_a_compiler_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FLAGS", ("--no-such-flag",))
    with pytest.raises(CapabilityError, match=r"could not build the CPU kernels \(.*no-such-flag.*--dtype float32"):
        native.build(tmp_path / "native.so")


@pytest.mark.slow
@pytest.mark.skipif(native.instructions() != "avx512", reason="AVX2's are the best here, so every test has run on them")
def test_kernels_for_avx2_are_right_too() -> None:
    """On a machine with AVX-512: the tests of all kernels once more, on those that most processors get."""
    files = (
        "models/test_native.py", "models/test_quantise.py", "models/gguf/test_formats.py", "verifiers/test_kernels.py",
        "verifiers/test_one_call.py",
    )  # fmt: skip
    pytest_options = ("-p", "no:cacheprovider", "-m", "not slow")
    command = [sys.executable, "-m", "pytest", *pytest_options, *(str(UNIT / name) for name in files)]
    done = subprocess.run(command, env={**os.environ, KERNELS: "avx2"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
