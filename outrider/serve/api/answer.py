"""One answer as it grows: updates of the engine put together, and what its end means to a client."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.engine.request import Finish, Update
from outrider.serve.errors import ApiError, as_api_error, unavailable

FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length"}  # OpenAI has no word for a time limit


@dataclass
class Answer:
    """The text and tokens of an answer so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finish: Finish | None = None

    def take(self, update: Update) -> None:
        """Add what one step emitted."""
        self.text += update.text
        self.token_ids += update.token_ids
        self.origins += update.origins
        self.pieces += update.pieces
        self.logprobs += update.logprobs
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.finish is not None:
            self.finish = update.finish

    @property
    def likelihood(self) -> float:
        """Mean log-probability of its tokens: by this `best_of` ranks, as OpenAI documents it."""
        chosen = [logprobs[token] for logprobs, token in zip(self.logprobs, self.token_ids, strict=True)]
        return sum(chosen) / len(chosen) if chosen else 0.0

    def whole(self) -> Update:
        """All of it as one update: what is not streamed is written like a stream of one piece."""
        return Update(
            text=self.text, token_ids=self.token_ids, origins=self.origins, pieces=self.pieces, logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs, finish=self.finish,
        )  # fmt: skip


def check(finish: Finish) -> None:
    """Raises ApiError for an end that is no answer."""
    if finish.reason == "error":
        error = finish.error or ApiError("the request failed", status=500)
        mine = as_api_error(error)
        if mine.status == 400:  # it was accepted, so what went wrong later is not the client's doing
            mine = ApiError(str(mine), status=500, kind="server_error", code="internal_error")
        raise mine
    if finish.reason == "abort":
        raise unavailable("the server is shutting down: the answer was cut off", "shutting_down")


def finish_reason(finish: Finish | None) -> str | None:
    return None if finish is None else FINISH_REASONS[finish.reason]


def stop_reason(finish: Finish | None) -> int | str | None:
    """The stop string or stop token id that ended the text, as in vLLM; "timeout" where the server's time limit did."""
    if finish is None:
        return None
    return "timeout" if finish.reason == "timeout" else finish.stop_reason
