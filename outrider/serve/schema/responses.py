"""The body of /v1/responses: OpenAI's interface for agents. Text and functions; what OpenAI's own
tools do is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, JsonValue, model_validator

from outrider.sampling.params import SamplingParams
from outrider.serve.schema.base import (
    PRESENT,
    Body,
    JsonSchemaFields,
    Label,
    Metadata,
    UnknownField,
    like,
    refusal,
)
from outrider.serve.schema.messages import TEXT_ONLY
from outrider.serve.schema.sampling import StreamOptions
from outrider.serve.schema.speculation import SpeculationFields

TEXTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
OWN_TOOLS = "this server runs no tools of its own: give functions"
# which clients run, as they do functions
CLIENT_TOOLS = ("custom", "namespace", "local_shell", "shell", "apply_patch")
ONLY_FUNCTIONS = "models are shown functions, their calls and outputs"
ENCRYPTED = "thoughts are emitted as text"


class InputPart(Body):
    """A piece of an item's content."""

    type: str = Field(description="input_text, output_text, reasoning_text or refusal.")
    text: str | None = None
    refusal: str | None = None
    annotations: JsonValue = Field(None, description="Of an earlier answer: not looked at.")
    logprobs: JsonValue = Field(None, description="Likewise.")

    @model_validator(mode="after")
    def _check_type(self) -> InputPart:
        if self.type not in (*TEXTS, "refusal"):
            raise refusal(
                "type", f"content of type '{self.type[:40]}' is not supported: {TEXT_ONLY}"
            )
        if (self.refusal if self.type == "refusal" else self.text) is None:
            raise refusal("text", f"content of type '{self.type}' needs its text")
        return self

    @property
    def plain_text(self) -> str:
        return (self.refusal if self.type == "refusal" else self.text) or ""


class InputItem(Body):
    """A message, a call, its output, or what the model thought."""

    type: str = Field(
        "message",
        description="message, function_call, function_call_output, reasoning or item_reference.",
    )
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None  # JSON, as the model wrote it; none: the function takes nothing
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> InputItem:
        needs = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
            "item_reference": ("id",),
        }
        if self.type not in needs:
            why = ONLY_FUNCTIONS if self.type.startswith(CLIENT_TOOLS) else OWN_TOOLS
            raise refusal("type", f"an item of type '{self.type[:40]}' is not supported: {why}")
        for name in needs[self.type]:
            if getattr(self, name) is None:
                raise refusal(name, f"an item of type '{self.type}' needs '{name}'")
        return self

    def take_unknown(self, path: str = "", param: str = "") -> Iterator[UnknownField]:
        """See `Body`."""
        yield from super().take_unknown(path, param)
        if self.encrypted_content:
            yield UnknownField(
                "encrypted_content",
                path + "encrypted_content",
                param + "encrypted_content",
                (),
                ENCRYPTED,
            )


class FunctionTool(Body):
    """A function that the client runs, or another tool of the client's, which is ignored."""

    type: str = Field(description=f"'function'. Ignored: {', '.join(CLIENT_TOOLS)}.")
    name: str | None = None
    description: str | None = None
    parameters: JsonSchemaFields | None = Field(None, description="JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="Arguments follow the schema, by a grammar. Default false."
    )

    @model_validator(mode="after")
    def _check_type(self) -> FunctionTool:
        if self.type not in ("function", *CLIENT_TOOLS):
            raise refusal(
                "type", f"a tool of type '{self.type[:40]}' is not supported: {OWN_TOOLS}"
            )
        if self.type == "function" and self.name is None:
            raise refusal("name", "a tool of type 'function' needs 'name'")
        return self


class ChosenTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: JsonSchemaFields | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """How the answer is written."""

    format: TextFormat | None = None


class ReasoningConfig(Body):
    """How much is thought."""

    effort: str | None = Field(
        None, description="For models whose chat template knows reasoning_effort."
    )


class InputTokensBody(Body):
    """A conversation whose tokens are counted."""

    model: str | None = Field(
        None, description="A name from /v1/models; may be left out where one model is served."
    )
    input: str | list[InputItem] = Field(
        description="What the user says, or items of a conversation."
    )
    instructions: str | None = Field(
        None, description="A system message in front, of this response only."
    )
    previous_response_id: str | None = Field(
        None, description="Go on from a response that this server still has."
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, JsonValue], PRESENT] | None = Field(
        None, description="Handed to the model's chat template."
    )

    def take_unknown(self, path: str = "", param: str = "") -> Iterator[UnknownField]:
        """See `Body`. Tools that are no functions are as if they were unknown: no chat template
        shows them."""
        for number, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                yield UnknownField(
                    tool.type,
                    f"{path}tools[{tool.type}]",
                    f"{param}tools.{number}",
                    (),
                    ONLY_FUNCTIONS,
                )
        self.tools = [tool for tool in self.tools or () if tool.type == "function"] or None
        yield from super().take_unknown(path, param)


class ResponsesBody(InputTokensBody):
    """Answer a text or a conversation, which may continue from an earlier response."""

    store: bool | None = Field(
        None, description="Default true: a later response may continue from this one."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(
        None, ge=1, description="Thoughts included. Default: as for chat completions."
    )
    temperature: float | None = like(SamplingParams, "temperature")
    top_p: float | None = like(SamplingParams, "top_p")
    include: list[str] | None = None
    metadata: Metadata | None = Field(None, description="For the logs; the response has it.")
    user: str | None = Field(None, description="For the logs.")
    prompt_cache_key: Label | None = Field(
        None, description="For the logs; all requests share one prefix cache."
    )
    safety_identifier: Label | None = Field(None, description="For the logs.")
    top_k: int | None = like(SamplingParams, "top_k")
    seed: int | None = like(SamplingParams, "seed", "Ours: same seed, same text.")
    priority: int | None = Field(None, description="Smaller runs first; default 0.")
    speculation: SpeculationFields | None = None

    @model_validator(mode="after")
    def _check_together(self) -> ResponsesBody:
        if isinstance(self.input, list) and not self.input and self.previous_response_id is None:
            raise refusal("input", "'input' is empty: there is nothing to answer")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise refusal("tool_choice", "'tool_choice' needs 'tools'")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "'stream_options' needs stream: true")
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise refusal(
                "stream_options",
                "'stream_options.include_usage' belongs to chat completions: responses have usage",
            )
        for wanted in self.include or ():
            if wanted != "reasoning.encrypted_content":
                raise refusal(
                    "include",
                    f"'include' of '{wanted[:60]}' is not supported: responses have text and "
                    "calls only",
                )
        form = None if self.text is None else self.text.format
        if form is not None and form.type == "json_schema" and form.json_schema is None:
            raise refusal("text", "'text.format' of type json_schema needs 'schema'")
        return self

    def take_unknown(self, path: str = "", param: str = "") -> Iterator[UnknownField]:
        """See `Body`."""
        yield from super().take_unknown(path, param)
        if self.include:
            yield UnknownField("include", path + "include", param + "include", (), ENCRYPTED)
