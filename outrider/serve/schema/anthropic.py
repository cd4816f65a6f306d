"""The bodies of /v1/messages and /v1/messages/count_tokens, which are Anthropic's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from outrider.sampling.params import SamplingParams, Text
from outrider.serve.schema.base import PRESENT, Body, JsonSchemaFields, UnknownField, like, refusal
from outrider.serve.schema.chat import ThinkingFields
from outrider.serve.schema.messages import TEXT_ONLY
from outrider.serve.schema.sampling import MAX_WORDS
from outrider.serve.schema.speculation import SpeculationFields

NEEDS = {  # of a block of each type
    "text": ("text",), "thinking": ("thinking",), "redacted_thinking": (), "tool_use": ("id", "name"),
    "tool_result": ("tool_use_id",),
}  # fmt: skip
ROLES = {
    "user": ("text", "tool_result"), "assistant": ("text", "thinking", "redacted_thinking", "tool_use"), "system": ("text",),
}  # fmt: skip
# begin the types of tools that clients run
CLIENT_TOOLS = ("bash_", "text_editor_", "memory_", "computer_")
OWN_TOOLS = "this server runs no tools of its own: give functions, with an 'input_schema'"


class TextBlock(Body):
    """A text, as system prompts and results of tools have them."""

    type: Literal["text"] | str = Field(description="'text'.")
    text: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> TextBlock:
        if self.type != "text":
            raise refusal(
                "type", f"a block of type '{self.type[:40]}' is not supported here: {TEXT_ONLY}"
            )
        if self.text is None:
            raise refusal("text", "a block of type 'text' needs 'text'")
        return self


class ContentBlock(Body):
    """A piece of a message."""

    type: str = Field(description="text, thinking, redacted_thinking, tool_use or tool_result.")
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(None, description="Of a thinking block: not looked at.")
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, JsonValue] | None = Field(
        None, description="Of a call; none: the function takes nothing."
    )
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ContentBlock:
        if self.type not in NEEDS:
            raise refusal(
                "type", f"a block of type '{self.type[:40]}' is not supported: {TEXT_ONLY}"
            )
        for name in NEEDS[self.type]:
            if getattr(self, name) is None:
                raise refusal(name, f"a block of type '{self.type}' needs '{name}'")
        return self

    def take_unknown(self, path: str = "", param: str = "") -> Iterator[UnknownField]:
        """See `Body`. What only Anthropic's own models can read, and what no chat template shows,
        is as if it were unknown."""
        yield from super().take_unknown(path, param)
        if self.type == "redacted_thinking":
            yield UnknownField(
                "data",
                path + "data",
                param + "data",
                (),
                "thoughts that were encrypted elsewhere cannot be read",
            )
        if self.is_error:
            yield UnknownField(
                "is_error",
                path + "is_error",
                param + "is_error",
                (),
                "chat templates show a tool's content only",
            )


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]

    @model_validator(mode="after")
    def _check_blocks(self) -> Turn:
        if not self.content and (self.role != "assistant" or self.content == []):
            raise refusal("content", f"'content' of a message of role '{self.role}' is empty")
        for block in self.content if isinstance(self.content, list) else ():
            if block.type not in ROLES[self.role]:
                raise refusal(
                    "content",
                    f"a block of type '{block.type}' does not belong to role '{self.role}'",
                )
        return self


class ClientTool(Body):
    """A function that the client runs."""

    type: Literal["custom"] | str | None = None
    name: str
    description: str | None = None
    input_schema: JsonSchemaFields | None = Field(None, description="JSON schema of the input.")
    strict: bool | None = Field(None, description="The input follows the schema, by a grammar.")

    @model_validator(mode="after")
    def _check_type(self) -> ClientTool:
        if self.type is not None and self.type.startswith(CLIENT_TOOLS):
            raise refusal(
                "type",
                f"a tool of type '{self.type[:40]}' is not supported: only Anthropic's models "
                "know what it takes. "
                "Give it as a function, with an 'input_schema'",
            )
        if self.type not in (None, "custom"):
            raise refusal(
                "type", f"a tool of type '{self.type[:40]}' is not supported: {OWN_TOOLS}"
            )
        if self.input_schema is None:
            raise refusal("input_schema", f"the tool '{self.name[:40]}' needs 'input_schema'")
        return self


class AnthropicToolChoice(Body):
    """Whether tools are used, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise refusal("name", "'name' belongs to 'tool_choice' of type tool, which needs it")
        return self


class Metadata(Body):
    """The labels of the request, for the log."""

    user_id: str | None = None


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaFields = Field(alias="schema")


class OutputConfig(Body):
    """Form and effort."""

    effort: str | None = Field(
        None, description="For models whose chat template knows reasoning_effort."
    )
    format: OutputFormat | None = None


class Thinking(ThinkingFields):
    """See `ThinkingFields`. Anthropic has a budget with every enabled thinking."""

    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thoughts are left out of the answer."
    )

    def take_unknown(self, path: str = "", param: str = "") -> Iterator[UnknownField]:
        """See `Body`."""
        yield from super().take_unknown(path, param)
        if self.display == "summarized":
            yield UnknownField(
                "display", path + "display", param + "display", (), "thoughts are emitted whole"
            )


class Edit(Body):
    """A change of the conversation before the model reads it."""

    type: str
    keep: JsonValue = None


class ContextManagement(Body):
    """Changes of the conversation: only those that keep all of it."""

    edits: list[Edit] | None = None

    @model_validator(mode="after")
    def _check_edits(self) -> ContextManagement:
        for edit in self.edits or ():
            if edit.keep != "all":
                raise refusal(
                    "edits",
                    f"the edit '{edit.type[:40]}' is not supported: shorten the conversation "
                    "instead",
                )
        return self


class CountBody(Body):
    """A conversation whose tokens are counted."""

    model: str | None = Field(
        None, description="A name from /v1/models; may be left out where one model is served."
    )
    messages: list[Turn] = Field(min_length=1)
    system: str | list[TextBlock] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], PRESENT] | None = Field(
        None, description="Handed to the model's chat template."
    )


class MessagesBody(CountBody):
    """Answer a conversation."""

    max_tokens: int = Field(ge=1, description="Max tokens of the answer, thoughts included.")
    stream: bool | None = Field(None, description="Server-sent events instead of one answer.")
    stop_sequences: Annotated[list[Text], Field(max_length=MAX_WORDS)] | None = None
    temperature: float | None = like(SamplingParams, "temperature")
    top_p: float | None = like(SamplingParams, "top_p")
    top_k: int | None = like(SamplingParams, "top_k")
    metadata: Metadata | None = None
    seed: int | None = like(SamplingParams, "seed", "Ours: same seed, same text.")
    priority: int | None = Field(None, description="Ours: smaller runs first; default 0.")
    speculation: SpeculationFields | None = None
