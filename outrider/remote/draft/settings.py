"""What a draft service is allowed: lengths, rows, memory, rates."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.sampling.draft_filters import HEAD

MAX_NODES = 1024  # that a reply may add up to for one base; what clients believe


@dataclass(frozen=True, kw_only=True)
class DraftLimits:
    """Bounds of one service. Raises ConfigError for what cannot be."""

    max_draft_tokens: int = 8  # most nodes of a chain
    batch_size: int = 32  # rows of one drafting call
    max_rows: int = 256  # texts of one asker that are kept
    max_instances: int = 64  # askers
    memory_bytes: int = 2 << 30  # for keys and values, or for look-up tables
    idle_timeout_s: float = 600.0  # after which a row that nobody asks about is forgotten
    max_requests_per_s: float = 5000.0  # row requests of one asker
    distribution_tokens: int = 64  # likeliest tokens that a distribution is cut to
    outcome_nodes: int = 64  # nodes drafted ahead for likely outcomes of a pass; 0: none

    def __post_init__(self) -> None:
        for name in ("max_draft_tokens", "batch_size", "max_rows", "max_instances", "memory_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_draft_tokens > 64:
            raise ConfigError(f"max_draft_tokens must be between 1 and 64, got {self.max_draft_tokens}")
        if not 1 <= self.distribution_tokens <= HEAD:
            raise ConfigError(f"distribution_tokens must be between 1 and {HEAD}, got {self.distribution_tokens}")
        if not 0 <= self.outcome_nodes <= MAX_NODES - 64:
            raise ConfigError(f"outcome_nodes must be between 0 and {MAX_NODES - 64}, got {self.outcome_nodes}")
        for name in ("idle_timeout_s", "max_requests_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")
