"""mmcopy moves preprocessed tensors from a gateway process onto a worker's GPU.

The sending side is :class:`Sender`, the receiving side :class:`Receiver`; what goes between them is
:class:`TensorData`. ``mmcopy.wire`` turns it into the messages of real engines, ``mmcopy.integrations`` has ready
workers. Importing this package needs numpy alone.
"""

from __future__ import annotations

import warnings as _warnings

from . import _native
from ._native import CASTS, __version__, shm_namespace_id
from .config import ResolvedTransport, TransportConfig, TransportMode, WorkerSpec
from .errors import (
    ArenaConsumerError,
    ArenaError,
    ArenaFullError,
    ArenaMemoryError,
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
    LeaseAbortedError,
    LeaseBusyError,
    LeaseError,
    LeaseForgedError,
    LeaseOwnerGoneError,
    LeaseRepeatedError,
    LeaseStaleError,
    LeaseTimeoutError,
    LeaseUnknownArenaError,
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
)
from .metrics import Counter, Metrics
from .receiver import Receiver
from .sender import Sender
from .tensors import DTYPES, Inline, ShmHandle, TensorData

__all__ = [
    "CASTS",
    "DTYPES",
    "ArenaConsumerError",
    "ArenaError",
    "ArenaFullError",
    "ArenaMemoryError",
    "ArrayTypeError",
    "CastError",
    "ClosedError",
    "ConfigError",
    "CopyPlanError",
    "Counter",
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
    "LeaseAbortedError",
    "LeaseBusyError",
    "LeaseError",
    "LeaseForgedError",
    "LeaseOwnerGoneError",
    "LeaseRepeatedError",
    "LeaseStaleError",
    "LeaseTimeoutError",
    "LeaseUnknownArenaError",
    "Metrics",
    "MissingDependencyError",
    "MmcopyError",
    "NoSpaceError",
    "PayloadError",
    "ReceiveTimeoutError",
    "Receiver",
    "RepeatedHandleError",
    "ResolvedTransport",
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
    "__version__",
    "shm_namespace_id",
]

if _native.DEBUG_BUILD:
    _warnings.warn(
        "mmcopy's native module is a debug build: copies are many times slower (maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
