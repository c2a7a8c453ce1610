"""What a worker's handler is given: one request, its tensors already on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from mmcopy.tensors import TensorData

__all__ = ["Engine", "Modality", "MultimodalItem", "Rpc", "WorkerRequest", "modality_name", "quoted"]

Engine: TypeAlias = Literal["tokenspeed", "vllm"]
Rpc: TypeAlias = Literal["generate", "encode"]
Modality: TypeAlias = Literal["image", "video", "audio", "unspecified"]

_LOGGED_CHARS = 128

_MODALITIES: dict[int, Modality] = {1: "image", 2: "audio", 3: "video"}


def modality_name(number: int) -> Modality:
    """The name of SMG's ``Modality`` number; ``"unspecified"`` for 0 and for numbers of later versions."""
    return _MODALITIES.get(number, "unspecified")


def quoted(request_id: str) -> str:
    """A request's id for a log: a client chose it, and it may hold line ends and be of any length."""
    return repr(request_id if len(request_id) <= _LOGGED_CHARS else f"{request_id[: _LOGGED_CHARS - 3]}...")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MultimodalItem:
    """TokenSpeed: one image, video or audio clip. vLLM: all items of one modality, in one tensor.

    ``tensors`` are on the receiver's device, by name: the encoder's input (``encoder_input`` of TokenSpeed,
    ``pixel_values`` of vLLM; absent where another worker encodes) and the side tensors. ``data`` describes each as it
    came, with its path and bytes. ``content_hashes`` has one entry per item (vLLM's hexadecimal strings
    as the bytes they stand for). ``placeholders`` are (offset, length) in ``input_ids``.
    ``placeholder_token_id`` is None where the gateway gave none.
    """

    modality: Modality
    content_hashes: tuple[bytes, ...]
    tensors: dict[str, Any]
    data: dict[str, TensorData]
    placeholders: tuple[tuple[int, int], ...]
    placeholder_token_id: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerRequest:
    """One ``Generate`` or ``Encode`` call.

    Nothing of it is in shared memory any more. On CUDA the tensors are ordered on the default stream of the
    receiver's device: work on another stream waits for that one first.

    ``max_new_tokens`` is None where the client set no limit. ``bootstrap_rooms``: for ``encode`` the room of each
    item; for ``generate`` the rooms where an encode worker sends each item's embedding, or none. ``receive_s`` is the
    time from the call's arrival to the tensors, queueing included. ``message`` is the engine's own protobuf message,
    for everything else.
    """

    engine: Engine
    rpc: Rpc
    request_id: str
    items: tuple[MultimodalItem, ...]
    input_ids: tuple[int, ...]
    stream: bool
    max_new_tokens: int | None
    bootstrap_rooms: tuple[int, ...]
    receive_s: float
    message: Any
