"""vLLM's engine protocol."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

from smg_grpc_proto.generated import vllm_engine_pb2 as engine_pb2

from mmcopy.errors import UnsupportedPayloadError
from mmcopy.wire import vllm as wire

from .request import MultimodalItem, Rpc, WorkerRequest, modality_name
from .rpc import Context, service_handler
from .service import Service, Wire
from .status import Status

if TYPE_CHECKING:
    import grpc

__all__ = ["VllmService"]


class VllmService(Service):
    """vLLM's one service."""

    wire: ClassVar[Wire] = wire

    def handlers(self) -> list[grpc.GenericRpcHandler[Any, Any]]:
        engine = engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
        return [
            service_handler(
                engine,
                {
                    "Generate": self.generate,
                    "HealthCheck": self.health_check,
                    "Abort": self.abort,
                    "GetModelInfo": self.get_model_info,
                    "GetServerInfo": self.get_server_info,
                    "GetLoads": self.get_loads,
                },
            )
        ]

    async def generate(self, request: engine_pb2.GenerateRequest, context: Context) -> Status | None:
        def chunk(batch: Sequence[int], prompt_tokens: int, completion_tokens: int) -> engine_pb2.GenerateResponse:
            return engine_pb2.GenerateResponse(
                chunk=engine_pb2.GenerateStreamChunk(
                    token_ids=batch, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens
                )
            )

        def complete(
            ids: Sequence[int], reason: str, prompt_tokens: int, completion_tokens: int
        ) -> engine_pb2.GenerateResponse:
            return engine_pb2.GenerateResponse(
                complete=engine_pb2.GenerateComplete(
                    output_ids=ids,
                    finish_reason=reason,
                    prompt_tokens=prompt_tokens,
                    completion_tokens=completion_tokens,
                )
            )

        return await self._generate(request, context, chunk, complete)

    async def abort(self, request: engine_pb2.AbortRequest, _context: Context) -> engine_pb2.AbortResponse:
        for request_id in request.request_ids:
            self._running.abort(request_id)
        return engine_pb2.AbortResponse()

    async def health_check(
        self, _request: engine_pb2.HealthCheckRequest, _context: Context
    ) -> engine_pb2.HealthCheckResponse | Status:
        unready = self._unready()
        if unready is not None:
            return unready
        return engine_pb2.HealthCheckResponse(healthy=True, message="serving")

    async def get_model_info(
        self, _request: engine_pb2.GetModelInfoRequest, _context: Context
    ) -> engine_pb2.GetModelInfoResponse | Status:
        unready = self._unready()
        if unready is not None:
            return unready
        model = self._model
        return engine_pb2.GetModelInfoResponse(
            model_path=model.model_path,
            tokenizer_path=model.model_path,
            is_generation=True,
            served_model_name=model.served_model_name,
            model_type=model.model_type,
            architectures=model.architectures,
            max_context_length=model.max_context_length,
            max_req_input_len=model.max_context_length - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            supports_vision="image" in model.modalities or "video" in model.modalities,
        )

    async def get_server_info(
        self, _request: engine_pb2.GetServerInfoRequest, context: Context
    ) -> engine_pb2.GetServerInfoResponse | Status:
        unready = self._unready()
        if unready is not None:
            return unready
        info = engine_pb2.GetServerInfoResponse(
            active_requests=len(self._running),
            server_type="vllm-grpc",
            uptime_seconds=time.time() - self._started,
            data_parallel_size=1,
            shm_namespace_id=self._advertisement.shm_namespace_id,
            model_dtype=f"torch.{self._model.model_dtype}",
            multimodal_encoder_dtype=self._advertisement.encoder_dtype,
        )
        self._handler.server_info(info)
        context.set_trailing_metadata(self._advertisement.metadata())
        return info

    async def get_loads(self, _request: engine_pb2.GetLoadsRequest, _context: Context) -> engine_pb2.GetLoadsResponse:
        load = engine_pb2.SchedulerLoad(
            num_running_reqs=len(self._running),
            num_total_reqs=len(self._running),
            max_total_num_tokens=self._model.max_context_length,
        )
        return engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._advertisement.version,
            dp_rank_count=1,
            loads=[load],
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
