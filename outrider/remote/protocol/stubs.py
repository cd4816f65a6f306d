"""Caller and server of the draft service, over its messages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from outrider.remote.protocol import remote_pb2 as messages

Kind = TypeVar("Kind", bound=Message)
SERVICE = messages.DESCRIPTOR.services_by_name["DraftService"].full_name


def caller(channel: aio.Channel) -> Any:
    """An object with a method for every call of the service."""
    return SimpleNamespace(
        Open=channel.unary_unary(
            f"/{SERVICE}/Open",
            request_serializer=messages.Hello.SerializeToString,
            response_deserializer=messages.Welcome.FromString,
        ),
        Draft=channel.stream_stream(
            f"/{SERVICE}/Draft",
            request_serializer=messages.DraftRequest.SerializeToString,
            response_deserializer=messages.DraftReply.FromString,
        ),
    )


def add_to_server(servicer: Any, server: aio.Server) -> None:
    """Lets `servicer` answer the service's calls. It gets None for bytes that are no message, for
    which gRPC would write a traceback."""
    handlers = {
        "Open": grpc.unary_unary_rpc_method_handler(
            servicer.Open,
            lambda data: read(messages.Hello, data),
            messages.Welcome.SerializeToString,
        ),
        "Draft": grpc.stream_stream_rpc_method_handler(
            servicer.Draft,
            lambda data: read(messages.DraftRequest, data),
            messages.DraftReply.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])


def read(kind: type[Kind], data: bytes) -> Kind | None:
    """The message; None for bytes that are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return None
