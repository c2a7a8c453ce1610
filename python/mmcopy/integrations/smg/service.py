"""What serving a request takes, whatever the engine: receive, hand to the handler, answer, and one status if not."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from mmcopy.config import ENDPOINT_LABEL, UID_LABEL
from mmcopy.prewarm.readiness import Readiness
from mmcopy.tensors import ShmHandle, TensorData
from mmcopy.wire.payload import Key, handles_of, unique

from .ask import METADATA
from .intake import Intake
from .model import ModelInfo
from .request import Rpc, WorkerRequest, quoted
from .rpc import Context, Method, ReplyLostError, service_handler, write
from .running import RunningCalls
from .status import Status, StatusError, handler_status, receive_status

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

__all__ = ["Advertisement", "Handler", "Service"]

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Handler(Protocol):
    """The part of a worker that its user writes."""

    def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]: ...

    async def encode(self, request: WorkerRequest) -> None: ...

    def finish(self, request: WorkerRequest, message: Any) -> None: ...

    def server_info(self, message: Any) -> None: ...


class Wire(Protocol):
    """An engine's module in ``mmcopy.wire``."""

    def each_tensor(self, request: Any) -> Iterator[tuple[Key, Any]]: ...

    def from_proto(self, message: Any) -> TensorData: ...


@dataclass(slots=True)
class Advertisement:
    """What the gateway reads from a worker to choose transport and dtype. The dtype may become known late."""

    shm_namespace_id: str
    encoder_dtype: str
    version: str
    endpoint: str = ""
    """Path of the worker's socket for mmcopy senders."""
    shm_uid: str = ""
    """Who reads the segments."""

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What engines' messages have no place for, as trailing metadata of GetServerInfo."""
        values = {ENDPOINT_LABEL: self.endpoint, UID_LABEL: self.shm_uid}
        # gRPC takes ASCII there.
        return tuple(
            (key, values[label]) for key, label in METADATA.items() if values[label] and values[label].isascii()
        )


