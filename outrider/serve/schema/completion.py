"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from outrider.serve.schema.base import refusal
from outrider.serve.schema.sampling import MAX_CHOICES, MAX_LOGPROBS, GenerationFields

MAX_TOKENS = 16  # OpenAI's default
MAX_PROMPTS = 2048


class CompletionBody(GenerationFields):
    """Continue one or more prompts."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = Field(
        None, description="A text, texts, token ids, or lists of token ids."
    )
    suffix: str | None = Field(
        None, description="What comes after the answer, for models with fill-in-the-middle tokens."
    )
    max_tokens: int | None = Field(
        None,
        ge=0,
        description="Default: generation_config.json's max_new_tokens, else 16. 0 only with echo.",
    )
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_CHOICES,
        description="Answers generated; the n likeliest per token return.",
    )
    echo: bool | None = Field(
        None, description="The prompt in front of the answer, with its logprobs where asked for."
    )
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Alternatives per token.")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_together(self) -> CompletionBody:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            raise refusal("prompt", "give either 'prompt' or 'prompt_token_ids'")
        if isinstance(self.prompt, list) and not 0 < len(self.prompt) <= MAX_PROMPTS:
            raise refusal(
                "prompt",
                f"'prompt' must hold 1 to {MAX_PROMPTS} prompts or token ids, got "
                f"{len(self.prompt)}",
            )
        if self.max_tokens == 0 and not self.echo:
            raise refusal(
                "max_tokens", "'max_tokens' must be at least 1; 0 makes sense with echo only"
            )
        self._check_best_of()
        if self.suffix is not None and self.echo:
            raise refusal("suffix", "'suffix' and 'echo' contradict each other")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "'stream_options' needs stream: true")
        return self

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if self.best_of < self.num_choices:
            raise refusal(
                "best_of", f"'best_of' must be at least n = {self.num_choices}, got {self.best_of}"
            )
        if self.stream and self.best_of > self.num_choices:
            raise refusal(
                "best_of",
                "'best_of' cannot be streamed: which answers are best is known at the end",
            )

    @property
    def num_generated(self) -> int:
        """Answers per prompt, also those that will not be returned."""
        return self.best_of or self.num_choices

    @property
    def is_ranked(self) -> bool:
        return self.num_generated > self.num_choices

    @property
    def limit(self) -> int:
        """Max tokens of an answer; 0: the prompt's logprobs only."""
        return MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """Each a text or token ids."""
        if self.prompt_token_ids is not None:
            return [self.prompt_token_ids]
        prompt: Any = self.prompt
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if single else list(prompt)
