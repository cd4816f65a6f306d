"""Models made from the target's own weights (`models/derived/derive.py`) on the native runtime,
where the target runs there."""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import CapabilityError
from outrider.models.derived.derive import plain_lm
from outrider.models.lm import LM
from outrider.models.probes.probe import probe_logits
from outrider.models.signals import AFTER_NORM
from outrider.runtime.lower import lower
from outrider.runtime.run import NativeRun


def native_derived_lm(module: Any, target: LM, name: str) -> LM:
    """An `LM` around a module derived from the target's, on the executor; panels of weights that it
    left alone are shared.

    It gives no hidden states, and is not compared with the plain module, which may have no other
    kernels. Raises NotLoweredError where it cannot run there, CapabilityError when its logits are
    no numbers.
    """
    assert isinstance(target.run, NativeRun)
    lm = plain_lm(module, target)
    run = NativeRun(lm, module, lower(module, (AFTER_NORM,)), target.run.path)
    lm.run = run
    lm.limits = target.limits
    lm.kernels = target.kernels
    if not torch.isfinite(probe_logits(lm)).all():
        raise CapabilityError(
            f"{name} gives NaN or infinite logits, so it cannot draft. Use another drafter."
        )
    return lm
