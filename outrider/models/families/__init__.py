"""What single model families need beyond the code that serves all of them: one file for each family, named after it.

General code asks the tables here, by the names of transformers' classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.models.families import bloom, falcon, gemma4, minimax

# By the class of an attention module: what makes of (part, config) a `forward` that asks transformers' attention interface.
# None: its own code stays. The first argument of such a `forward` is the attention function
ATTENTION: dict[str, Callable[[Any, Any], Callable[..., Any] | None]] = {**bloom.ATTENTION, **falcon.ATTENTION}

# By the class of a module: what runs in the place of its `forward` while a pass is recorded, given the module and what writes
# down sums that decay (`runtime/recurrent.py`)
RECORDED: dict[str, Callable[..., Any]] = {**gemma4.RECORDED, **minimax.RECORDED}
