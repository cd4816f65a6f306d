"""What the end of an answer means to a client."""

from __future__ import annotations

from outrider.engine.request import Finish
from outrider.serve.errors import ApiError, as_api_error, unavailable

FINISH_REASONS = {"stop": "stop", "length": "length", "timeout": "length"}  # OpenAI has no word for a time limit


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
