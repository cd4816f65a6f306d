"""Single layers on the native library against torch's own, and against themselves beside other
rows."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from outrider.errors import CapabilityError
from outrider.instructions import of_this_cpu
from outrider.models import attention
from outrider.models.linear.panel import PanelLinear, fits, to_panels
from outrider.models.loading import load
from outrider.models.loading.load import build_lm, finish
from outrider.models.probes.probe import check_same_logits, probe_logits
from outrider.runtime import building
from outrider.runtime.layers import use_kernels
from tests.helpers import tiny_llama
from tests.unit.conftest import KERNELS

CPU = torch.device("cpu")
UNIT = Path(__file__).parents[1]


def _linear(inputs: int, outputs: int, kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer = (
        Conv1D(outputs, inputs)
        if kind == "conv1d"
        else nn.Linear(inputs, outputs, bias=kind == "bias")
    )
    return layer.to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("kind", ["bias", "no bias", "conv1d"])
@pytest.mark.parametrize("rows", [1, 18, 41])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (64, 33), (384, 640), (1000, 96)])
def test_panel_linear_is_the_linear(
    inputs: int, outputs: int, rows: int, kind: str, library_path: Path
) -> None:
    """Catches a wrong panel, a lost tail, a missing bias: as close to exact arithmetic as torch's
    own linear is."""
    layer = _linear(inputs, outputs, kind)
    x = torch.randn(1, rows, inputs).bfloat16()
    weight = layer.weight.t() if kind == "conv1d" else layer.weight
    exact = F.linear(
        x.double(), weight.double(), None if layer.bias is None else layer.bias.double()
    )
    panel = PanelLinear(layer)
    use_kernels(panel, library_path)
    error = (panel(x).double() - exact).abs().max()
    assert error <= 2**-8 * exact.abs().max()


@pytest.mark.parametrize("inputs", [384, 1000])  # one part of a panel, three
def test_a_row_has_the_same_bits_beside_any_other(inputs: int, library_path: Path) -> None:
    """What greedy exactness rests on: one group of rows, two even and uneven ones, two blocks,
    another number of threads."""
    panel = PanelLinear(_linear(inputs, 200, "bias"))
    use_kernels(panel, library_path)
    x = torch.randn(70, inputs).bfloat16()
    alone = torch.cat([panel(x[i : i + 1]) for i in range(70)])
    for count in (1, 2):
        use_kernels(panel, library_path, count)
        for rows in (2, 7, 8, 9, 16, 17, 32, 40, 64, 65, 70):
            assert torch.equal(panel(x[:rows]), alone[:rows]), (rows, count)


def test_what_does_not_fit_is_left_alone() -> None:
    assert fits(_linear(64, 3, "bias"))
    assert not fits(nn.Linear(64, 3))  # fp32
    assert not fits(_linear(63, 3, "bias"))  # odd inputs
    assert to_panels(torch.ones(33, 4)).shape == (2, 2, 32, 2)


def test_where_onednn_has_no_bf16_plain_passes_take_the_kernels(
    monkeypatch: pytest.MonkeyPatch, library_path: Path
) -> None:
    """What a CPU without AVX-512 does, on any: linears are ours, and the logits those of the plain
    module."""
    attention.register()
    module = tiny_llama(97).bfloat16().eval()
    lm = build_lm(module, "tiny", torch.bfloat16, CPU)
    expected = probe_logits(lm)
    monkeypatch.setattr(load, "can_pack", lambda device, dtype: False)
    finish(lm, module, kernels=partial(use_kernels, path=library_path))
    assert module.lm_head.kernel is not None
    assert isinstance(module.lm_head, PanelLinear)
    check_same_logits(lm, expected, module)  # within the rounding of bf16


def test_a_compiler_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if building.compiler() is None:
        pytest.skip("needs a C++ compiler")
    monkeypatch.setattr(building, "FLAGS", ("--no-such-flag",))
    with pytest.raises(
        CapabilityError, match=r"could not build the native runtime \(.*no-such-flag"
    ):
        building.build(tmp_path / "runtime.so", "avx2")


KERNEL_TESTS = (
    "runtime/test_layers.py", "models/derived/test_quantise.py", "models/gguf/test_formats.py", "verifiers/test_kernels.py",
    "verifiers/test_one_call.py",
)  # fmt: skip
RUNTIME_TESTS = tuple(
    f"runtime/test_{name}.py"
    for name in ("run", "limits", "matrices", "choices", "drafting", "wide_passes")
)


@pytest.mark.skipif(
    of_this_cpu() != "avx512", reason="AVX2's are the best here, so every test has run on them"
)
@pytest.mark.parametrize(
    "files",
    [
        pytest.param(KERNEL_TESTS, marks=pytest.mark.slow, id="kernels"),
        pytest.param(RUNTIME_TESTS, marks=pytest.mark.nightly, id="runtime"),
    ],
)
def test_kernels_for_avx2_are_right_too(files: tuple[str, ...]) -> None:
    """On a machine with AVX-512: tests of the library once more, on the kernels that most
    processors get."""
    pytest_options = ("-p", "no:cacheprovider", "-m", "not slow and not nightly")
    command = [
        sys.executable,
        "-m",
        "pytest",
        *pytest_options,
        *(str(UNIT / name) for name in files),
    ]
    done = subprocess.run(
        command, env={**os.environ, KERNELS: "avx2"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout
