"""gRPC's own health service (grpc.health.v1), where grpcio-health-checking is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .rpc import Context, service_handler
from .status import Status

if TYPE_CHECKING:
    import grpc

__all__ = ["health_handlers"]


def health_handlers(serving: Callable[[], bool]) -> list[grpc.GenericRpcHandler[Any, Any]]:
    """The handler of ``Check`` for the server as a whole; none without the package."""
    try:
        from grpc_health.v1 import health_pb2
    except ImportError:
        return []

    async def check(
        request: health_pb2.HealthCheckRequest, _context: Context
    ) -> health_pb2.HealthCheckResponse | Status:
        if request.service:
            return Status("NOT_FOUND", f"no health is kept for the service {request.service!r}")
        status = "SERVING" if serving() else "NOT_SERVING"
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.ServingStatus.Value(status))

    return [service_handler(health_pb2.DESCRIPTOR.services_by_name["Health"], {"Check": check})]
