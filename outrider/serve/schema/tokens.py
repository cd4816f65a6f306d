"""Bodies of /tokenize and /detokenize, which are vLLM's."""

from __future__ import annotations

from pydantic import BaseModel, Field, model_validator

from outrider.serve.schema.base import Body, refusal
from outrider.serve.schema.chat import Tool
from outrider.serve.schema.messages import Message, TemplateFields


class TokenizeBody(TemplateFields):
    """A text or a conversation to token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="Default: as for /v1/completions and /v1/chat/completions.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_together(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "give either 'prompt' or 'messages'")
        self.check_template(self.messages, "tools")
        return self


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Body):
    """Token ids to text, special tokens included."""

    model: str | None = None
    tokens: list[int]


class DetokenizeAnswer(BaseModel):
    prompt: str
