"""mmcopy moves preprocessed tensors from a gateway process onto a worker's GPU.

The sending side is :class:`Sender`, the receiving side :class:`Receiver`; what goes between them is
:class:`TensorData`. ``mmcopy.wire`` turns it into the messages of real engines, ``mmcopy.integrations`` has ready
workers. Errors are in :mod:`mmcopy.errors`, settings in :mod:`mmcopy.config`. Importing this package needs numpy alone.
"""

from __future__ import annotations

import warnings as _warnings

from . import _native
from ._native import __version__, shm_namespace_id
from .config import TransportConfig, TransportMode, WorkerSpec
from .encoders import encoder_dtype, encoder_dtypes
from .endpoint import WorkerEndpoint
from .errors import MmcopyError
from .metrics import Metrics
from .prewarm import PrewarmReport, prewarm
from .prewarm.readiness import Readiness
from .receive.group import ParallelOptions
from .receive.pending import PendingReceive
from .receive.receiver import Receiver
from .send.leases import Reservation, StreamingSend
from .send.sender import Sender
from .tensors import Inline, ShmHandle, TensorData

__all__ = [
    "Inline",
    "Metrics",
    "MmcopyError",
    "ParallelOptions",
    "PendingReceive",
    "PrewarmReport",
    "Readiness",
    "Receiver",
    "Reservation",
    "Sender",
    "ShmHandle",
    "StreamingSend",
    "TensorData",
    "TransportConfig",
    "TransportMode",
    "WorkerEndpoint",
    "WorkerSpec",
    "__version__",
    "encoder_dtype",
    "encoder_dtypes",
    "prewarm",
    "shm_namespace_id",
]

if _native.DEBUG_BUILD:
    _warnings.warn(
        "mmcopy's native module is a debug build: copies are many times slower (maturin develop --release)",
        RuntimeWarning,
        stacklevel=2,
    )
