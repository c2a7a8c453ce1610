"""What TokenSpeed's and vLLM's ``TensorData`` messages share: every field's name and meaning, not its number."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from mmcopy.errors import InlineTooLargeError, MissingDependencyError, PayloadError, UnsupportedPayloadError
from mmcopy.tensors import Inline, ShmHandle, TensorData

if TYPE_CHECKING:
    from types import ModuleType

    from smg_grpc_proto.generated import tokenspeed_scheduler_pb2, vllm_engine_pb2

    TensorMessage: TypeAlias = tokenspeed_scheduler_pb2.TensorData | vllm_engine_pb2.TensorData

    Message = TypeVar("Message", tokenspeed_scheduler_pb2.TensorData, vllm_engine_pb2.TensorData)

__all__ = [
    "MAX_RANK",
    "MESSAGE_BYTES_MAX",
    "Key",
    "each_tensor",
    "fill",
    "generated",
    "handle_of",
    "handles_of",
    "label_of",
    "read",
    "unique",
]

Key: TypeAlias = tuple[int, str]
"""A tensor of a request: the index of its item, and its name there."""

MAX_RANK = 32
"""The most dimensions a tensor on the wire may have: numpy before 2.0 holds no more."""

MESSAGE_BYTES_MAX = 2**31 - 1
"""Where protobuf ends: a message of more bytes cannot be serialised."""

_I64_MAX = 2**63 - 1


def generated(name: str) -> ModuleType:
    """SMG's generated module ``name``. Raises :class:`MissingDependencyError` when it is not installed."""
    try:
        return importlib.import_module(f"smg_grpc_proto.generated.{name}")
    except ImportError as error:
        raise MissingDependencyError(
            f"SMG's messages need smg-grpc-proto ({error}): pip install 'mmcopy[smg]'"
        ) from error


def fill(message: Message, data: TensorData) -> Message:
    """Write ``data`` into an empty ``message`` and return it. Inline bytes are copied.

    Raises :class:`InlineTooLargeError` when the bytes cannot be in a protobuf message, :class:`PayloadError` when a
    dimension or a name does not fit its field.
    """
    payload = data.payload
    if isinstance(payload, Inline) and payload.nbytes > MESSAGE_BYTES_MAX:
        raise InlineTooLargeError(
            f"{data.dtype} {list(data.shape)} is {payload.nbytes} bytes inline, a message ends at {MESSAGE_BYTES_MAX}"
        )
    try:
        message.dtype = data.dtype
        message.shape.extend(data.shape)
        if isinstance(payload, Inline):
            message.inline = bytes(payload.data)
        else:
            message.shm.name = payload.name
            message.shm.offset = payload.offset
            message.shm.nbytes = payload.nbytes
            message.shm.owner_id = payload.owner_id
    except (TypeError, ValueError) as error:
        raise PayloadError(f"{data.dtype} {list(data.shape)} does not fit the message: {error}") from error
    return message


def read(message: TensorMessage) -> TensorData:
    """The tensor that ``message`` describes; inline bytes are copied out of it.

    Raises :class:`PayloadError` when the payload is missing, is not shape x dtype bytes or the shape is more than a
    tensor can have, :class:`DtypeError`, and :class:`UnsupportedPayloadError` for a remote payload.
    """
    shape = _shape_of(message)
    kind = message.WhichOneof("payload")
    if kind == "inline":
        return TensorData(message.dtype, shape, Inline(message.inline))
    if kind == "shm":
        handle = message.shm
        return TensorData(message.dtype, shape, ShmHandle(handle.name, handle.offset, handle.nbytes, handle.owner_id))
    if kind == "remote":
        remote = message.remote
        raise UnsupportedPayloadError(
            f"{message.dtype!r} {list(shape)} comes over {remote.transport!r} ({remote.nbytes} bytes): "
            "mmcopy reads inline and shm payloads"
        )
    raise PayloadError(f"{message.dtype!r} {list(shape)} has no payload: neither inline, shm nor remote is set")


def handle_of(message: TensorMessage) -> ShmHandle | None:
    """The segment that ``message`` names, whatever else is wrong with it; None when it names none."""
    if message.WhichOneof("payload") != "shm":
        return None
    handle = message.shm
    return ShmHandle(handle.name, handle.offset, handle.nbytes, handle.owner_id)


def each_tensor(items: Iterable[Any], encoder_input: str) -> Iterator[tuple[Key, TensorMessage]]:
    """Every tensor of a request's items by its key: the field ``encoder_input`` comes first within its item, then the
    side tensors by name."""
    for index, item in enumerate(items):
        if item.HasField(encoder_input):
            yield (index, encoder_input), getattr(item, encoder_input)
        for name in sorted(item.model_specific_tensors):
            yield (index, name), item.model_specific_tensors[name]


def handles_of(tensors: Iterable[tuple[Key, TensorMessage]]) -> list[ShmHandle]:
    """Every segment or lease that tensors name, also those that :func:`read` refuses: what must be released if the
    request fails."""
    return [handle for _, message in tensors if (handle := handle_of(message)) is not None]


def unique(tensors: Iterable[tuple[Key, TensorMessage]]) -> dict[Key, TensorMessage]:
    """The tensors by key. Raises :class:`PayloadError` when two of them have one key."""
    by_key: dict[Key, TensorMessage] = {}
    for key, message in tensors:
        if key in by_key:
            raise PayloadError(f"the request has two tensors {label_of(key)!r}")
        by_key[key] = message
    return by_key


def label_of(key: Key) -> str:
    """A key in words, for an error or a log."""
    index, name = key
    return f"item{index}.{name}"


def _shape_of(message: TensorMessage) -> tuple[int, ...]:
    rank = len(message.shape)
    # Before anything is multiplied: a hostile message may have millions of dimensions.
    if rank > MAX_RANK:
        raise PayloadError(f"the shape has {rank} dimensions, at most {MAX_RANK} are accepted")
    shape = tuple(message.shape)
    # An empty tensor passes shape x dtype == nbytes with any other dimensions; its strides must fit all the same.
    elements = math.prod(n for n in shape if n)
    if elements > _I64_MAX:
        raise PayloadError(f"the shape {list(shape)} spans {elements} elements, at most {_I64_MAX} are addressable")
    return shape
