"""Fields that both generating endpoints have: sampling, limits, what to report, speculation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any

from pydantic import Field, JsonValue, model_validator

from outrider.errors import ConfigError
from outrider.sampling.params import SamplingParams, Text, TokenId
from outrider.serve.schema.base import PRESENT, Body, Metadata, like, refusal
from outrider.serve.schema.resumption import Resumption
from outrider.serve.schema.speculation import Prediction, SpeculationFields

MAX_LOGPROBS = 20  # alternatives per token, OpenAI's limit
MAX_CHOICES = 128
# bad_words and stop: each is looked for at every token, in the thread that decodes for everybody
MAX_WORDS = 1024
Bias = Annotated[float, Field(ge=-100, le=100)]  # OpenAI's limits


class StreamOptions(Body):
    """The extras that a stream reports besides the text."""

    include_usage: bool | None = Field(
        None, description="A last chunk with usage, speculation counts and timing."
    )
    continuous_usage_stats: bool | None = Field(
        None,
        description="Every chunk carries the token counts of its answer so far; with "
        "include_usage.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise refusal(
                "continuous_usage_stats", "'continuous_usage_stats' needs include_usage: true"
            )
        return self


class GenerationFields(Body):
    """Shared by completions and chat."""

    model: str | None = Field(
        None, description="A name from /v1/models; may be left out where one model is served."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one answer.")
    stream_options: StreamOptions | None = None
    n: int | None = like(SamplingParams, "n", "Answers per prompt.", le=MAX_CHOICES)
    temperature: float | None = like(
        SamplingParams,
        "temperature",
        "Default: the model's generation_config.json, else 1; 0, or below 0.0001, is greedy.",
    )
    top_p: float | None = like(
        SamplingParams,
        "top_p",
        "Default: the model's generation_config.json, else 1: off; 0 is greedy.",
    )
    top_k: int | None = like(SamplingParams, "top_k")
    min_p: float | None = like(SamplingParams, "min_p")
    presence_penalty: float | None = like(SamplingParams, "presence_penalty")
    frequency_penalty: float | None = like(SamplingParams, "frequency_penalty")
    repetition_penalty: float | None = like(SamplingParams, "repetition_penalty")
    logit_bias: Annotated[dict[str, Bias], PRESENT] | None = Field(
        None, description="Token id -> added to its logit, -100 to 100."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, description="No other token may be emitted."
    )
    seed: int | None = like(
        SamplingParams, "seed", "Same seed, same text; answer i of n uses seed + i."
    )
    stop: Text | Annotated[list[Text], Field(max_length=MAX_WORDS)] | None = Field(
        None, description="The text ends before the first of these."
    )
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = like(SamplingParams, "min_tokens")
    bad_words: Annotated[list[Text], Field(max_length=MAX_WORDS)] | None = Field(
        None, description="Texts that must not be emitted."
    )
    skip_special_tokens: bool | None = Field(
        None, description="false: the text shows special tokens. Default true."
    )
    include_stop_str_in_output: bool | None = Field(
        None,
        description="true: the text ends with the stop string, or the end token where special "
        "ones show. Default false.",
    )
    priority: int | None = Field(None, description="Smaller runs first; default 0.")
    user: str | None = Field(None, description="For the logs.")
    metadata: Metadata | None = Field(None, description="For the logs.")
    speculation: SpeculationFields | None = None
    prediction: Prediction | None = Field(
        None,
        description="What the answer is expected to be: drafted from where it comes true. The "
        "text does not depend on it.",
    )
    return_token_origins: bool | None = Field(
        None, description="Every choice carries [[text, accepted|correction|bonus|plain], ...]."
    )
    return_token_ids: bool | None = Field(
        None, description="Every choice carries its token ids, and the prompt's once."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="logprobs name tokens 'token_id:N'."
    )
    prompt_token_ids: list[int] | None = Field(None, description="Instead of a prompt or messages.")
    add_special_tokens: bool | None = Field(
        None, description="Begin token and the like around a text prompt."
    )
    structured_outputs: dict[str, JsonValue] | None = Field(
        None, description="vLLM's: json, regex, choice or grammar."
    )
    guided_json: JsonValue = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    resume: Resumption | None = Field(
        None, description="A stream that another server can continue, or one that continues it."
    )

    @model_validator(mode="after")
    def _check_resume(self) -> GenerationFields:
        if self.resume is not None and not self.stream:
            raise refusal("resume", "'resume' needs stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        return self.n or 1

    def sampling(
        self, defaults: Mapping[str, Any], *, max_tokens: int, logprobs: int | None, choice: int
    ) -> SamplingParams:
        """The sampling options of answer number `choice` of a prompt; the model's `defaults` fill
        in what the body leaves out. Raises ConfigError.
        """
        given = self.model_dump(include=COPIED, exclude_none=True)
        if self.logit_bias is not None:
            given["logit_bias"] = _bias(self.logit_bias)
        values = {
            "temperature": 1.0,
            **defaults,
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }
        return SamplingParams(**values).answer(choice)


# named as in SamplingParams, and read in a way of their own
OTHERWISE = {"n", "logit_bias", "structured_outputs"}
COPIED = {
    field.name for field in fields(SamplingParams) if field.name in GenerationFields.model_fields
} - OTHERWISE


def _bias(given: dict[str, float]) -> dict[int, float]:
    """JSON has no numbers as keys."""
    bias = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 12):
            raise ConfigError(
                f"logit_bias must map token ids to numbers, got the key '{name[:40]}'"
            )
        bias[int(name)] = value
    return bias
