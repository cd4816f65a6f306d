"""Prompts that come again, at every level and in every run, as new ones to the server's prefix cache.

Otherwise the cache answers all but the first level from memory, and first tokens come earlier than anybody's do. vLLM keeps
prompts with different `cache_salt` apart; what prompts of one level share is found as usual. Other engines are sent nothing:
what they found in a cache is noted where they say it.
"""

from __future__ import annotations

import secrets
from dataclasses import replace

from outrider.lab.server.options import LoadOptions

ENGINES = ("vllm",)
FIELD = "cache_salt"
NOTE = f"prompts are new to the prefix cache at every level ({FIELD})"


def is_salted(engine: str, options: LoadOptions) -> bool:
    """Whether the server knows the field and the user has not set it (or dropped it with None)."""
    return engine in ENGINES and FIELD not in options.extra


def salted(engine: str, options: LoadOptions) -> LoadOptions:
    """With a salt that no request had before."""
    if not is_salted(engine, options):
        return options
    return replace(options, extra={**options.extra, FIELD: secrets.token_hex(8)})
