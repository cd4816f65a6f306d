"""Prompts of `real_model.py` in the model's chat template: Spec-Bench, MT-bench, GSM8K, and texts
of a given length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from questions import questions

CATEGORIES = ("summarization", "qa", "translation", "rag", "math_reasoning", "mt", "gsm8k")
SHORT = "Why is the sky blue?"
# tokens; longer questions are passed over, so that every engine reads them whole
LONGEST_PROMPT = 1400
LOOK_THROUGH = 40  # questions of a category, at most


class Prompts:
    """Token ids under the tokenizer and the chat template of a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def chat(self, text: str) -> list[int]:
        """One user's message, up to where the assistant begins."""
        messages = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def of_category(self, category: str, count: int, skip: int = 0) -> list[list[int]]:
        """The first `count` prompts of a category that are not too long."""
        encoded = (self.chat(text) for text in questions(category, LOOK_THROUGH, skip))
        return [ids for ids in encoded if len(ids) <= LONGEST_PROMPT][:count]

    def of_length(self, num_tokens: int, variant: int = 0) -> list[int]:
        """A request to summarise newspaper articles, cut so that the whole prompt has `num_tokens`."""
        articles = "\n\n".join(
            text.removeprefix("Summarize: ") for text in questions("summarization", 20, variant)
        )
        words = self._tokenizer(articles, add_special_tokens=False)["input_ids"]
        frame = len(self.chat("Summarize: "))
        for kept in range(num_tokens - frame, 0, -1):  # a cut may join or split a token at its end
            ids = self.chat("Summarize: " + self._tokenizer.decode(words[:kept]))
            if len(ids) <= num_tokens:
                return ids
        raise ValueError(f"no prompt of {num_tokens} tokens: the chat template alone has {frame}")
