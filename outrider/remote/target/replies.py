"""What an answer is on the wire: `Update` and `Finish` to GenerateReply, in pieces that fit a message, and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, get_args

from outrider import errors
from outrider.engine.request import Finish, FinishReason, Update
from outrider.errors import OutriderError, QueueFullError, RequestError
from outrider.remote.protocol import messages
from outrider.stats import DecodeStats
from outrider.wellformed import parsed_json

MAX_NUMBERS = 200_000  # log-probabilities of one message: some 3 MB of the 16 that fit
MAX_TOKENS = 50_000  # of one message
MAX_COUNT = 2**63  # of anything in an answer's stats
ORIGINS = ("accepted", "correction", "bonus", "plain")


def to_messages(update: Update, base_length: int) -> Iterator[messages.GenerateReply]:
    """The messages that carry an update; `base_length`: output tokens before it. The finish comes with the last one."""
    for all_logprobs in _cut(update.prompt_logprobs or []):
        yield messages.GenerateReply(base_length=base_length, prompt_logprobs=[_message(logprobs) for logprobs in all_logprobs])
    size = _fitting(update)
    count, rest = len(update.token_ids), update.text[len("".join(update.pieces)) :]
    for start in range(0, max(1, count), size):
        part = slice(start, start + size)
        is_last = start + size >= count
        pieces = update.pieces[part]
        yield messages.GenerateReply(
            base_length=base_length + start, token_ids=update.token_ids[part], origins=update.origins[part], pieces=pieces,
            text="".join(pieces) + (rest if is_last else ""), logprobs=[_message(logprobs) for logprobs in update.logprobs[part]],
            drafted=update.drafted if is_last else 0,
            finish=_finish(update.finish) if is_last and update.finish is not None else None,
        )  # fmt: skip


def from_message(message: messages.GenerateReply, vocab_size: int, wants_logprobs: bool) -> Update:
    """The update, checked for what a service could get wrong in it alone. Raises RequestError that names the mistake."""
    count = len(message.token_ids)
    outside = next((token for token in message.token_ids if token >= vocab_size), None)
    if outside is not None:
        raise RequestError(f"token id {outside} is outside the vocabulary of {vocab_size}")
    if len(message.origins) != count or len(message.pieces) != count:
        raise RequestError(f"{count} tokens have {len(message.origins)} origins and {len(message.pieces)} pieces")
    if wants_logprobs and len(message.logprobs) != count:
        raise RequestError(f"{count} tokens have {len(message.logprobs)} log-probabilities")
    unknown = next((origin for origin in message.origins if origin not in ORIGINS), None)
    if unknown is not None:
        raise RequestError(f"a token's origin is '{unknown[:20]}', which is none of {', '.join(ORIGINS)}")
    spelled = "".join(message.pieces)
    if message.text != spelled and not (message.HasField("finish") and message.text.startswith(spelled)):
        raise RequestError("its text is not that of its tokens' pieces")
    all_logprobs = [_logprobs(logprobs) for logprobs in message.logprobs] if wants_logprobs else []
    if any(logprobs is None for logprobs in all_logprobs):
        raise RequestError("a token has no log-probabilities")
    prompt = [_logprobs(logprobs) for logprobs in message.prompt_logprobs] or None
    return Update(
        text=message.text, token_ids=list(message.token_ids), origins=list(message.origins), pieces=list(message.pieces),
        logprobs=[logprobs for logprobs in all_logprobs if logprobs is not None], prompt_logprobs=prompt,
        finish=_read_finish(message.finish) if message.HasField("finish") else None, drafted=message.drafted,
    )  # fmt: skip


def _fitting(update: Update) -> int:
    """Tokens of one message."""
    widest = max((len(logprobs) for logprobs in update.logprobs), default=0)
    return min(MAX_TOKENS, max(1, MAX_NUMBERS // max(1, widest)))


def _cut(all_logprobs: Sequence[Mapping[int, float] | None]) -> Iterator[Sequence[Mapping[int, float] | None]]:
    size = max(1, MAX_NUMBERS // max(1, max((len(logprobs) for logprobs in all_logprobs if logprobs is not None), default=1)))
    for start in range(0, len(all_logprobs), size):
        yield all_logprobs[start : start + size]


def _message(logprobs: Mapping[int, float] | None) -> messages.TokenLogprobs:
    if logprobs is None:
        return messages.TokenLogprobs(none=True)
    return messages.TokenLogprobs(tokens=list(logprobs), values=list(logprobs.values()))


def _logprobs(logprobs: messages.TokenLogprobs) -> dict[int, float] | None:
    if len(logprobs.tokens) != len(logprobs.values):
        raise RequestError(f"{len(logprobs.tokens)} tokens have {len(logprobs.values)} log-probabilities")
    return None if logprobs.none else dict(zip(logprobs.tokens, logprobs.values, strict=True))


def _finish(finish: Finish) -> messages.Finish:
    stop, error = finish.stop_reason, finish.error
    return messages.Finish(
        reason=finish.reason, stats_json=json.dumps(asdict(finish.stats)), seed=finish.seed, lossless=finish.lossless,
        drafter=finish.drafter, stop_text=stop if isinstance(stop, str) else "",
        stop_token=stop if isinstance(stop, int) else None,
        reproducible=finish.reproducible, queued_s=finish.queued_s, prefill_s=finish.prefill_s,
        prompt_tokens=finish.prompt_tokens, cached_tokens=finish.cached_tokens, preemptions=finish.preemptions,
        error="" if error is None else str(error), error_kind="" if error is None else type(error).__name__,
    )  # fmt: skip


def _read_finish(message: messages.Finish) -> Finish:
    if message.reason not in get_args(FinishReason):
        raise RequestError(f"it ends for the unknown reason '{message.reason[:20]}'")
    return Finish(
        reason=message.reason,  # type: ignore[arg-type] # one of them
        stats=_stats(message.stats_json), seed=message.seed, lossless=message.lossless, drafter=message.drafter,
        stop_reason=message.stop_token if message.HasField("stop_token") else message.stop_text or None,
        reproducible=message.reproducible, queued_s=message.queued_s, prefill_s=message.prefill_s,
        prompt_tokens=message.prompt_tokens, cached_tokens=message.cached_tokens, preemptions=message.preemptions,
        error=error_of(message.error_kind, message.error) if message.reason == "error" else None,
    )  # fmt: skip


def error_of(kind: str, text: str) -> OutriderError:
    """An error of `outrider.errors` by the name of its class; a plain OutriderError for a name that is not there."""
    found: Any = getattr(errors, kind, None)
    if not (isinstance(found, type) and issubclass(found, OutriderError)):
        found = OutriderError
    return QueueFullError(text, 1.0) if found is QueueFullError else found(text)


def _stats(text: str) -> DecodeStats:
    try:
        values = parsed_json(text or "{}")
        known = {field.name: type(getattr(DecodeStats(), field.name)) for field in fields(DecodeStats)}
        kept = {name: value for name, value in values.items() if name in known}
        for name, value in kept.items():
            numbers = value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
            is_kind = isinstance(value, (int, float) if known[name] is float else known[name])
            if not is_kind or not all(0 <= number < MAX_COUNT for number in numbers):
                raise ValueError(f"'{name}' is {value!r}")
        return DecodeStats().merge(DecodeStats(**kept))
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise RequestError(f"its stats cannot be read: {error}") from error
