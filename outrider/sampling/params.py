"""The sampling options of one request, under vLLM's names, checked when they are built.

Temperature 0 is greedy: the law is a point mass at the largest logit (lowest id among equals) and
every other filter is without effect, penalties and biases excepted. Clients ask for greedy text
with other numbers, too: a temperature below `MIN_TEMPERATURE`, or top_p 0, becomes temperature 0. A
whole number may be written 16.0, and a negative seed counts from 2**64 downwards. A value that
cannot be honoured raises `ConfigError` with the name, the value and the allowed range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge, Interval, MinLen

from outrider.errors import ConfigError
from outrider.sampling.structured import StructuredOutputsParams
from outrider.sampling.thinking import ThinkingMarks
from outrider.settings import checked, described, setting

# below it logits / temperature could overflow fp32, and the law is all but a point mass: greedy
MIN_TEMPERATURE = 1e-4
MAX_NUMBER = 1e30  # beyond it sums and products with logits could overflow fp32
TokenId = Annotated[int, Ge(0)]
Bias = Annotated[float, Interval(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Text = Annotated[str, MinLen(1)]


def usable_temperature(temperature: float) -> float:
    """0 for a positive temperature that is too small to divide by, else the temperature itself."""
    return 0.0 if 0 < temperature < MIN_TEMPERATURE else temperature


@described
@checked()
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one answer and when to end it; names and meanings are vLLM's.

        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=200, seed=1)

    The default is greedy with 256 tokens. A wrong value raises ConfigError.
    """

    temperature: float = setting(
        0.0, f"0, or below {MIN_TEMPERATURE:g}, is greedy", at_least=0, at_most=MAX_NUMBER
    )
    top_k: int = setting(0, "keep the k likeliest tokens; 0 and -1 are off", at_least=-1)
    top_p: float = setting(
        1.0,
        "keep the smallest set of likeliest tokens with this mass; 1 is off, 0 greedy",
        at_least=0,
        at_most=1,
    )
    min_p: float = setting(
        0.0,
        "drop tokens less likely than this times the likeliest; 0 is off",
        at_least=0,
        at_most=1,
    )
    repetition_penalty: float = setting(
        1.0,
        "divides positive logits of seen tokens, multiplies negative ones; 1 is off",
        at_least=MIN_TEMPERATURE,
        at_most=MAX_NUMBER,
    )
    presence_penalty: float = setting(
        0.0,
        "subtracted once from the logit of every token already in the output; 0 is off",
        at_least=-2,
        at_most=2,
    )
    frequency_penalty: float = setting(
        0.0, "subtracted once per occurrence in the output; 0 is off", at_least=-2, at_most=2
    )
    logit_bias: dict[TokenId, Bias] | None = setting(None, "token id -> added to its logit")
    allowed_token_ids: list[TokenId] | None = setting(
        None, "the only tokens that may be emitted; None: all"
    )
    seed: int | None = setting(
        None, "modulo 2**64; None: the engine draws one", at_least=-(2**63), below=2**64
    )
    max_tokens: int | None = setting(
        256, "longest answer; None: to the end of the context", at_least=1
    )
    stop: Text | Sequence[Text] = setting(
        list, "strings that end the answer, or a single one; the text ends before them"
    )
    stop_token_ids: list[TokenId] = setting(list, "tokens that end the answer, besides the model's")
    ignore_eos: bool = setting(False, "the model's own end tokens do not end the answer")
    min_tokens: int = setting(0, "the answer does not end before it has these", at_least=0)
    bad_words: list[Text] = setting(list, "texts that the answer must not hold")
    skip_special_tokens: bool = setting(True, "special tokens are left out of the text")
    include_stop_str_in_output: bool = setting(
        False, "the text ends with what ended it, a stop string or a stop token"
    )
    logprobs: int | None = setting(
        None, "alternatives reported per token; None: no logprobs", at_least=0
    )
    n: int = setting(1, "answers to one prompt; number i of them uses seed + i", at_least=1)
    structured_outputs: StructuredOutputsParams | None = setting(
        None, "the form that the answer must have"
    )
    thinking: ThinkingMarks | None = setting(
        None, "where thoughts stand: stop strings and grammars are about the answer after them"
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for values that do not go together."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", [self.stop])
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.allowed_token_ids is not None:
            self._check_allowed(self.allowed_token_ids)
        if self.seed is not None:
            object.__setattr__(self, "seed", self.seed % 2**64)
        object.__setattr__(
            self, "temperature", 0.0 if self.top_p == 0 else usable_temperature(self.temperature)
        )

    def limit(self, room: int) -> int:
        """Max tokens of an answer, where the context has room for `room`."""
        return room if self.max_tokens is None else min(room, self.max_tokens)

    @property
    def required_max_tokens(self) -> int:
        """`max_tokens`, for measurements, which need a number. Raises ConfigError for None."""
        if self.max_tokens is None:
            raise ConfigError(
                "max_tokens must be a number here, got None: what is measured needs a length"
            )
        return self.max_tokens

    def answer(self, number: int) -> SamplingParams:
        """The parameters of one of the `n` answers."""
        seed = None if self.seed is None else (self.seed + number) % 2**64
        return replace(self, n=1, seed=seed)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def drawn(self) -> SamplingParams:
        """A copy of these options at temperature 1, where a distribution is needed and greedy text
        was asked for."""
        return replace(self, temperature=1.0, top_p=self.top_p or 1.0)

    @property
    def needs_history(self) -> bool:
        """True when the law depends on earlier tokens: some penalty is on."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def is_softmax(self) -> bool:
        """True when the law is the softmax of the logits at the temperature: no penalty, bias or
        filter."""
        is_filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return not (is_filtered or self.needs_history or self.logit_bias or self.allowed_token_ids)

    def _check_allowed(self, allowed: list[int]) -> None:
        if not allowed:
            raise ConfigError(
                "allowed_token_ids is empty: no token could be emitted; use None for no restriction"
            )
        if self.structured_outputs is not None:
            raise ConfigError(
                "allowed_token_ids with structured_outputs: together they may leave no token. "
                "Give one"
            )
        if self.thinking is None or self.thinking.budget is None:
            return
        if lacking := set(self.thinking.closing_ids).difference(allowed):
            raise ConfigError(
                f"allowed_token_ids must hold {lacking.pop()}, with which thinking.budget ends "
                "thoughts: add it, or leave the budget out"
            )
