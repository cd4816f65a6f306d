"""What an operator decides about the engine."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Raises ConfigError for values that cannot be."""

    max_num_seqs: int = 32  # rows of a step
    max_queue: int = 256  # requests that may wait; more are turned away
    kv_memory: int | None = None  # bytes for keys and values, drafts' included; None: half of what is free, 8 GiB at most
    prefix_share: float = 0.25  # of kv_memory, for keys and values of texts that may come again; 0: none are kept
    max_prefills: int = 4  # prompts read in turns, so that a short one need not wait for a long one

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_queue", "max_prefills"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.kv_memory is not None and self.kv_memory < 1 << 20:
            raise ConfigError(f"kv_memory must be at least 1 MiB (1048576 bytes), got {self.kv_memory}")
        if not 0 <= self.prefix_share < 1:
            raise ConfigError(f"prefix_share must be at least 0 and below 1, got {self.prefix_share}")

    def kv_bytes(self, available: int) -> int:
        """Bytes for keys and values where `available` are free after loading."""
        return self.kv_memory or min(available // 2, 8 * GIB)
