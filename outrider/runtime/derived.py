"""Models made from the weights of a model that is loaded, on the native runtime where that one runs
there: from the target's own (`models/derived/derive.py`), and a draft model within a window."""

from __future__ import annotations

from dataclasses import replace
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


def windowed_lm(lm: LM, window: int, context_length: int) -> LM:
    """The model of `lm`, on the same weights, whose layers see the last `window` positions at most.

    Its cache is its own, and empty. On the native runtime it keeps those positions alone; torch's
    modules are shown a mask. Raises CapabilityError where passes cannot be made so.
    """
    own = lm.shape.sliding_window
    shape = replace(
        lm.shape, sliding_window=min(own or window, window), context_length=context_length
    )
    run = lm.run
    if isinstance(run, NativeRun):
        run = NativeRun.around(run.bound._replace(executor=run.executor.within(window)), run.path)
        shape = replace(shape, layers=tuple(layer.within(window) for layer in shape.layers))
    elif own is not None and own < window:
        raise CapabilityError(
            f"some of its layers have a window of {own} tokens, and passes of torch's modules have "
            f"one for all: at most window={own}, or --runtime native"
        )
    made = LM(run, shape, lm.dtype, lm.device)
    made.limits = lm.limits
    made.kernels = lm.kernels
    made.every_layer_windowed = True
    return made
