"""The needs of single model families beyond the code that serves all of them: one file for each
family, named after it.

General code asks the tables here, by the names of transformers' classes and of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.models.families import bloom, deepseek, falcon, gemma, mimo, minimax, nemotron, qwen
from outrider.models.heads.mtp_layout import MtpLayout

# By the class of an attention module: what makes of (part, config) a `forward` that asks
# transformers' attention interface. None: its own code stays. The first argument of such a
# `forward` is the attention function
ATTENTION: dict[str, Callable[[Any, Any], Callable[..., Any] | None]] = {
    **bloom.ATTENTION,
    **falcon.ATTENTION,
}

# By the class of a module: what runs in the place of its `forward` while a pass is recorded, given
# the module and what writes down sums that decay (`runtime/recurrent.py`)
RECORDED: dict[str, Callable[..., Any]] = {**gemma.RECORDED, **minimax.RECORDED}

# How tensors of MTP heads are called, in the order in which a checkpoint's names are looked at
MTP_LAYOUTS: dict[str, MtpLayout] = {
    layout.name: layout for layout in (qwen.MTP, nemotron.MTP, deepseek.MTP, mimo.MTP)
}

# That of heads that are trained here
MTP_TRAINED: MtpLayout = qwen.MTP

# That of families whose GGUF files no layout names
MTP_USUAL: MtpLayout = deepseek.MTP

# By the beginning of `model_type`, what its MTP head has that is not read
MTP_NOT_READ: dict[str, str] = deepseek.MTP_NOT_READ

# Checkpoints of their own that draft on the target's keys and values
ASSISTANTS: gemma.Assistants = gemma.ASSISTANTS
