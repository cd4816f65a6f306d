"""Imports transformers' models without what no verb here uses: torch's compiler, sharded tensors, scipy's assignment problem.

They are more than a third of the time that these imports take, for features that stay unused: compiling modules, spreading one
model over processes, losses of object detection. While the modules are read, transformers is told that the latter two are not
installed, and finds stand-ins for the compiler's decorators; afterwards everything is as before, and what does need the compiler
imports it. For programs of our own only: whoever uses outrider as a library may want those features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"
HIGHER_ORDER = f"{COMPILER}._trace_wrapped_higher_order_op"
ABSENT = ("is_torch_distributed_available", "is_scipy_available")


def import_models() -> None:
    """Read transformers' code that all models share; nothing where that, or the compiler, was imported before."""
    import transformers

    if COMPILER in sys.modules or "transformers.modeling_utils" in sys.modules:
        return
    with _without_features(transformers.utils), _without_compiler():
        import transformers.generation.utils
        import transformers.masking_utils
        import transformers.modeling_layers
        import transformers.models.auto.modeling_auto


@contextmanager
def _without_features(utils: Any) -> Iterator[None]:
    """transformers' questions whether a feature is there are answered with no."""
    places = [place for place in (utils, utils.import_utils) for name in ABSENT if hasattr(place, name)]
    kept = [(place, name, getattr(place, name)) for place in places for name in ABSENT if hasattr(place, name)]
    for place, name, _ in kept:
        setattr(place, name, lambda: False)
    try:
        yield
    finally:
        for place, name, answer in reversed(kept):
            setattr(place, name, answer)


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Stand-ins for torch's compiler, which mark functions for it and do nothing else."""
    import torch

    compiler, order = ModuleType(COMPILER), ModuleType(HIGHER_ORDER)
    compiler.__path__ = []
    compiler.allow_in_graph = compiler.assume_constant_result = _same  # type: ignore[attr-defined]
    order.TransformGetItemToIndex = _real_transform  # type: ignore[attr-defined]
    disable = torch.compiler.disable
    torch.compiler.disable = _decorator
    sys.modules.update({COMPILER: compiler, HIGHER_ORDER: order})
    try:
        yield
    finally:
        torch.compiler.disable = disable
        for name, module in ((COMPILER, compiler), (HIGHER_ORDER, order)):
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _same(function: Any) -> Any:
    return function


def _decorator(fn: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
    """In place of `torch.compiler.disable`, with and without arguments."""
    decorate: Callable[[Any], Any] = _same
    return decorate if fn is None else fn


def _real_transform() -> Any:
    """Made when a mask needs it."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
