"""The sampling options of one request, under vLLM's names, checked when they are built.

Temperature 0 is greedy: the law is a point mass at the largest logit (lowest id among equals) and
every other filter is without effect, penalties and biases excepted. Clients ask for greedy text
with other numbers, too: a temperature below `MIN_TEMPERATURE`, or top_p 0, becomes temperature 0. A
whole number may be written 16.0, and a negative seed counts from 2**64 downwards. A value that
cannot be honoured raises `ConfigError` with the name, the value and the allowed range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from outrider.errors import ConfigError
from outrider.foreign import names_checked
from outrider.sampling.structured import StructuredOutputsParams
from outrider.sampling.thinking import ThinkingMarks

# below it logits / temperature could overflow fp32, and the law is all but a point mass: greedy
MIN_TEMPERATURE = 1e-4
MAX_NUMBER = 1e30  # beyond it sums and products with logits could overflow fp32
WHOLE = ("top_k", "seed", "max_tokens", "min_tokens", "logprobs", "n")


def usable_temperature(temperature: float) -> float:
    """0 for a positive temperature that is too small to divide by, else the temperature itself."""
    return 0.0 if 0 < temperature < MIN_TEMPERATURE else temperature


@names_checked
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one request and when to stop."""

    temperature: float = 0.0  # 0 = greedy, and so is less than MIN_TEMPERATURE
    top_k: int = 0  # keep the k likeliest tokens; 0 or -1 = off
    # keep the smallest set of likeliest tokens with this mass; 1 = off, 0 = greedy
    top_p: float = 1.0
    min_p: float = 0.0  # drop tokens less likely than min_p times the likeliest; 0 = off
    # divides (multiplies) positive (negative) logits of seen tokens; 1 = off
    repetition_penalty: float = 1.0
    # subtracted once from the logit of every token already in the output
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0  # subtracted once per occurrence in the output
    logit_bias: dict[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: list[int] | None = None  # all other tokens get no mass
    seed: int | None = None  # modulo 2**64; None: the engine draws one
    max_tokens: int | None = 256  # None: to the end of the context
    # strings that end the answer, or a single one
    stop: Sequence[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    min_tokens: int = 0  # the answer does not end before it has this many
    bad_words: list[str] = field(default_factory=list)  # not to be emitted
    skip_special_tokens: bool = True  # whether special tokens are left out of the text
    # whether the text ends with what ended it, a stop string or a stop token
    include_stop_str_in_output: bool = False
    logprobs: int | None = None  # how many alternatives to report per token; None = no logprobs
    n: int = 1  # answers to one prompt; number i of them uses seed + i
    structured_outputs: StructuredOutputsParams | None = None  # the form that the answer must have
    # where thoughts stand: stop strings and grammars are about the answer after them
    thinking: ThinkingMarks | None = None

    def __post_init__(self) -> None:
        stop: Any = self.stop
        if isinstance(stop, str):
            object.__setattr__(self, "stop", [stop])
        for name in WHOLE:
            value: Any = getattr(self, name)
            if isinstance(value, float) and value.is_integer():
                object.__setattr__(self, name, int(value))
        self._check_numbers()
        self._check_collections()
        if self.seed is not None:
            object.__setattr__(self, "seed", int(self.seed) % 2**64)
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

    def _check_numbers(self) -> None:
        if _number("temperature", self.temperature) < 0:
            raise _out_of_range(
                "temperature",
                self.temperature,
                f"at least 0 (0, or below {MIN_TEMPERATURE:g}, is greedy)",
            )
        if _integer("top_k", self.top_k) < -1:
            raise _out_of_range("top_k", self.top_k, "at least 1, or 0 or -1 for off")
        if not 0 <= _number("top_p", self.top_p) <= 1:
            raise _out_of_range("top_p", self.top_p, "between 0 (greedy) and 1 (off)")
        if not 0 <= _number("min_p", self.min_p) <= 1:
            raise _out_of_range("min_p", self.min_p, "between 0 (off) and 1")
        if _number("repetition_penalty", self.repetition_penalty) < MIN_TEMPERATURE:
            raise _out_of_range(
                "repetition_penalty",
                self.repetition_penalty,
                f"above 0, at least {MIN_TEMPERATURE:g} (1 = off)",
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= _number(name, getattr(self, name)) <= 2:
                raise _out_of_range(name, getattr(self, name), "between -2 and 2 (0 = off)")
        if self.seed is not None and not -(2**63) <= _integer("seed", self.seed) < 2**64:
            raise _out_of_range("seed", self.seed, "between -2**63 and 2**64 - 1, or None")
        self._check_lengths()
        if _integer("n", self.n) < 1:
            raise _out_of_range("n", self.n, "at least 1")
        if self.logprobs is not None and _integer("logprobs", self.logprobs) < 0:
            raise _out_of_range("logprobs", self.logprobs, "at least 0, or None for no logprobs")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None and _integer("max_tokens", self.max_tokens) < 1:
            raise _out_of_range("max_tokens", self.max_tokens, "at least 1")
        if _integer("min_tokens", self.min_tokens) < 0:
            raise _out_of_range("min_tokens", self.min_tokens, "at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _out_of_range(
                "min_tokens", self.min_tokens, f"between 0 and max_tokens ({self.max_tokens})"
            )

    def _check_collections(self) -> None:
        if self.thinking is not None and not isinstance(self.thinking, ThinkingMarks):
            raise ConfigError(
                "thinking must be a Thinking (outrider/sampling/thinking.py), got "
                f"{self.thinking!r}"
            )
        if self.structured_outputs is not None:
            self._check_form(self.structured_outputs)
        if not _all_are(self.stop, str) or "" in self.stop:
            raise ConfigError(
                f"stop must be a string or a list of non-empty strings, got {self.stop!r}"
            )
        words: Any = self.bad_words  # a string is a list of its letters to the checks below
        if isinstance(words, str) or not _all_are(words, str) or "" in words:
            raise ConfigError(
                f"bad_words must be a list of words, none of them empty, got {self.bad_words!r}"
            )
        _token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ConfigError(
                    "allowed_token_ids is empty: no token could be emitted; use None for no "
                    "restriction"
                )
            closing = (
                ()
                if self.thinking is None or self.thinking.budget is None
                else self.thinking.closing_ids
            )
            if lacking := set(closing).difference(self.allowed_token_ids):
                raise ConfigError(
                    f"allowed_token_ids must hold {lacking.pop()}, with which thinking.budget "
                    "ends thoughts: add it, or leave "
                    "the budget out"
                )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise ConfigError(
                    f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
                )
            _token_ids("logit_bias", list(self.logit_bias))
            for token, bias in self.logit_bias.items():
                _number(f"logit_bias[{token}]", bias)

    def _check_form(self, form: Any) -> None:
        if not isinstance(form, StructuredOutputsParams):
            raise ConfigError(
                "structured_outputs must be StructuredOutputsParams, like "
                "StructuredOutputsParams(regex='[0-9]+'), "
                f"got {form!r:.80}"
            )
        if self.allowed_token_ids is not None:
            raise ConfigError(
                "allowed_token_ids together with structured_outputs: together they may leave no token. "
                "Give one"
            )


def _out_of_range(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name} must be {allowed}, got {value}")


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_NUMBER:
        bound = f" (at most {MAX_NUMBER:g} in size)" if is_number else ""
        raise ConfigError(f"{name} must be a finite number, got {value!r}{bound}")
    return float(value)


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _all_are(values: Any, kind: type) -> bool:
    return isinstance(values, Sequence) and all(isinstance(value, kind) for value in values)


def _token_ids(name: str, values: Any) -> None:
    if not _all_are(values, Integral) or any(
        isinstance(value, bool) or value < 0 for value in values
    ):
        raise ConfigError(f"{name} must hold token ids (whole numbers from 0), got {values!r}")
