"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from outrider.serve.schema.base import Body, JsonSchemaFields, Label, refusal
from outrider.serve.schema.messages import Message, TemplateFields
from outrider.serve.schema.sampling import MAX_LOGPROBS, GenerationFields


class Function(Body):
    """The description of a tool, for the model to read."""

    name: str
    description: str | None = None
    parameters: JsonSchemaFields | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(None, description="Arguments follow the schema, by a grammar.")


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Body):
    """A named schema."""

    name: str | None = None
    description: str | None = None
    json_schema: JsonSchemaFields | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The required form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ThinkingFields(Body):
    """Whether the model thinks, as far as its chat template has a switch."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="adaptive: as the model's chat template has it."
    )
    budget_tokens: int | None = Field(
        None, ge=0, description="As thinking_token_budget; with enabled."
    )

    @model_validator(mode="after")
    def _check_together(self) -> ThinkingFields:
        if self.budget_tokens is not None and self.type != "enabled":
            raise refusal("budget_tokens", "'budget_tokens' needs type: enabled")
        return self


class ChatBody(GenerationFields, TemplateFields):
    """Answer a conversation."""

    messages: list[Message] | None = None
    max_tokens: int | None = Field(None, ge=1, description="Older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        description="Default: generation_config.json's max_new_tokens, else as much as the "
        "context holds.",
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = Field(
        None, description="For models whose chat template knows it."
    )
    thinking: ThinkingFields | None = None
    include_reasoning: bool | None = Field(
        None, description="false: thoughts are left out of the answer, and counted."
    )
    separate_reasoning: bool | None = Field(
        None, description="false: thoughts are part of the content, as the model wrote them."
    )
    thinking_token_budget: int | None = Field(
        None, ge=0, description="Max tokens of thoughts; then the answer begins."
    )
    prompt_cache_key: Label | None = Field(
        None, description="For the logs; all requests share one prefix cache."
    )
    safety_identifier: Label | None = Field(None, description="For the logs.")

    @model_validator(mode="after")
    def _check_together(self) -> ChatBody:
        if (self.messages is None) == (self.prompt_token_ids is None):
            raise refusal("messages", "give either 'messages' or 'prompt_token_ids'")
        if self.add_special_tokens:
            raise refusal(
                "add_special_tokens",
                "'add_special_tokens' can only be false in a chat: the template writes them",
            )
        if self.messages is not None and not self.messages:
            raise refusal("messages", "'messages' is empty: there is nothing to answer")
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "'top_logprobs' needs logprobs: true")
        if (
            self.max_tokens
            and self.max_completion_tokens
            and self.max_tokens != self.max_completion_tokens
        ):
            raise refusal(
                "max_tokens",
                "'max_tokens' is the older name of 'max_completion_tokens': give one of them",
            )
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "'stream_options' needs stream: true")
        if self.separate_reasoning is False and self.include_reasoning is False:
            raise refusal(
                "separate_reasoning",
                "'separate_reasoning' and 'include_reasoning' false contradict each other",
            )
        if (
            self.thinking is not None
            and self.thinking.budget_tokens is not None
            and self.thinking_token_budget is not None
        ):
            raise refusal(
                "thinking",
                "'thinking.budget_tokens' and 'thinking_token_budget' are one thing: give one of "
                "them",
            )
        self.check_template(self.messages, "reasoning_effort", "thinking")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise refusal("tool_choice", "'tool_choice' needs 'tools'")
        if self.response_format is not None and self.response_format.type == "json_schema":
            wanted = self.response_format.json_schema
            if wanted is None or wanted.json_schema is None:
                raise refusal(
                    "response_format",
                    "'response_format' of type json_schema needs 'json_schema.schema'",
                )

    @property
    def budget(self) -> int | None:
        """Max tokens of thoughts; None: as many as there are."""
        named = None if self.thinking is None else self.thinking.budget_tokens
        return self.thinking_token_budget if named is None else named

    @property
    def limit(self) -> int | None:
        """Max tokens of an answer; None: the context's."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None
