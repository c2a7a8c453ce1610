"""vLLM's engine protocol."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from smg_grpc_proto.generated import vllm_engine_pb2 as engine_pb2

from mmcopy.errors import UnsupportedPayloadError
from mmcopy.wire import vllm as wire

from .request import MultimodalItem, Rpc, WorkerRequest, modality_name
from .rpc import Context
from .service import Service, Wire

__all__ = ["VllmService"]


class VllmService(Service):
    """vLLM's one service."""

    wire: ClassVar[Wire] = wire
    pb2: ClassVar[Any] = engine_pb2
    service_name = "VllmEngine"

    async def abort(self, request: engine_pb2.AbortRequest, _context: Context) -> engine_pb2.AbortResponse:
        for request_id in request.request_ids:
            self._running.abort(request_id)
        return engine_pb2.AbortResponse()

    def _model_fields(self) -> dict[str, Any]:
        return {"is_generation": True}

    def _server_info(self) -> engine_pb2.GetServerInfoResponse:
        return engine_pb2.GetServerInfoResponse(
            active_requests=len(self._running),
            server_type="vllm-grpc",
            uptime_seconds=time.time() - self._started,
            data_parallel_size=1,
            shm_namespace_id=self._advertisement.shm_namespace_id,
            model_dtype=f"torch.{self._model.model_dtype}",
            multimodal_encoder_dtype=self._advertisement.encoder_dtype,
        )

    def _describe(self, rpc: Rpc, message: Any) -> WorkerRequest:
        if message.HasField("media_refs"):
            raise UnsupportedPayloadError(
                f"the request refers to {len(message.media_refs.items)} media by URL: this worker takes tensors"
            )
        sampling = message.sampling_params
        self._refuse_several(sampling.n)
        return WorkerRequest(
            engine="vllm",
            rpc=rpc,
            request_id=message.request_id,
            items=tuple(map(_item, wire.each_input(message))),
            input_ids=tuple(message.tokenized.input_ids),
            stream=message.stream,
            max_new_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
            bootstrap_rooms=(),
            receive_s=0.0,
            message=message,
        )


def _item(inputs: engine_pb2.MultimodalInputs) -> MultimodalItem:
    return MultimodalItem(
        # The gateway of before the field existed sent images alone.
        modality=modality_name(inputs.modality) if inputs.modality else "image",
        content_hashes=tuple(map(_hash_bytes, inputs.mm_hashes)),
        tensors={},
        data={},
        placeholders=tuple((p.offset, p.length) for p in inputs.mm_placeholders),
        placeholder_token_id=inputs.im_token_id if inputs.HasField("im_token_id") else None,
    )


def _hash_bytes(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return text.encode()
