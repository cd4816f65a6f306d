"""How much memory one model takes, as plain data; `loading/memory.py` finds it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelMemory:
    """One model's part."""

    name: str
    weights_bytes: int  # one copy in the dtype it runs in; 0 when it cannot be known without loading
    kv_bytes_per_token: int
    quantised_bytes: int = 0  # of `weights_bytes`: stays as it is stored, so that no second copy is packed
    loading_bytes: int = 0  # while loading rounds plain weights; 0: it rounds none

    def held_bytes(self, copies: float) -> int:
        """Weights at the worst moment of loading."""
        return max(self.loading_bytes, round((self.weights_bytes - self.quantised_bytes) * copies) + self.quantised_bytes)
