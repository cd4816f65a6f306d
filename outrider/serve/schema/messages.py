"""Messages of a conversation, as chat completions and /tokenize take them: text only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from outrider.serve.schema.base import PRESENT, Body, refusal

TEXT_ONLY = "this server reads text only"
REASONING = ("reasoning", "reasoning_content")  # vLLM's two names for what an assistant thought


class ContentPart(Body):
    """One piece of a message's content."""

    type: Literal["text", "refusal"] | str = Field(description="'text' or 'refusal'.")
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ContentPart:
        if self.type not in ("text", "refusal"):
            raise refusal(
                "type", f"content of type '{self.type[:40]}' is not supported: {TEXT_ONLY}"
            )
        if getattr(self, self.type) is None:
            raise refusal(self.type, f"content of type '{self.type}' needs the field '{self.type}'")
        return self


class FunctionCall(Body):
    name: str
    arguments: str = Field(
        "", description="JSON, as the model wrote it; none: the function takes nothing."
    )


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: JsonValue = Field(
        None, description="What the assistant thought, as a text, for templates that show it."
    )
    reasoning_content: JsonValue = Field(None, description="Older name of reasoning.")

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        self.tool_calls = self.tool_calls or None
        if self.content is None and not (
            self.role == "assistant" and (self.tool_calls or self.refusal or self.thoughts)
        ):
            raise refusal("content", f"a message of role '{self.role}' needs 'content'")
        if self.tool_calls is not None and self.role != "assistant":
            raise refusal(
                "tool_calls",
                f"only assistant messages have 'tool_calls', this one is of role '{self.role}'",
            )
        if self.tool_call_id is None and self.role == "tool":
            raise refusal(
                "tool_call_id", "a message of role 'tool' needs the 'tool_call_id' it answers"
            )
        return self

    @property
    def thoughts(self) -> str | None:
        """The assistant's thoughts, under either name; some clients keep objects there, which no
        template reads."""
        return next(
            (
                thought
                for thought in (self.reasoning, self.reasoning_content)
                if isinstance(thought, str)
            ),
            None,
        )

    def plain(self) -> dict[str, Any]:
        """The message as chat templates expect it: content as one text, nothing that was not given.
        Thoughts are left to the caller."""
        fields = self.model_dump(exclude_none=True, exclude={"content", "refusal", *REASONING})
        if isinstance(self.content, list):
            text = "".join(
                (part.text if part.type == "text" else part.refusal) or "" for part in self.content
            )
        else:
            text = self.content if self.content is not None else self.refusal or ""
        return {"role": fields.pop("role"), "content": text, **fields}


class TemplateFields(Body):
    """How the chat template is used; vLLM's names."""

    add_generation_prompt: bool | None = Field(
        None, description="Default true: the template opens the answer."
    )
    continue_final_message: bool | None = Field(
        None, description="The answer continues with the last message."
    )
    chat_template_kwargs: Annotated[dict[str, JsonValue], PRESENT] | None = Field(
        None, description="Handed to the model's chat template."
    )

    def check_template(self, messages: list[Message] | None, *more: str) -> None:
        """Refuses template fields that exclude each other or would be ignored.

        The two ways to begin an answer exclude each other; where no messages are rendered, fields
        that control rendering, and those named `more`, would be ignored.
        """
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal(
                "continue_final_message",
                "'continue_final_message' and 'add_generation_prompt' contradict each other",
            )
        for name in (*TemplateFields.model_fields, *more) if messages is None else ():
            if getattr(self, name) is not None:
                raise refusal(name, f"'{name}' needs 'messages': it says how they are rendered")
