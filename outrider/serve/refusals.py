"""Every way a request can fail, as one shape: handlers that turn exceptions into OpenAI's error
body."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider.errors import GOT, OutriderError
from outrider.serve.api.sse import ClientLeftError, dumped
from outrider.serve.errors import INVALID, SERVER, ApiError, as_api_error
from outrider.serve.headers import current_id
from outrider.serve.schema.base import describe

log = logging.getLogger("outrider.serve")
ANTHROPIC = "/v1/messages"
CLIENT_LEFT = 499  # nginx's number; nobody receives it, the logs do
TEMPLATE_REFUSED = "the chat template refused the messages"  # as `texts.py` says it
SHOWN = 200  # characters of a reason in the log


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(OutriderError, _ours)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(ClientLeftError, _left)


def answer(error: ApiError, scope: MutableMapping[str, Any]) -> Response:
    """The refusal of the request in `scope`, in the shape that its clients read; the log finds the
    reason in the scope."""
    scope.setdefault("state", {})["reason"] = _reason(error)
    body = error.anthropic_body() if asks_as_anthropic(scope) else error.body()
    return Response(dumped(body), error.status, error.headers, media_type="application/json")


def asks_as_anthropic(scope: MutableMapping[str, Any]) -> bool:
    """Whether one of Anthropic's clients sent this request, as its path or its header tells."""
    return scope["path"].startswith(ANTHROPIC) or "anthropic-version" in Headers(scope=scope)


def reason_of(scope: MutableMapping[str, Any]) -> str | None:
    """Why the request in `scope` was refused."""
    return scope.get("state", {}).get("reason")


def _reason(error: ApiError) -> str:
    """The message without the value that was sent, which may be text of a prompt."""
    message = str(error).partition(GOT)[0]
    if message.startswith(TEMPLATE_REFUSED):
        message = TEMPLATE_REFUSED  # its own words may quote a message
    return message if len(message) <= SHOWN else f"{message[: SHOWN - 3]}..."


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    refusal = as_api_error(error)
    if refusal.status >= 500 and refusal.status != 503:
        log.error(
            "%s %s failed: %s",
            request.method,
            request.url.path,
            _reason(refusal),
            extra=current_id(),
        )
    return answer(refusal, request.scope)


async def _bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, param = describe(error.errors())
    return answer(ApiError(message, param=param), request.scope)


async def _http(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, wrong method, a body that cannot be read."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is no {request.url.path} here; see /docs for what there is",
        405: f"{request.url.path} does not take {request.method}",
        400: "the body is not JSON in UTF-8, or its lists are nested too deeply",
    }
    headers = dict(error.headers or {})
    kind = INVALID if error.status_code < 500 else SERVER
    message = messages.get(error.status_code, str(error.detail))
    return answer(
        ApiError(message, status=error.status_code, kind=kind, headers=headers), request.scope
    )


async def _left(request: Request, error: Exception) -> Response:
    request.scope.setdefault("state", {})["reason"] = "the client left before its answer"
    return Response(status_code=CLIENT_LEFT)
