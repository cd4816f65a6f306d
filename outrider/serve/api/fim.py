"""Fill in the middle, for models with special tokens for a prefix, a suffix and the text between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LAYOUTS = (  # (before the prefix, before the suffix, before the answer); families that have them
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder's first form
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder: the hole stands before the suffix
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)  # fmt: skip


@dataclass(frozen=True)
class FillInTheMiddle:
    """Ids of a model's three tokens."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, tokenizer: Any) -> FillInTheMiddle | None:
        """The tokens of a vocabulary, or None where it has none. DeepSeek ends with its third token as well."""
        vocab = tokenizer.get_vocab()
        for layout in LAYOUTS:
            if all(token in vocab for token in layout):
                return cls(*(vocab[token] for token in layout))
        return None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        return [self.prefix, *before, self.suffix, *after, self.middle]
