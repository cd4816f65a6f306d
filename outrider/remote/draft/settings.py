"""What a draft service is allowed: lengths, rows, memory, rates."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.sampling.draft_filters import HEAD
from outrider.settings import check_bounds, setting


@dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """Bounds of one service. Raises ConfigError for what cannot be."""

    max_draft_tokens: int = setting(8, "most nodes of a chain", at_least=1, at_most=64)
    batch_size: int = setting(32, "rows of one drafting call", at_least=1)
    max_rows: int = setting(256, "texts of one asker that are kept", at_least=1)
    max_instances: int = setting(64, "askers", at_least=1)
    memory_bytes: int = setting(2 << 30, "for keys and values, or for look-up tables", at_least=1)
    idle_timeout_s: float = setting(600.0, "after which a row that nobody asks about is forgotten", above=0)
    max_requests_per_s: float = setting(5000.0, "row requests of one asker", above=0)
    distribution_tokens: int = setting(64, "likeliest tokens that a distribution is cut to", at_least=1, at_most=HEAD)

    def __post_init__(self) -> None:
        check_bounds(self, "draft service")
