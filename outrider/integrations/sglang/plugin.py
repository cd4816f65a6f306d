"""The entry point that SGLang loads (group `sglang.srt.plugins`): registers the speculative
algorithm OUTRIDER.

To SGLang the algorithm is its NGRAM in every question that it asks, since the worker is that of
NGRAM; two answers differ: which worker, and how many branches a draft has (one: drafts are chains).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from outrider.errors import CapabilityError, ConfigError
from outrider.integrations.sglang.tested import OTHERWISE, TESTED
from outrider.integrations.vllm.options import read_options

NAME = "OUTRIDER"
INFO = "sglang.srt.speculative.spec_info"
REGISTRY = "sglang.srt.speculative.spec_registry"


def register() -> None:
    """Called by SGLang, perhaps more than once a process. Raises CapabilityError for an SGLang that
    has no such registry."""
    try:
        algorithms = import_module(INFO).SpeculativeAlgorithm
        registry = import_module(REGISTRY)
        base = registry.CustomSpecAlgo
        known = registry.get_spec(NAME)
        ngram = algorithms.NGRAM
    except (ImportError, AttributeError) as error:
        raise CapabilityError(
            f"{OTHERWISE} they cannot be registered ({error}): install sglang {TESTED}"
        ) from error
    if known is not None:
        return
    kind = algorithm_class(base, ngram)
    algorithms.register(
        NAME, supports_overlap=True, validate_server_args=check_arguments, spec_class=kind
    )(_worker)


def algorithm_class(base: Any, ngram: Any) -> type:
    """The class of the algorithm: `base` is SGLang's for plug-ins, `ngram` the algorithm whose
    answers it gives."""

    class Outrider(base):
        """NGRAM with another source of drafts."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            """Drafts are chains: one branch, so that no attention backend needs a tree's mask,
            whatever its page size."""
            server_args.speculative_ngram_min_bfs_breadth = (
                server_args.speculative_ngram_max_bfs_breadth
            ) = 1
            ngram.handle_server_args(server_args)

        def __getattr__(self, name: str) -> Any:
            """Attributes that `base` does not have, like `create_future_map` in 0.5.19, and that
            the scheduler reads all the same."""
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(ngram, name)

    return Outrider


def check_arguments(server_args: Any) -> None:
    """Before anything is loaded. Raises ConfigError for a drafter or for arguments that make no
    sense together."""
    read_options(None, os.environ)
    if getattr(server_args, "speculative_use_rejection_sampling", False):
        raise ConfigError(
            "--speculative-use-rejection-sampling needs a draft's probabilities, which look-ups "
            f"lack: leave it out with {NAME}"
        )
    if getattr(server_args, "speculative_ngram_external_corpus_path", None) is not None:
        raise ConfigError(
            f"--speculative-ngram-external-corpus-path is NGRAM's; with {NAME} set "
            "OUTRIDER_DRAFTER=retrieval and "
            "OUTRIDER_DRAFTER_OPTIONS=corpus=PATH"
        )


def _worker(server_args: Any) -> type:
    worker: type = import_module("outrider.integrations.sglang.worker").worker_class()
    return worker
