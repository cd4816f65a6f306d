"""Bytes that are no message, sent to a service: refused, with one line in the log."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

log = logging.getLogger("outrider.service")


class GarbageCheck(aio.ServerInterceptor):
    """Refuses requests that cannot be read. Without it gRPC writes a traceback for each, and calls it a fault of the service.

    Calls whose requests are a stream do so themselves.
    """

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """A handler whose request is None where its bytes are no message."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        read, method = handler.request_deserializer, handler_call_details.method
        form = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour = getattr(handler, form)

        def read_or_none(data: bytes) -> Any:
            try:
                return read(data)
            except DecodeError:
                return None

        async def check(request: Any, context: aio.ServicerContext[Any, Any]) -> None:
            if request is None:
                log.info("refused", extra={"call": method, "status": "INVALID_ARGUMENT", "reason": "bytes that are no message"})
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"bytes that are no message of {method}")

        async def answer(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            await check(request, context)
            return await behaviour(request, context)

        async def stream(request: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            await check(request, context)
            async with aclosing(behaviour(request, context)) as replies:
                async for reply in replies:
                    yield reply

        checked = stream if inspect.isasyncgenfunction(behaviour) else answer
        return handler._replace(request_deserializer=read_or_none, **{form: checked})