class Service(ABC):
    """One engine's protocol.

    The engines' messages look alike, so the RPCs that they share are written once, over the engine's generated module
    ``pb2``; a subclass says what differs: its module and service, the fields of its answers, and how its requests are
    read.
    """

    wire: ClassVar[Wire]
    pb2: ClassVar[Any]
    """The generated module with the messages of the RPCs below."""
    service_name: ClassVar[str]

    def __init__(
        self,
        handler: Handler,
        intake: Intake,
        running: RunningCalls,
        model: ModelInfo,
        advertisement: Advertisement,
        readiness: Readiness | None = None,
    ) -> None:
        self._handler = handler
        self._intake = intake
        self._running = running
        self._model = model
        self._advertisement = advertisement
        self._readiness = readiness
        self._started = time.time()

    def handlers(self) -> list[grpc.GenericRpcHandler[Any, Any]]:
        """The engine's services, for a gRPC server."""
        methods: dict[str, Method] = {
            "Generate": self.generate,
            "HealthCheck": self.health_check,
            "Abort": self.abort,
            "GetModelInfo": self.get_model_info,
            "GetServerInfo": self.get_server_info,
            "GetLoads": self.get_loads,
        }
        return [service_handler(self.pb2.DESCRIPTOR.services_by_name[self.service_name], methods)]

    @abstractmethod
    def _describe(self, rpc: Rpc, message: Any) -> WorkerRequest:
        """The request without its tensors. Raises a :class:`mmcopy.MmcopyError` for one that cannot be served."""

    @abstractmethod
    async def abort(self, request: Any, context: Context) -> Message:
        """The RPC ``Abort``."""

    @abstractmethod
    def _model_fields(self) -> dict[str, Any]:
        """What the engine's ``GetModelInfoResponse`` has beside the fields that all have."""

    @abstractmethod
    def _server_info(self) -> Any:
        """The engine's ``GetServerInfoResponse``."""

    def _echo(self, _request: Any) -> dict[str, Any]:
        """What every ``GenerateResponse`` repeats of its request."""
        return {}

    async def health_check(self, _request: Any, _context: Context) -> Message | Status:
        unready = self._unready()
        response: Message = self.pb2.HealthCheckResponse(healthy=True, message="serving")
        return unready or response

    async def get_model_info(self, _request: Any, _context: Context) -> Message | Status:
        unready = self._unready()
        if unready is not None:
            return unready
        model = self._model
        response: Message = self.pb2.GetModelInfoResponse(
            model_path=model.model_path,
            tokenizer_path=model.model_path,
            served_model_name=model.served_model_name,
            model_type=model.model_type,
            architectures=model.architectures,
            max_context_length=model.max_context_length,
            max_req_input_len=model.max_context_length - 1,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            supports_vision="image" in model.modalities or "video" in model.modalities,
            **self._model_fields(),
        )
        return response

    async def get_server_info(self, _request: Any, context: Context) -> Message | Status:
        unready = self._unready()
        if unready is not None:
            return unready
        info: Message = self._server_info()
        self._handler.server_info(info)
        context.set_trailing_metadata(self._advertisement.metadata())
        return info

    async def get_loads(self, _request: Any, _context: Context) -> Message:
        load = self.pb2.SchedulerLoad(
            num_running_reqs=len(self._running),
            num_total_reqs=len(self._running),
            max_total_num_tokens=self._model.max_context_length,
        )
        response: Message = self.pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=self._advertisement.version,
            dp_rank_count=1,
            loads=[load],
        )
        return response

    async def generate(self, message: Any, context: Context) -> Status | None:
        """The RPC ``Generate``: a message per batch where the client streams, and the complete one at the end."""
        echo = self._echo(message)

        def chunk(batch: Sequence[int], prompt_tokens: int, tokens: int) -> Message:
            part = self.pb2.GenerateStreamChunk(token_ids=batch, prompt_tokens=prompt_tokens, completion_tokens=tokens)
            response: Message = self.pb2.GenerateResponse(chunk=part, **echo)
            return response

        async def serve(request: WorkerRequest) -> None:
            token_ids: list[int] = []
            prompt_tokens, chunks = len(request.input_ids), 0
            async with _closing(self._handler.generate(request)) as batches:
                async for batch in batches:
                    token_ids += batch
                    if request.stream:
                        chunks += 1
                        await write(context, chunk(batch, prompt_tokens, len(token_ids)))
            if request.stream and not chunks:  # the gateway opens its answer on a chunk only
                await write(context, chunk((), prompt_tokens, 0))
            full = request.max_new_tokens is not None and len(token_ids) >= request.max_new_tokens
            complete = self.pb2.GenerateComplete(
                output_ids=token_ids,
                finish_reason="length" if full else "stop",
                prompt_tokens=prompt_tokens,
                completion_tokens=len(token_ids),
            )
            final = self.pb2.GenerateResponse(complete=complete, **echo)
            self._handler.finish(request, final)
            await write(context, final)

        return await self._serve("generate", message, serve)

    def _unready(self) -> Status | None:
        """What every question is answered with before the worker is ready; None when it is.

        SMG's gateway takes a worker into its service whose HealthCheck answers, whatever the answer says, and never
        asks grpc.health; one whose HealthCheck fails it asks again (seen with smg 1.13.0). One whose GetModelInfo fails
        although HealthCheck answered is registered for good without a model: so that one fails only with the other.
        """
        if self._readiness is None or self._readiness.is_ready:
            return None
        return Status("UNAVAILABLE", f"not ready: {self._readiness.snapshot()}")

    @staticmethod
    def _refuse_several(samples: int) -> None:
        if samples > 1:
            raise StatusError("UNIMPLEMENTED", f"the request wants n={samples} answers, this worker gives one")

    async def _serve(
        self, rpc: Rpc, message: Any, serve: Callable[[WorkerRequest], Awaitable[Answer]]
    ) -> Answer | Status:
        """Receive the request's tensors and ``serve`` it. Every failure is one status; see ``status.py``."""
        tensors = list(self.wire.each_tensor(message))
        handles = handles_of(tensors)
        with self._running.entered(message.request_id) as call:
            try:
                try:
                    request = await self._receive(rpc, message, tensors, handles)
                except Exception as error:
                    status = receive_status(error, has_segments=bool(handles))
                    _log.warning("%s %s is refused: %s", rpc, quoted(message.request_id), status.message)
                else:
                    return await serve(request)
            except asyncio.CancelledError as error:
                if call.take_back_abort():
                    # Not CANCELLED, which the gateway would send again.
                    status = Status("ABORTED", f"request {message.request_id!r} was aborted")
                elif call.task.cancelling():
                    _log.debug("%s %s was cancelled", rpc, quoted(message.request_id))
                    raise
                else:
                    status = handler_status(error, has_segments=bool(handles))
                    _log.warning("%s %s: %s", rpc, quoted(message.request_id), status.message)
            except ReplyLostError as error:
                _log.debug("%s %s: the reply is lost: %s", rpc, quoted(message.request_id), error)
                raise
            except StatusError as error:
                status = handler_status(error, has_segments=bool(handles))
                _log.warning("%s %s: the handler answers %s: %s", rpc, quoted(message.request_id), error.code, error)
            except Exception as error:
                status = handler_status(error, has_segments=bool(handles))
                _log.exception("%s %s: the handler failed", rpc, quoted(message.request_id))
        return status

    async def _receive(
        self, rpc: Rpc, message: Any, tensors: list[tuple[Key, Any]], handles: list[ShmHandle]
    ) -> WorkerRequest:
        try:
            unready = self._unready()
            if unready is not None:
                raise StatusError(unready.code, unready.message)
            request = self._describe(rpc, message)
            by_key = unique(tensors)
        except Exception:
            await self._intake.release(handles)
            raise
        if not by_key:
            return request

        def read() -> dict[Key, TensorData]:
            return {key: self.wire.from_proto(tensor) for key, tensor in by_key.items()}

        received = await self._intake.receive(request.request_id, handles, read)
        items = tuple([replace(item, tensors={}, data={}) for item in request.items])
        for key, data in received.data.items():
            index, name = key
            items[index].tensors[name] = received.tensors[key]
            items[index].data[name] = data
        return replace(request, items=items, receive_s=received.seconds)


@asynccontextmanager
async def _closing(batches: AsyncIterator[Sequence[int]]) -> AsyncIterator[AsyncIterator[Sequence[int]]]:
    """Ends the handler's generator with the call, so that its own ``finally`` runs now and not at collection."""
    if not hasattr(batches, "__aiter__"):
        if asyncio.iscoroutine(batches):
            batches.close()
        raise TypeError(f"generate returned a {type(batches).__name__}, want an async generator: does it yield?")
    try:
        yield batches
    finally:
        close = getattr(batches, "aclose", None)
        if close is not None:
            await close()
