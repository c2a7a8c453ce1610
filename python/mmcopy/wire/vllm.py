"""vLLM's messages, as SMG's gateway sends them: one tensor covers all items of a modality."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from mmcopy.tensors import ShmHandle, TensorData

from . import payload
from .payload import Key

if TYPE_CHECKING:
    from smg_grpc_proto.generated import vllm_engine_pb2

    Request: TypeAlias = vllm_engine_pb2.GenerateRequest
    TensorMessage: TypeAlias = vllm_engine_pb2.TensorData

__all__ = [
    "PIXEL_VALUES",
    "each_input",
    "each_tensor",
    "from_proto",
    "handles_of",
    "tensors_of",
    "to_proto",
]

PIXEL_VALUES = "pixel_values"
"""The name, among an input's tensors, of the one that the encoder takes."""


def to_proto(data: TensorData) -> TensorMessage:
    """``data`` as a vLLM ``TensorData`` message; inline bytes are copied.

    Raises :class:`InlineTooLargeError` and :class:`PayloadError` for what a message cannot hold.
    """
    message: TensorMessage = payload.generated("vllm_engine_pb2").TensorData()
    return payload.fill(message, data)


def from_proto(message: TensorMessage) -> TensorData:
    """The tensor in a vLLM ``TensorData`` message; inline bytes are copied, segments are not opened.

    Raises :class:`PayloadError`, :class:`DtypeError` or :class:`UnsupportedPayloadError`.
    """
    return payload.read(message)


def each_input(request: Request) -> Iterator[vllm_engine_pb2.MultimodalInputs]:
    """The request's inputs, one per modality: ``mm_inputs`` where it is set, then ``extra_mm_inputs``."""
    if request.HasField("mm_inputs"):
        yield request.mm_inputs
    yield from request.extra_mm_inputs


def each_tensor(request: Request) -> Iterator[tuple[Key, TensorMessage]]:
    """((input index, tensor name), message) of every tensor of a ``GenerateRequest``.

    ``pixel_values`` comes first within its input, then the side tensors by name.
    """
    return payload.each_tensor(each_input(request), PIXEL_VALUES)


def tensors_of(request: Request) -> dict[Key, TensorMessage]:
    """Every tensor message of a request by key: ``(0, "pixel_values")``, ``(0, "image_grid_thw")``, ...

    Raises :class:`PayloadError` when two of them have one key.
    """
    return payload.unique(each_tensor(request))


def handles_of(request: Request) -> list[ShmHandle]:
    """Every segment or lease that a request names, also those of tensors that :func:`from_proto` refuses."""
    return payload.handles_of(each_tensor(request))
