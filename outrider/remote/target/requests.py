"""A request on the wire: `Request` to GenerateRequest where it is sent, and back where it is answered.

Sampling travels as JSON with the fields that differ from their defaults, so that a release with one more field still talks to
one without it unless the field is used; what the other side does not know it refuses by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from typing import Any, get_args

from outrider.engine.request import Request, Speculation
from outrider.errors import CapabilityError, ConfigError, RequestError, did_you_mean
from outrider.grammar import Grammars, Spec, form_of
from outrider.grammar.matcher import Matcher
from outrider.grammar.specs import Form
from outrider.remote.protocol import messages
from outrider.sampling.params import SamplingParams
from outrider.sampling.thinking import ThinkingMarks
from outrider.wellformed import parsed_json

SEPARATE = ("seed", "n", "structured_outputs")  # fields of SamplingParams that have their own place, or none
FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")  # which SamplingParams takes as they come


def to_message(
    request: Request, *, attempt: str, committed: Sequence[int], seed: int, params: SamplingParams, timeout_s: float | None,
    prompt_logprobs: int | None,
) -> messages.GenerateRequest:  # fmt: skip
    """One try at a request. `attempt`: its id, unlike those of other tries; `params`: with a length that needs no context.

    Raises CapabilityError for a constraint that is not made of a grammar's text, RequestError for numbers that do not fit.
    """
    try:
        return _message(request, attempt, committed, seed, params, timeout_s, prompt_logprobs)
    except ValueError as error:  # protobuf's numbers have 32 bits
        raise RequestError(f"a number of the request cannot be sent: {error}") from error


def _message(
    request: Request, attempt: str, committed: Sequence[int], seed: int, params: SamplingParams, timeout_s: float | None,
    prompt_logprobs: int | None,
) -> messages.GenerateRequest:  # fmt: skip
    asked = request.speculation
    message = messages.GenerateRequest(
        id=attempt, prompt=request.prompt, committed=committed, sampling_json=_sampling_json(params), seed=seed,
        speculation=messages.Speculation(
            mode=asked.mode, drafter=asked.drafter or "", max_draft_tokens=asked.max_draft_tokens or 0,
            invariant=request.is_invariant, lossy=asked.lossy or "",
        ),
        prediction=request.prediction or (), priority=request.priority, timeout_s=timeout_s or 0.0,
        prompt_logprobs=prompt_logprobs,
    )  # fmt: skip
    spec = None if params.structured_outputs is None else form_of(params.structured_outputs)
    if request.constraint is not None:
        spec = request.constraint.spec if isinstance(request.constraint, Matcher) else None
        if spec is None:
            raise CapabilityError(f"a {type(request.constraint).__name__} cannot be sent elsewhere: only grammars can")
    if spec is not None:
        message.grammar.CopyFrom(messages.Grammar(kind=spec.form, text=spec.text))
    return message


def from_message(message: messages.GenerateRequest, grammars: Grammars) -> Request:
    """The request as the engine takes it. May compile a grammar.

    Raises RequestError or ConfigError for what is malformed.
    """
    if not message.id:
        raise RequestError("id is empty: every request needs one of its own")
    if not (math.isfinite(message.timeout_s) and message.timeout_s >= 0):
        raise RequestError(f"timeout_s must be at least 0 (0: none), got {message.timeout_s}")
    asked = message.speculation
    return Request(
        id=message.id,
        prompt=list(message.prompt),
        params=_sampling(message.sampling_json, message.seed),
        speculation=Speculation(
            mode=asked.mode or "auto",  # type: ignore[arg-type] # Speculation refuses others
            drafter=asked.drafter or None,
            max_draft_tokens=asked.max_draft_tokens or None,
            invariant=asked.invariant if asked.HasField("invariant") else None,
            lossy=asked.lossy or None,
        ),
        constraint=grammars.constraint(_spec(message.grammar)) if message.HasField("grammar") else None,
        prediction=list(message.prediction) or None,
        priority=message.priority,
        timeout_s=message.timeout_s or None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        committed=list(message.committed),
    )  # fmt: skip


def _sampling_json(params: SamplingParams) -> str:
    values = {}
    for field in fields(SamplingParams):
        value = getattr(params, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in SEPARATE and value != default:
            values[field.name] = asdict(value) if isinstance(value, ThinkingMarks) else value
    return json.dumps(values)


def _sampling(text: str, seed: int) -> SamplingParams:
    try:
        values = parsed_json(text or "{}")
    except ValueError as error:
        raise RequestError(f"sampling_json is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise RequestError(f"sampling_json must be an object, got {text[:40]}")
    known = [field.name for field in fields(SamplingParams) if field.name not in SEPARATE]
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"sampling_json has the unknown field '{name}'.{did_you_mean(name, known)}")
        if name in FLAGS and not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
    if isinstance(values.get("logit_bias"), dict):
        values["logit_bias"] = _by_token(values["logit_bias"])
    if isinstance(values.get("thinking"), dict):
        values["thinking"] = _thinking(values["thinking"])
    return SamplingParams(**values, seed=seed)


def _thinking(values: dict[str, Any]) -> ThinkingMarks:
    known = [field.name for field in fields(ThinkingMarks)]
    for name in values:
        if name not in known:
            raise ConfigError(f"sampling_json has the unknown field 'thinking.{name}'.{did_you_mean(name, known)}")
    try:
        return ThinkingMarks(**values)
    except TypeError as error:  # a field is missing, or no list
        raise ConfigError(f"sampling_json has a malformed 'thinking': {error}") from error


def _by_token(biases: dict[str, Any]) -> dict[int, Any]:
    """JSON writes keys as texts."""
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise ConfigError(f"logit_bias must map token ids to numbers: {error}") from error


def _spec(grammar: messages.Grammar) -> Spec:
    if grammar.kind not in get_args(Form):
        raise RequestError(f"grammar.kind '{grammar.kind}' is unknown.{did_you_mean(grammar.kind, get_args(Form))}")
    if grammar.kind in ("json_schema", "choice"):
        try:
            parsed_json(grammar.text)
        except ValueError as error:
            raise RequestError(f"grammar.text is not the JSON that a {grammar.kind} is: {error}") from error
    return Spec(grammar.kind, grammar.text, "grammar")  # type: ignore[arg-type] # one of the forms
