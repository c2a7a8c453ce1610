"""What serving a request takes, whatever the engine: receive, hand to the handler, answer, and one status if not."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from mmcopy.prewarm.readiness import Readiness
from mmcopy.tensors import ShmHandle, TensorData

from .ask import METADATA
from .intake import Intake, Received
from .model import ModelInfo
from .request import MultimodalItem, Rpc, WorkerRequest
from .rpc import Context, ReplyLostError, write
from .running import RunningCalls
from .status import Status, StatusError, handler_status, receive_status

if TYPE_CHECKING:
    import grpc

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

    def each_tensor(self, request: Any) -> Iterator[tuple[int, str, Any]]: ...

    def tensors_of(self, request: Any) -> dict[str, Any]: ...

    def handles_of(self, request: Any) -> list[ShmHandle]: ...

    def label_of(self, index: int, name: str) -> str: ...

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
        told = {"mmcopy_endpoint": self.endpoint, "shm_uid": self.shm_uid}
        # gRPC takes ASCII there.
        return tuple((key, told[label]) for key, label in METADATA.items() if told[label] and told[label].isascii())


class Service(ABC):
    """One engine's protocol; the subclass knows its messages."""

    wire: ClassVar[Wire]

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

    @abstractmethod
    def handlers(self) -> list[grpc.GenericRpcHandler[Any, Any]]:
        """The engine's services, for a gRPC server."""

    @abstractmethod
    def _describe(self, rpc: Rpc, message: Any) -> WorkerRequest:
        """The request without its tensors. Raises a :class:`mmcopy.MmcopyError` for one that cannot be served."""

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
        handles = self.wire.handles_of(message)
        with self._running.entered(message.request_id) as call:
            try:
                try:
                    request = await self._receive(rpc, message, handles)
                except Exception as error:
                    status = receive_status(error, has_segments=bool(handles))
                    _log.warning("%s %s is refused: %s", rpc, message.request_id, status.message)
                else:
                    return await serve(request)
            except asyncio.CancelledError as error:
                if call.take_back_abort():
                    # Not CANCELLED, which the gateway would send again.
                    status = Status("ABORTED", f"request {message.request_id!r} was aborted")
                elif call.task.cancelling():
                    _log.debug("%s %s was cancelled", rpc, message.request_id)
                    raise
                else:
                    status = handler_status(error, has_segments=bool(handles))
                    _log.warning("%s %s: %s", rpc, message.request_id, status.message)
            except ReplyLostError as error:
                _log.debug("%s %s: the reply is lost: %s", rpc, message.request_id, error)
                raise
            except StatusError as error:
                status = handler_status(error, has_segments=bool(handles))
                _log.warning("%s %s: the handler answers %s: %s", rpc, message.request_id, error.code, error)
            except Exception as error:
                status = handler_status(error, has_segments=bool(handles))
                _log.exception("%s %s: the handler failed", rpc, message.request_id)
        return status

    async def _receive(self, rpc: Rpc, message: Any, handles: list[ShmHandle]) -> WorkerRequest:
        try:
            unready = self._unready()
            if unready is not None:
                raise StatusError(unready.code, unready.message)
            request = self._describe(rpc, message)
            tensors = self.wire.tensors_of(message)
        except Exception:
            await self._intake.release(handles)
            raise
        if not tensors:
            return request

        def read() -> dict[str, TensorData]:
            return {label: self.wire.from_proto(tensor) for label, tensor in tensors.items()}

        received = await self._intake.receive(request.request_id, handles, read)
        keys = [(i, name, self.wire.label_of(i, name)) for i, name, _ in self.wire.each_tensor(message)]
        items = tuple(_with_tensors(item, i, keys, received) for i, item in enumerate(request.items))
        return replace(request, items=items, receive_s=received.seconds)

    async def _generate(
        self,
        message: Any,
        context: Context,
        chunk: Callable[[Sequence[int], int, int], Any],
        complete: Callable[[Sequence[int], str, int, int], Any],
    ) -> Status | None:
        """Answer ``Generate``: a message a batch where the client streams, and the complete one at the end.

        ``chunk`` makes the first kind from (token ids, prompt tokens, tokens so far), ``complete`` the other from
        (all token ids, finish reason, prompt tokens, tokens).
        """

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
            final = complete(token_ids, "length" if full else "stop", prompt_tokens, len(token_ids))
            self._handler.finish(request, final)
            await write(context, final)

        return await self._serve("generate", message, serve)


def _with_tensors(
    item: MultimodalItem, index: int, keys: Sequence[tuple[int, str, str]], received: Received
) -> MultimodalItem:
    names = [(name, label) for i, name, label in keys if i == index]
    return replace(
        item,
        tensors={name: received.tensors[label] for name, label in names},
        data={name: received.data[label] for name, label in names},
    )


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
