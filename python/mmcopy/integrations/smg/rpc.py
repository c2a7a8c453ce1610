"""gRPC services from their descriptors.

Only the methods that a worker has are registered, so that gRPC itself answers UNIMPLEMENTED for the others. Three
things differ from the generated servicers, each for a reason seen in practice:

- Messages are parsed here. gRPC answers bytes that are no message with UNKNOWN, which the gateway sends again.
- A failure is a returned :class:`Status`, never ``context.abort``, whose exception refers to the call that keeps it:
  gRPC's threads and descriptors would outlive the server until that cycle is collected.
- Every method is registered as a streaming one. On the wire a single response is a stream of one, and only so can a
  failed call carry its status without a response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from .status import Status

if TYPE_CHECKING:
    from google.protobuf.descriptor import ServiceDescriptor

__all__ = ["Context", "Method", "ReplyLostError", "service_handler", "write"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

Method: TypeAlias = Callable[[Any, Context], Awaitable[Message | Status | None]]
"""Takes the request message; returns the response, an error status, or None when it has written its responses."""


class ReplyLostError(Exception):
    """A response could not be written: the client or the connection is gone."""


async def write(context: Context, message: Message) -> None:
    """Send one response. Waits while the client does not read. Raises :class:`ReplyLostError`."""
    try:
        await context.write(message)
    except Exception as error:
        raise ReplyLostError(str(error)) from error


def service_handler(service: ServiceDescriptor, methods: Mapping[str, Method]) -> grpc.GenericRpcHandler[Any, Any]:
    """What a server needs to serve ``methods``, by name, of ``service``."""
    handlers = {}
    for name, method in methods.items():
        request_class = GetMessageClass(service.methods_by_name[name].input_type)
        handlers[name] = grpc.unary_stream_rpc_method_handler(
            _call(method, request_class), response_serializer=lambda response: response.SerializeToString()
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _call(method: Method, request_class: type[Message]) -> Callable[[bytes, Context], Awaitable[None]]:
    async def call(raw: bytes, context: Context) -> None:
        result: Message | Status | None
        try:
            request = request_class.FromString(raw)
        except DecodeError as error:
            name = request_class.DESCRIPTOR.full_name
            result = Status("INVALID_ARGUMENT", f"{len(raw)} bytes are not a {name}: {error}")
        else:
            try:
                result = await method(request, context)
                if isinstance(result, Message):
                    await write(context, result)
            except ReplyLostError as error:
                raise asyncio.CancelledError from error  # gRPC's word for a call that ended by itself
        if isinstance(result, Status):
            context.set_code(grpc.StatusCode[result.code])
            context.set_details(result.message)

    return call
