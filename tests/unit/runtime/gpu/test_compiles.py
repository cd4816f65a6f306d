"""Our kernels through Triton's own compiler, for devices that are not there: to machine code, never
launched."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from outrider.models.loading.load import build_lm
from outrider.runtime.lower import lower
from tests.contract.own_cache_families import make as hybrid
from tests.unit.runtime.families import make
from tests.unit.runtime.gpu.test_programs import CPU, FAMILIES, HYBRIDS
from tests.unit.runtime.passes import every_pass

triton = pytest.importorskip("triton")  # comes with a torch for CUDA, and works without a device
CAPABILITIES = (80, 90)  # A100, H100


class AbsentDevice:
    """What Triton's launcher asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@pytest.fixture(params=CAPABILITIES)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel was called; every call compiles and launches nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    calls: Counter[str] = Counter()
    run = JITFunction.run

    def compile_alone(self: Any, *args: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *args, warmup=True, **options)
        assert "cubin" in kernel.asm
        calls[self.fn.__name__] += 1

    monkeypatch.setattr(JITFunction, "run", compile_alone)
    monkeypatch.setattr(driver, "_active", AbsentDevice(request.param))
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_compile(family: str, compiled: Counter[str]) -> None:
    """Catches what the torch stand-in of `test_programs.py` forgives: a name, a type or a shape
    that Triton refuses."""
    from outrider.runtime.gpu.run import DeviceRun

    module = make(family, torch.bfloat16)
    lm = build_lm(module, family, torch.bfloat16, CPU)
    lm.run = DeviceRun(lm, module, lower(module))
    every_pass(lm)
    assert {"kernel", "attention_parts", "attention_joined"} <= set(compiled)


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRIDS)
def test_kernels_of_states_compile(
    family: str, compiled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.runtime.gpu.run import device_states

    # nothing was launched
    monkeypatch.setattr(
        "outrider.runtime.own_states.check_same_logits", lambda *args, **kwargs: None
    )
    module = hybrid(family, torch.bfloat16)
    lm = device_states(build_lm(module, family, torch.bfloat16, CPU), module)  # type: ignore[arg-type]
    every_pass(lm)
    assert set(compiled) & {"convolution", "delta_rule", "scan"}
