"""TokenSpeed's messages, as SMG's gateway sends them to schedulers and to encode workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from mmcopy.tensors import ShmHandle, TensorData

from . import payload
from .payload import Key

if TYPE_CHECKING:
    from smg_grpc_proto.generated import tokenspeed_encoder_pb2, tokenspeed_scheduler_pb2

    Request: TypeAlias = tokenspeed_scheduler_pb2.GenerateRequest | tokenspeed_encoder_pb2.EncodeRequest
    TensorMessage: TypeAlias = tokenspeed_scheduler_pb2.TensorData

__all__ = ["ENCODER_INPUT", "each_tensor", "from_proto", "handles_of", "tensors_of", "to_proto"]

ENCODER_INPUT = "encoder_input"
"""The name, among an item's tensors, of the one that the encoder takes."""


def to_proto(data: TensorData) -> TensorMessage:
    """``data`` as a TokenSpeed ``TensorData`` message; inline bytes are copied.

    Raises :class:`InlineTooLargeError` and :class:`PayloadError` for what a message cannot hold.
    """
    message: TensorMessage = payload.generated("tokenspeed_scheduler_pb2").TensorData()
    return payload.fill(message, data)


def from_proto(message: TensorMessage) -> TensorData:
    """The tensor in a TokenSpeed ``TensorData`` message; inline bytes are copied, segments are not opened.

    Raises :class:`PayloadError`, :class:`DtypeError` or :class:`UnsupportedPayloadError`.
    """
    return payload.read(message)


def each_tensor(request: Request) -> Iterator[tuple[Key, TensorMessage]]:
    """((item index, tensor name), message) of every tensor of a ``GenerateRequest`` or an ``EncodeRequest``.

    The encoder input comes first within its item, then the side tensors by name.
    """
    return payload.each_tensor(request.mm_inputs.items, ENCODER_INPUT)


def tensors_of(request: Request) -> dict[Key, TensorMessage]:
    """Every tensor message of a request by key: ``(0, "encoder_input")``, ``(0, "image_grid_thw")``, ...

    Raises :class:`PayloadError` when two of them have one key.
    """
    return payload.unique(each_tensor(request))


def handles_of(request: Request) -> list[ShmHandle]:
    """Every segment or lease that a request names, also those of tensors that :func:`from_proto` refuses."""
    return payload.handles_of(each_tensor(request))
