"""Cache stores of keys and values."""

from outrider.kv.cache import KVCache, LayerShape

__all__ = ["KVCache", "LayerShape"]
