"""Text and token ids of one model, for the event loop: its own copy of the tokenizer, so that the
engine's thread never waits.

Prompts are made here: a text as the tokenizer has it, a conversation through the model's chat
template.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from outrider.errors import CapabilityError, RequestError
from outrider.messages import CallError, encode_conversation
from outrider.models.tokens.token_bytes import token_bytes
from outrider.serve.api.spelling import Spelling
from outrider.serve.errors import ApiError
from outrider.templates import variables_of
from outrider.text import decode

# characters; longer texts are read in a thread, for the loop has other requests to serve
LONG = 4096
# (before the prefix, before the suffix, before the answer); families that have them
FIM_LAYOUTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder's first form
    # DeepSeek-Coder: the hole stands before the suffix
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)  # fmt: skip


class SharedTokenizer:
    """A tokenizer that one text is read with at a time, in whatever thread."""

    def __init__(self, tokenizer: Any, name: str, *, spells: bool = False) -> None:
        """Make texts of a tokenizer's tokens. `spells`: special tokens in texts of clients are
        spelled as text.

        Raises CapabilityError for a tokenizer whose vocabulary has an unknown form, ConfigError for
        one that cannot spell.
        """
        self.tokenizer = copy.deepcopy(tokenizer)
        known = token_bytes(self.tokenizer)
        if known is None:
            raise CapabilityError(
                "the server reads vocabularies of the tokenizers library, but this model's "
                f"{type(tokenizer).__name__} is Python "
                "code of its own: put a tokenizer.json next to the weights (transformers' "
                "convert_slow_tokenizer makes many)"
            )
        self.bytes = known
        self._name = name
        self._lock = threading.Lock()
        self._fim = FillInTheMiddle.of(self.tokenizer)
        self._spelling = Spelling(self.tokenizer, self.chat_template, name) if spells else None

    @property
    def chat_template(self) -> str | None:
        template = getattr(self.tokenizer, "chat_template", None)
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else template

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads."""
        return variables_of(self.chat_template or "")

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text. `special`: with the begin token and the like, where the model has
        them."""

        def work() -> list[int]:
            if self._spelling is not None:
                return self._spelling.encode(text, special=special)
            # we judge lengths
            return list(
                self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
            )

        return await self._alone(work, len(text))

    async def _alone(self, work: Callable[[], list[int]], size: int) -> list[int]:
        """The result of `work` with the tokenizer: at once where that is quick and nobody else
        reads, for the loop must not wait."""
        if size < LONG and self._lock.acquire(blocking=False):
            try:
                return work()
            finally:
                self._lock.release()

        def wait() -> list[int]:
            with self._lock:
                return work()

        return await asyncio.to_thread(wait)

    @property
    def can_fill(self) -> bool:
        """Whether the model has tokens for a text between two others."""
        return self._fim is not None

    async def fill(self, prefix: str, suffix: str) -> list[int]:
        """The prompt whose answer stands between two texts. Raises ApiError for a model that was
        not trained for it."""
        if self._fim is None:
            raise ApiError(
                f"'suffix' is not supported by '{self._name}': its tokenizer has no "
                "fill-in-the-middle tokens",
                param="suffix",
            )
        before = await self.encode(prefix, special=False)
        after = await self.encode(suffix, special=False)
        begin = self.tokenizer.bos_token_id
        usual = await self.encode("a")
        return [
            *([begin] if begin is not None and usual[0] == begin else []),
            *self._fim.prompt(before, after),
        ]

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation under the model's chat template. Raises ApiError, or
        CallError for a broken call."""
        if not self.chat_template:
            raise ApiError(
                f"'{self._name}' has no chat template; use /v1/completions", code="no_chat_template"
            )

        def work() -> list[int]:
            return encode_conversation(
                self.tokenizer, messages, self.chat_template or "", reader=self._spelling, **options
            )

        try:
            # tools, calls and thoughts included
            return await self._alone(work, len(str((messages, options))))
        except CallError:
            raise
        except RequestError as error:
            raise ApiError(str(error), param="messages") from error

    def decode(self, tokens: Sequence[int], *, flush: bool = True) -> str:
        """The text of token ids, special tokens included. Without `flush` an unfinished character
        at the end is left out."""
        return decode(self.tokenizer, tokens, special=True, flush=flush)


@dataclass(frozen=True)
class FillInTheMiddle:
    """Ids of the three tokens around a prefix, a suffix and the text between them."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, tokenizer: Any) -> FillInTheMiddle | None:
        """The tokens of a vocabulary, or None where it has none. DeepSeek ends with its third token
        as well."""
        vocab = tokenizer.get_vocab()
        for layout in FIM_LAYOUTS:
            if all(token in vocab for token in layout):
                return cls(*(vocab[token] for token in layout))
        return None

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        return [self.prefix, *before, self.suffix, *after, self.middle]
