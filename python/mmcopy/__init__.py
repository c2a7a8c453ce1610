"""mmcopy moves preprocessed tensors from a gateway process onto a worker's GPU.

The sending side is :class:`Sender`, the receiving side :class:`Receiver`; what goes between them is
:class:`TensorData`. ``mmcopy.wire`` turns it into the messages of real engines, ``mmcopy.integrations`` has ready
workers. Importing this package needs numpy alone.
"""

from __future__ import annotations

import warnings as _warnings

from . import _native
from ._native import CASTS, __version__, shm_namespace_id
from .config import (
    Delivery,
    ResolvedDtype,
    ResolvedTransport,
    Role,
    Route,
    RouterConfig,
    TransportConfig,
    TransportMode,
    WorkerSpec,
    add_transport_args,
    load_config,
    transport_from_args,
    wire_dtype,
)
from .errors import (
    ArrayTypeError,
    CastError,
    ClosedError,
    ConfigError,
    CopyPlanError,
    DeviceError,
    DeviceMemoryError,
    EndpointDirectoryError,
    EndpointGoneError,
    EndpointIoError,
    EndpointProtocolError,
    EndpointRefusedError,
    EndpointTimeoutError,
    InlineTooLargeError,
    MissingDependencyError,
    MmcopyError,
    NoSpaceError,
    PayloadError,
    ReceiveTimeoutError,
    RepeatedHandleError,
    SegmentExistsError,
    SegmentIoError,
    SegmentKindError,
    SegmentNameError,
    SegmentNotFoundError,
    SegmentPermissionError,
    SegmentSizeError,
    UnknownDtypeError,
    UnsupportedPayloadError,
    WorkerUnreachableError,
)
from .metrics import Counter, Metrics
from .receiver import Receiver
from .sender import Sender
from .tensors import DTYPES, Inline, ShmHandle, TensorData

__all__ = [
    "CASTS",
    "DTYPES",
    "ArrayTypeError",
    "CastError",
    "ClosedError",
    "ConfigError",
    "CopyPlanError",
    "Counter",
    "Delivery",
    "DeviceError",
    "DeviceMemoryError",
    "EndpointDirectoryError",
    "EndpointGoneError",
    "EndpointIoError",
    "EndpointProtocolError",
    "EndpointRefusedError",
    "EndpointTimeoutError",
    "Inline",
    "InlineTooLargeError",
    "Metrics",
    "MissingDependencyError",
    "MmcopyError",
    "NoSpaceError",
    "PayloadError",
    "ReceiveTimeoutError",
    "Receiver",
    "RepeatedHandleError",
    "ResolvedDtype",
    "ResolvedTransport",
    "Role",
    "Route",
    "RouterConfig",
    "SegmentExistsError",
    "SegmentIoError",
    "SegmentKindError",
    "SegmentNameError",
    "SegmentNotFoundError",
    "SegmentPermissionError",
    "SegmentSizeError",
    "Sender",
    "ShmHandle",
    "TensorData",
    "TransportConfig",
    "TransportMode",
    "UnknownDtypeError",
    "UnsupportedPayloadError",
    "WorkerSpec",
    "WorkerUnreachableError",
    "__version__",
    "add_transport_args",
    "load_config",
    "shm_namespace_id",
    "transport_from_args",
    "wire_dtype",
]

if _native.DEBUG_BUILD:
    _warnings.warn(
        "mmcopy's native module is a debug build: copies are many times slower (maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
