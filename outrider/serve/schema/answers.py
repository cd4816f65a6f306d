"""Bodies of answers, for the OpenAPI document and for tests: the endpoints write them as plain
dictionaries, piece by piece."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from outrider.serve.schema.base import Body, refusal
from outrider.serve.schema.chat import Tool
from outrider.serve.schema.messages import Message, TemplateFields


class Answer(BaseModel):
    """Base: nothing is answered that is not written here."""

    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetail


class AnthropicErrorDetail(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    type: Literal["error"]
    error: AnthropicErrorDetail


class TokenCount(Answer):
    input_tokens: int


class InputTokens(TokenCount):
    object: Literal["response.input_tokens"] = "response.input_tokens"


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Token counts of thoughts, where they are separated, and of requests with a prediction."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None  # left out before the end of a stream
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculativeDecoding(Answer):
    """vLLM's names."""

    mean_acceptance_length: float
    draft_acceptance_rate: float | None
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int | None


class Timing(Answer):
    queued_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    tpot_s: float | None
    decode_tokens_per_s: float | None
    tokens_per_s: float | None


class Metrics(Answer):
    speculative_decoding: SpeculativeDecoding | None
    timing: Timing
    lossless: bool
    prompt_share: float = 1.0
    reproducible: bool
    drafter: str
    seed: int | None
    preemptions: int


class Timings(Answer):
    """Speeds under the names of llama.cpp's server: milliseconds, tokens, tokens per second."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class Choice(Answer):
    """The fields that choices of both endpoints share."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    token_origins: list[tuple[str, Literal["accepted", "correction", "bonus", "plain"]]] | None = (
        None
    )


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    metrics: Metrics | None = None
    timings: Timings | None = None


class CompletionAnswer(Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class LogprobEntry(Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(LogprobEntry):
    top_logprobs: list[LogprobEntry]


class ChatLogprobs(Answer):
    content: list[TokenLogprob] | None
    refusal: None


class CalledFunction(Answer):
    name: str | None = None
    arguments: str | None = None


class CalledTool(Answer):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None


class AnswerMessage(Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None  # vLLM's name
    reasoning_content: str | None = None  # the same under its older name
    tool_calls: list[CalledTool] | None = None


class ChatChoice(Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class ChunkChoice(Choice):
    delta: AnswerMessage
    logprobs: ChatLogprobs | None


class ChatAnswer(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None


class ChatChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    prompt_token_ids: list[int] | None = None


# what a model can be asked for, by its chat template and its number of parameters
ModelKind = Literal["chat", "small-chat", "demo", "text"]


class ModelCard(Answer):
    """One model. What comes after `owned_by` is vLLM's and ours."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["outrider"] = "outrider"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    drafters: list[str] = []
    num_draft_tokens: int | str | None = None
    lossless: bool | None = None
    kind: ModelKind | None = Field(
        default=None,
        description="`text`: no chat template, it continues texts. `demo`: word problems only. "
        "`small-chat`: less than half a billion parameters.",
    )


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class AnthropicModel(Answer):
    """One model, as Anthropic's clients read it."""

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None = None


class AnthropicModels(Answer):
    """All of them on one page."""

    data: list[AnthropicModel]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class Health(Answer):
    """The process and its engines live."""

    status: Literal["ok"] = "ok"


class Ready(Answer):
    """`self_tests`: by model, what was found when it was tried at the start."""

    status: Literal["ready"] = "ready"
    self_tests: dict[str, dict[str, Any]]


class Version(Answer):
    version: str


class TokenizeBody(TemplateFields):
    """A text or a conversation to token ids."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: as for /v1/completions and /v1/chat/completions."
    )
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
