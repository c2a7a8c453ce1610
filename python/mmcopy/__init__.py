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
from .encoders import EncoderDtype, encoder_dtype, encoder_dtypes, explain_encoder_dtypes
from .errors import (
    ArrayTypeError,
    CastError,
    ClosedError,
    ConfigError,
    CopyPlanError,
    DeviceError,
    DeviceMemoryError,
    InlineTooLargeError,
    MissingDependencyError,
    MmcopyError,
    NoSpaceError,
    PayloadError,
    PrewarmError,
    PrewarmTimeoutError,
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
    UnknownFamilyError,
    UnsupportedPayloadError,
)
from .metrics import Counter, Metrics
from .prewarm import Forecast, PrewarmReport, PrewarmStatus, prewarm
from .readiness import Readiness, ReadinessSnapshot, ReadinessState
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
    "DeviceError",
    "DeviceMemoryError",
    "EncoderDtype",
    "Forecast",
    "Inline",
    "InlineTooLargeError",
    "Metrics",
    "MissingDependencyError",
    "MmcopyError",
    "NoSpaceError",
    "PayloadError",
    "PrewarmError",
    "PrewarmReport",
    "PrewarmStatus",
    "PrewarmTimeoutError",
    "Readiness",
    "ReadinessSnapshot",
    "ReadinessState",
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
    "UnknownFamilyError",
    "UnsupportedPayloadError",
    "WorkerSpec",
    "__version__",
    "encoder_dtype",
    "encoder_dtypes",
    "explain_encoder_dtypes",
    "prewarm",
    "shm_namespace_id",
]

if _native.DEBUG_BUILD:
    _warnings.warn(
        "mmcopy's native module is a debug build: copies are many times slower (maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
