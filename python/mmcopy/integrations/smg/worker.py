"""A worker that SMG's gateway talks to, with mmcopy as its receiving side."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, get_args

from mmcopy._native import __version__
from mmcopy._native import shm_namespace_id as own_namespace_id
from mmcopy.config import parse_count, parse_seconds
from mmcopy.encoders import common_dtype, explain_encoder_dtypes
from mmcopy.errors import ClosedError, ConfigError, MissingDependencyError
from mmcopy.prewarm.readiness import Readiness
from mmcopy.receive.receiver import Receiver
from mmcopy.tensors import DTYPES, ShmHandle, TensorData
from mmcopy.wire.payload import Key

from .intake import Intake
from .model import ModelInfo
from .request import Engine, WorkerRequest
from .running import RunningCalls

if TYPE_CHECKING:
    import grpc.aio

    from .service import Advertisement, Service

__all__ = ["SmgWorker"]

_log = logging.getLogger(__name__)

_STOP_LIMIT_S = 10.0
"""How long ``stop`` waits for calls it cancelled, and for copies that cannot be interrupted."""


class SmgWorker:
    """Speaks one engine's protocol to SMG's gateway; subclass it and write :meth:`generate`, :meth:`encode` or both.

    ``engine`` ``"tokenspeed"`` serves TokenSpeed's scheduler and encoder services, ``"vllm"`` vLLM's engine service.
    Every tensor of a request is received with ``receiver`` on one of ``receive_threads`` threads before the handler
    is called, and its segments are removed on success, on error and on cancellation. A receive that takes longer than
    ``receive_timeout_s``, waiting for a thread included, fails its request alone.

    The gateway learns ``encoder_dtype``, into which it casts pixels ("": its own default): a name, what
    :func:`mmcopy.encoder_dtypes` says, or, with ``encoder`` (the model, or its tower), what that wants; bfloat16 where
    neither is given. :meth:`advertise_encoder` gives it later. It also learns
    ``shm_namespace_id``, by which it decides about shared memory under ``auto`` (None: that of the receiver's
    directory, "": none, so that ``auto`` sends inline). None is advertised either where the directory is read-only to
    this process, which could then not remove what it was sent. ``endpoint_path`` is the socket by which mmcopy's own
    senders probe whether this worker reads what they write, and hand their arenas over (None: that of the receiver's
    endpoint, if it has one; "": none). An endpoint that is not the receiver's must take no arenas. ``port`` 0 takes a
    free one.

    Before ``readiness`` is ready the worker listens, and answers health checks, questions about its model and requests
    with UNAVAILABLE and how far it has come, so that the gateway asks again instead of sending requests: every 30 s,
    unless it was started with ``--worker-startup-check-interval``. None: ready at once.

    The methods other than :meth:`receive` belong to one event loop. The receiver stays the caller's: close it after
    :meth:`stop`. Raises :class:`ConfigError` for a bad argument.
    """

    def __init__(
        self,
        model: ModelInfo,
        receiver: Receiver,
        *,
        engine: Engine = "tokenspeed",
        encoder_dtype: str | Mapping[str, str] | None = None,
        encoder: Any = None,
        readiness: Readiness | None = None,
        shm_namespace_id: str | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        receive_threads: int = 2,
        receive_timeout_s: float = 60.0,
        endpoint_path: str | None = None,
    ) -> None:
        if engine not in get_args(Engine):
            raise ConfigError(f"engine is {engine!r}, want one of {', '.join(get_args(Engine))}")
        if encoder_dtype is not None and encoder is not None:
            raise ConfigError(
                "encoder_dtype and encoder are both given: one says the same as the other, or another thing"
            )
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise ConfigError(f"port is {port!r}, want 0 to 65535")
        receive_threads = parse_count(receive_threads, setting="SmgWorker.receive_threads")
        receive_timeout_s = parse_seconds(receive_timeout_s, setting="SmgWorker.receive_timeout_s")
        self.model = model
        self.receiver = receiver
        self.engine: Engine = engine
        self.readiness = readiness
        self._advertisement: Advertisement | None = None
        self.encoder_dtype = _dtype_of(encoder) if encoder is not None else _dtype_named(encoder_dtype)
        self.host = host
        self.port = port
        can_remove = os.access(receiver.shm_dir, os.W_OK | os.X_OK, effective_ids=True)
        if shm_namespace_id is None:
            shm_namespace_id = own_namespace_id(receiver.shm_dir) if can_remove else ""
            if not can_remove:
                _log.warning("%s cannot be written: tensors come inline under auto", receiver.shm_dir)
        self.shm_namespace_id = shm_namespace_id
        if endpoint_path is None:
            endpoint_path = receiver.endpoint.path if receiver.endpoint is not None else ""
        self.endpoint_path = endpoint_path if can_remove else ""
        self._receive_threads = receive_threads
        self._receive_timeout_s = receive_timeout_s
        self._running = RunningCalls()
        self._started = False
        self._server: grpc.aio.Server | None = None
        self._intake: Intake | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """What the gateway is given: ``grpc://host:port``. The port is known after :meth:`start`."""
        return f"grpc://{_authority(self.host, self.port)}"

    def advertise_encoder(self, encoder: Any) -> str:
        """Tell the gateway the dtype that ``encoder`` wants, from the next question on; that dtype, "" for none.

        For a worker that listens before its model is loaded: call it before ``readiness`` is ready, because the
        gateway asks once.
        """
        self.encoder_dtype = _dtype_of(encoder)
        if self._advertisement is not None:
            self._advertisement.encoder_dtype = self.encoder_dtype
        return self.encoder_dtype

    def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Key, Any]:
        """One request's tensors by key (``(0, "encoder_input")``, ``(1, "pixel_values")``), on the device.

        Runs on a receiving thread, several at a time. Override it to observe or to time, and call this one: it is what
        removes the segments of a request that succeeds.
        """
        return self.receiver.receive(tensors)

    def release(self, handles: Sequence[ShmHandle]) -> None:
        """Remove segments of a request that is refused or given up. Runs on a thread; the segments may be gone."""
        self.receiver.release(handles)

    def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        """Override with an async generator of token id batches; each is one chunk where the client streams.

        Raising answers with an error status: INTERNAL, or that of a :class:`StatusError`. A call that is cancelled or
        aborted raises ``asyncio.CancelledError`` where the generator awaits.
        """
        raise NotImplementedError(f"{type(self).__name__} does not generate")

    async def encode(self, request: WorkerRequest) -> None:
        """Override to take an item for encoding (TokenSpeed, EPD). Returning accepts it.

        The tensors are this worker's to keep; the gateway waits for the return only. Raising answers with an error
        status: INTERNAL, or that of a :class:`StatusError`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not encode")

    def finish(self, request: WorkerRequest, message: Any) -> None:
        """Override to add to the final ``GenerateResponse`` of a request, for example vLLM's transfer parameters."""

    def server_info(self, message: Any) -> None:
        """Override to add to the ``GetServerInfoResponse``, for example vLLM's ``kv_connector``."""

    async def start(self) -> int:
        """Listen, and return the port. Calls are served from now on.

        Raises :class:`ConfigError` when the address cannot be had, :class:`MissingDependencyError`
        without grpcio or smg-grpc-proto, :class:`ClosedError` when the worker was started before.
        """
        if self._started:
            raise ClosedError(f"the worker at {self.address} was started already; make a new one")
        try:
            import grpc.aio

            from .health import health_handlers
        except ImportError as error:
            raise MissingDependencyError(f"a worker needs grpcio ({error}): pip install 'mmcopy[smg]'") from error
        intake = Intake(
            self.receive, self.release, num_threads=self._receive_threads, timeout_s=self._receive_timeout_s
        )
        service = self._service(intake)
        server = grpc.aio.server(
            options=[
                # Inline pixels exceed gRPC's default of 4 MiB by far.
                ("grpc.max_receive_message_length", -1),
                # Otherwise a second worker on this port would silently take half of the calls.
                ("grpc.so_reuseport", 0),
            ]
        )
        server.add_generic_rpc_handlers([*service.handlers(), *health_handlers(self._is_serving)])
        try:
            port = server.add_insecure_port(_authority(self.host, self.port))
        except RuntimeError as error:
            # Only a server that ran closes its descriptors when it is stopped.
            await server.start()
            await server.stop(None)
            raise ConfigError(f"cannot listen on {_authority(self.host, self.port)}: {error}") from error
        await server.start()
        self._started, self.port, self._server, self._intake = True, port, server, intake
        _log.info("%s worker for %r listens on %s", self.engine, self.model.served_model_name, self.address)
        return self.port

    async def wait(self) -> None:
        """Return when the worker has stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Refuse new calls, let the running ones end for ``grace_s`` seconds, cancel the rest, and release everything.

        When it returns no thread of the worker is left and no segment it was handed; only a copy that does not end
        within ten seconds more is left behind, with a warning. Idempotent; a second call waits for the first.
        """
        if self._server is not None and self._intake is not None and self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(self._server, self._intake, grace_s))
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _stop(self, server: grpc.aio.Server, intake: Intake, grace_s: float) -> None:
        await server.stop(grace_s)
        calls = await self._running.wait(_STOP_LIMIT_S)
        copies = await intake.close(_STOP_LIMIT_S)
        # They refer back to this worker: gRPC's threads and descriptors would live until the cycle is collected.
        self._server = self._intake = None
        if calls or copies:
            _log.warning("%s: %d calls and %d receives did not end and are left behind", self.address, calls, copies)
        _log.info("the worker on %s has stopped", self.address)

    def _is_serving(self) -> bool:
        return self._stopping is None and (self.readiness is None or self.readiness.is_ready)

    def _service(self, intake: Intake) -> Service:
        try:
            from .service import Advertisement
            from .tokenspeed import TokenSpeedService
            from .vllm import VllmService
        except ImportError as error:
            raise MissingDependencyError(
                f"a worker needs smg-grpc-proto ({error}): pip install 'mmcopy[smg]'"
            ) from error
        advertisement = Advertisement(
            self.shm_namespace_id, self.encoder_dtype, f"mmcopy-{__version__}", self.endpoint_path, str(os.geteuid())
        )
        self._advertisement = advertisement
        service = VllmService if self.engine == "vllm" else TokenSpeedService
        return service(self, intake, self._running, self.model, advertisement, self.readiness)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _dtype_named(encoder_dtype: str | Mapping[str, str] | None) -> str:
    """The name to advertise. Raises :class:`ConfigError` for one that is no dtype."""
    if encoder_dtype is None:
        return "bfloat16"
    if isinstance(encoder_dtype, Mapping):
        return common_dtype(encoder_dtype) or ""
    if encoder_dtype and encoder_dtype not in DTYPES:
        raise ConfigError(f"encoder_dtype is {encoder_dtype!r}, want '' or one of {', '.join(DTYPES)}")
    return encoder_dtype


def _dtype_of(encoder: Any) -> str:
    """What an encoder wants. None is no error: the gateway then chooses, and the log says why."""
    answers = explain_encoder_dtypes(encoder)
    dtype = common_dtype({name: answer.dtype for name, answer in answers.items() if answer.dtype is not None})
    if dtype is None:
        reasons = "; ".join(f"{name}: {answer.reason}" for name, answer in answers.items())
        _log.warning("no encoder dtype is advertised, the gateway chooses: %s", reasons)
    return dtype or ""
