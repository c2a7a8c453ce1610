"""TokenSpeed's scheduler and encoder protocols."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar

from google.protobuf.struct_pb2 import Struct
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_encoder_pb2 as encoder_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as scheduler_pb2

from mmcopy.config import ENDPOINT_LABEL, NAMESPACE_LABEL
from mmcopy.errors import PayloadError
from mmcopy.wire import tokenspeed as wire

from .request import MultimodalItem, Rpc, WorkerRequest, modality_name
from .rpc import Context, service_handler
from .service import Service, Wire
from .status import Status

if TYPE_CHECKING:
    import grpc

__all__ = ["TokenSpeedService"]


class TokenSpeedService(Service):
    """Both of TokenSpeed's services: an encode worker answers the scheduler's questions too."""

    wire: ClassVar[Wire] = wire
    pb2: ClassVar[Any] = scheduler_pb2
    service_name = "TokenSpeedScheduler"

    def handlers(self) -> list[grpc.GenericRpcHandler[Any, Any]]:
        encoder = encoder_pb2.DESCRIPTOR.services_by_name["TokenSpeedEncoder"]
        return [*super().handlers(), service_handler(encoder, {"Encode": self.encode})]

    async def encode(
        self, request: encoder_pb2.EncodeRequest, _context: Context
    ) -> encoder_pb2.EncodeResponse | Status:
        async def serve(received: WorkerRequest) -> encoder_pb2.EncodeResponse:
            await self._handler.encode(received)
            return encoder_pb2.EncodeResponse(accepted=True)

        # The gateway unlinks the segments as soon as this call ends: nothing may be left to read after the answer.
        return await self._serve("encode", request, serve)

    async def abort(self, request: scheduler_pb2.AbortRequest, _context: Context) -> scheduler_pb2.AbortResponse:
        running = self._running.abort(request.request_id)
        return scheduler_pb2.AbortResponse(
            success=running, message="" if running else f"no request {request.request_id!r} is running"
        )

    def _echo(self, request: Any) -> dict[str, Any]:
        return {"request_id": request.request_id}

    def _model_fields(self) -> dict[str, Any]:
        model = self._model
        return {
            "supports_multimodal": bool(model.modalities),
            "supported_modalities": [common_pb2.Modality.Value(name.upper()) for name in model.modalities],
            "model_dtype": model.model_dtype,
            "multimodal_encoder_dtype": self._advertisement.encoder_dtype,
        }

    def _server_info(self) -> scheduler_pb2.GetServerInfoResponse:
        server_args, scheduler_info = Struct(), Struct()
        server_args.update(
            {
                "model": self._model.model_path,
                "tokenizer": self._model.model_path,
                "served_model_name": self._model.served_model_name,
                "tp_size": 1,
                "dp_size": 1,
            }
        )
        if self._advertisement.shm_namespace_id:
            scheduler_info[NAMESPACE_LABEL] = self._advertisement.shm_namespace_id
        if self._advertisement.endpoint:
            scheduler_info[ENDPOINT_LABEL] = self._advertisement.endpoint
        info = scheduler_pb2.GetServerInfoResponse(
            server_args=server_args,
            scheduler_info=scheduler_info,
            active_requests=len(self._running),
            uptime_seconds=time.time() - self._started,
            max_total_num_tokens=self._model.max_context_length,
            tokenspeed_version=self._advertisement.version,
        )
        info.start_time.FromSeconds(int(self._started))
        return info

    def _describe(self, rpc: Rpc, message: Any) -> WorkerRequest:
        items = tuple(map(_item, message.mm_inputs.items))
        if rpc == "encode":
            rooms = tuple(assignment.bootstrap_room for assignment in message.items)
            if not items or len(rooms) != len(items):
                raise PayloadError(f"Encode has {len(items)} items and {len(rooms)} rooms, want one room per item")
            return WorkerRequest(
                engine="tokenspeed",
                rpc=rpc,
                request_id=message.request_id,
                items=items,
                input_ids=(),
                stream=False,
                max_new_tokens=None,
                bootstrap_rooms=rooms,
                receive_s=0.0,
                message=message,
            )
        sampling = message.sampling_params
        self._refuse_several(sampling.n)
        return WorkerRequest(
            engine="tokenspeed",
            rpc=rpc,
            request_id=message.request_id,
            items=items,
            input_ids=tuple(message.tokenized.input_ids),
            stream=message.stream,
            max_new_tokens=sampling.max_new_tokens if sampling.HasField("max_new_tokens") else None,
            bootstrap_rooms=tuple(item.bootstrap_room for item in message.encode_bootstrap_info.items),
            receive_s=0.0,
            message=message,
        )


def _item(item: scheduler_pb2.MultimodalItem) -> MultimodalItem:
    return MultimodalItem(
        modality=modality_name(item.modality),
        content_hashes=(item.content_hash,) if item.content_hash else (),
        tensors={},
        data={},
        placeholders=tuple((p.offset, p.length) for p in item.placeholders),
        placeholder_token_id=item.placeholder_token_id if item.HasField("placeholder_token_id") else None,
    )
