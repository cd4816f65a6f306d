"""Makes vLLM's new model runner take our drafters: its list of speculators is closed, so two of its
functions are wrapped.

    init_speculator                             builds ours where `custom_class` names our Proposer; else vLLM's own, as ever
    VllmConfig's list of unsupported features   no longer names `custom_class` in that case

For other configurations both give what they gave before.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from outrider.integrations.vllm.versions import log

OURS = ("outrider.integrations.vllm.Proposer", "outrider.integrations.vllm.proposer.Proposer")
METHOD = "custom_class"
UNSUPPORTED = "speculative method 'custom_class'"
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
RUNNER = "vllm.v1.worker.gpu.model_runner"
CONFIG = "vllm.config.vllm"
FEATURES = "_get_v2_model_runner_unsupported_features"
INIT = "init_speculator"
ARGUMENTS = ["vllm_config", "device", "req_states"]  # of `init_speculator`
MARK = "_wrapped_by_outrider"


def enable() -> None:
    """Wrap both, once a process. A vLLM that has others stays unchanged, with a warning."""
    try:
        package = import_module(SPECULATORS)
        config = import_module(CONFIG).VllmConfig
        make = getattr(package, INIT)
        features = getattr(config, FEATURES)
        if list(inspect.signature(make).parameters) != ARGUMENTS:
            raise AttributeError(f"{INIT} takes {inspect.signature(make)}")
    except (ImportError, AttributeError) as error:
        log.warning(
            "Outrider drafts in the old model runner only: it knows the new one of vLLM 0.32, not "
            "this one (%s).",
            error,
        )
        return
    if hasattr(make, MARK):
        return
    wrapped = _with_ours(make)
    setattr(package, INIT, wrapped)
    if RUNNER in sys.modules:  # imported already, with a name of its own for it
        setattr(sys.modules[RUNNER], INIT, wrapped)
    setattr(config, FEATURES, _without_ours(features))


def is_ours(speculative_config: Any) -> bool:
    """Whether this configuration asks for our Proposer."""
    return (
        getattr(speculative_config, "method", None) == METHOD
        and getattr(speculative_config, "model", None) in OURS
    )


def _with_ours(make: Callable[..., Any]) -> Callable[..., Any]:
    def init_speculator(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if not is_ours(vllm_config.speculative_config):
            return make(vllm_config, device, req_states)
        # derives from vLLM's class, so not before
        speculator = import_module("outrider.integrations.vllm.speculator")
        return speculator.Speculator(vllm_config, device, req_states)

    setattr(init_speculator, MARK, True)
    return init_speculator


def _without_ours(features: Callable[[Any], list[str]]) -> Callable[[Any], list[str]]:
    def unsupported(self: Any) -> list[str]:
        found = features(self)
        return (
            [feature for feature in found if feature != UNSUPPORTED]
            if is_ours(self.speculative_config)
            else found
        )

    return unsupported
