"""Callers and servers of the services in remote.proto, made from its descriptors."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
from grpc import aio

from outrider.remote.protocol import remote_pb2 as messages

DRAFT = "DraftService"


def caller(service: str, channel: aio.Channel) -> Any:
    """An object with a method for every call of a service."""
    calls = {}
    for method, form, asked, answered in _methods(service):
        call = getattr(channel, form)
        path = f"/{method.containing_service.full_name}/{method.name}"
        calls[method.name] = call(
            path,
            request_serializer=asked.SerializeToString,
            response_deserializer=answered.FromString,
        )
    return SimpleNamespace(**calls)


def add_to_server(service: str, servicer: Any, server: aio.Server) -> None:
    """Lets the methods of `servicer`, which are called like those of a service, answer its calls."""
    handlers = {}
    for method, form, asked, answered in _methods(service):
        handler = getattr(grpc, f"{form}_rpc_method_handler")
        behaviour = getattr(servicer, method.name)
        handlers[method.name] = handler(behaviour, asked.FromString, answered.SerializeToString)
    name = messages.DESCRIPTOR.services_by_name[service].full_name
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])


def _methods(service: str) -> Iterator[tuple[Any, str, Any, Any]]:
    """(Descriptor, grpc's word for which sides stream, classes of request and reply) of every
    method."""
    for method in messages.DESCRIPTOR.services_by_name[service].methods:
        streams = (method.client_streaming, method.server_streaming)
        form = "_".join("stream" if stream else "unary" for stream in streams)
        yield (
            method,
            form,
            getattr(messages, method.input_type.name),
            getattr(messages, method.output_type.name),
        )
