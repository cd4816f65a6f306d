"""The entry point that vLLM loads in every process (group `vllm.general_plugins`): our counters on
its page, and the new runner.

Both do nothing where no drafter of Outrider's is asked for: an empty folder for counters is all
that is made. The new runner (Model Runner V2) is touched only where VLLM_USE_V2_MODEL_RUNNER asks
for it; without it vLLM takes the old one for us by itself.
"""

from __future__ import annotations

import os
from importlib import import_module

V2 = "VLLM_USE_V2_MODEL_RUNNER"


def register() -> None:
    """Called by vLLM, perhaps more than once a process."""
    import_module("outrider.integrations.vllm.metrics").announce()
    if os.environ.get(V2, "").strip().lower() in ("1", "true"):
        import_module("outrider.integrations.vllm.runner_v2").enable()
