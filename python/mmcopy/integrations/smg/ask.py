"""What a worker tells of itself, read as SMG's gateway reads it: its engine and its labels."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mmcopy.config import ENDPOINT_LABEL, NAMESPACE_LABEL, UID_LABEL, WorkerSpec
from mmcopy.errors import ConfigError, MissingDependencyError, WorkerUnreachableError

__all__ = ["METADATA", "Advertised", "ask_worker", "with_advertised"]

METADATA = {"mmcopy-endpoint": ENDPOINT_LABEL, "mmcopy-shm-uid": UID_LABEL}
"""Labels of ours that engines' messages have no place for: they come in the trailing metadata of GetServerInfo."""
_OWN_LABELS = (NAMESPACE_LABEL, *METADATA.values())
_GRPC_LIMIT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Advertised:
    """A worker's engine and those of its labels that :class:`mmcopy.WorkerSpec` looks at; absent where it has none."""

    engine: str
    labels: Mapping[str, str]


def ask_worker(url: str, *, timeout_s: float = 5.0) -> Advertised:
    """Call GetServerInfo and GetModelInfo of the worker at ``url``; ``grpc://host:port`` or ``host:port``.

    TokenSpeed's protocol is tried first, then vLLM's. Blocks, ``timeout_s`` at most. Raises
    :class:`WorkerUnreachableError`, :class:`ConfigError` for a url of another kind, and
    :class:`MissingDependencyError` without grpcio or smg-grpc-proto.
    """
    address = url.removeprefix("grpc://")
    if "://" in address or not address or "/" in address:
        raise ConfigError(f"worker url is {url!r}, want grpc://host:port")
    try:
        import grpc
        from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc, vllm_engine_pb2_grpc
    except ImportError as error:
        raise MissingDependencyError(f"asking a worker needs grpcio ({error}): pip install 'mmcopy[smg]'") from error
    deadline = time.monotonic() + timeout_s
    options = [("grpc.max_receive_message_length", _GRPC_LIMIT_BYTES), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            return _tokenspeed(tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub(channel), deadline)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise _unreachable(url, error) from error
        try:
            return _vllm(vllm_engine_pb2_grpc.VllmEngineStub(channel), deadline)
        except grpc.RpcError as error:
            raise _unreachable(url, error) from error


def with_advertised(worker: WorkerSpec, advertised: Advertised) -> WorkerSpec:
    """``worker`` with the labels that it advertises; the operator's own go first, as with SMG."""
    return replace(worker, engine=worker.engine or advertised.engine, labels={**advertised.labels, **worker.labels})


def _tokenspeed(stub: Any, deadline: float) -> Advertised:
    from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

    server, call = stub.GetServerInfo.with_call(pb.GetServerInfoRequest(), timeout=_left(deadline))
    model = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=_left(deadline))
    fields = server.scheduler_info.fields
    labels = {name: fields[name].string_value for name in _OWN_LABELS if name in fields}
    return _advertised(
        "tokenspeed", {**_from_metadata(call), **labels, "multimodal_encoder_dtype": model.multimodal_encoder_dtype}
    )


def _vllm(stub: Any, deadline: float) -> Advertised:
    from smg_grpc_proto.generated import vllm_engine_pb2 as pb

    server, call = stub.GetServerInfo.with_call(pb.GetServerInfoRequest(), timeout=_left(deadline))
    labels = {
        "shm_namespace_id": server.shm_namespace_id,
        "multimodal_encoder_dtype": server.multimodal_encoder_dtype,
        "mm_device_do_normalize": "true" if server.mm_device_do_normalize else "false",
    }
    return _advertised("vllm", {**_from_metadata(call), **labels})


def _from_metadata(call: Any) -> dict[str, str]:
    return {METADATA[key]: str(value) for key, value in call.trailing_metadata() or () if key in METADATA}


def _advertised(engine: str, labels: Mapping[str, str]) -> Advertised:
    return Advertised(engine, {name: text for name, text in labels.items() if text})


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _unreachable(url: str, error: Any) -> WorkerUnreachableError:
    return WorkerUnreachableError(f"worker {url} does not tell its labels: {error.code().name}: {error.details()}")
