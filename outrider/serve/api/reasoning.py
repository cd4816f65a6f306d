"""Thoughts of one model: which marks it writes, whether a prompt leaves them open, and how its
answers are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.sampling.thinking import ThinkingMarks
from outrider.serve.api.reasoning_formats import NONE, ReasoningFormat, format_of
from outrider.serve.api.texts import SharedTokenizer
from outrider.serve.errors import ApiError

# tokens at the end of a prompt that are looked at: a template ends with the mark, or does not
TAIL = 64


@dataclass(frozen=True)
class Reasoning:
    """How one model thinks."""

    format: ReasoningFormat
    opening_id: int | None
    closing_ids: tuple[int, ...]  # empty: the marks are text

    @classmethod
    def of(cls, texts: SharedTokenizer, name: str) -> Reasoning | None:
        """The parser of a model's thoughts; None: they are not separated. Raises ConfigError for a
        parser that does not fit the model.
        """
        if name == NONE:
            return None
        added = {
            entry.content: token for token, entry in texts.tokenizer.added_tokens_decoder.items()
        }
        marks = format_of(name, texts.chat_template or "", added)
        if marks is None:
            return None
        if marks.is_harmony:
            ids = _harmony_ids(texts.tokenizer, added)
            return cls(marks, None, ids) if ids else None
        opening = added.get(marks.opening[0])
        closing = added.get(marks.closing[0])
        if opening is None or closing is None:
            return cls(marks, None, ())
        return cls(marks, opening, (closing,))

    def thinking(
        self,
        texts: SharedTokenizer,
        prompt: list[int],
        *,
        begun: str | None = None,
        budget: int | None = None,
    ) -> ThinkingMarks | None:
        """The marks of thoughts in the answer to a prompt; None: the prompt has closed them.
        `begun`: the text of the prompt's last message, where the answer continues it. Raises
        ApiError for a budget that cannot be kept.
        """
        form = self.format
        is_open = self._is_open(texts, prompt, begun)
        if is_open is None:
            return None
        if budget is not None and len(self.closing_ids) != 1:
            raise ApiError(
                f"thoughts in the format '{form.name}' cannot have a budget, for no single token "
                "closes them; use 'max_tokens'",
                param="thinking_token_budget",
            )
        return ThinkingMarks(
            opening=form.opening,
            closing=form.closing,
            opening_id=self.opening_id,
            closing_ids=self.closing_ids,
            is_open=is_open,
            budget=budget,
            repeats=form.needs_tokens and self.opening_id is not None,
        )

    def _is_open(self, texts: SharedTokenizer, prompt: list[int], begun: str | None) -> bool | None:
        """Whether the prompt ends inside thoughts; None: after them."""
        form = self.format
        if begun and begun.strip():
            return (
                True
                if max(map(begun.rfind, form.opening)) > max(map(begun.rfind, form.closing))
                else None
            )
        if form.is_harmony:
            return True
        tail = texts.decode(prompt[-TAIL:], flush=False).rstrip()
        if tail.endswith(form.closing):
            return None
        return tail.endswith(
            tuple(mark + label for mark in form.opening for label in ("", form.label))
        )


def _harmony_ids(tokenizer: Any, added: dict[str, int]) -> tuple[int, ...]:
    """Tokens with which the answer begins; none where they are not all there, so that nothing waits
    for them."""
    final = tokenizer.get_vocab().get("final")
    ids = (added.get("<|channel|>"), final, added.get("<|message|>"))
    return tuple(token for token in ids if token is not None) if None not in ids else ()
