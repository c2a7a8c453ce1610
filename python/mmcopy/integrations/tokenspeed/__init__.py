"""In place of TokenSpeed's own receiving side: its two classes, with mmcopy's engine below.

:class:`ShmTensorHandle` is a tensor in shared memory, :class:`EncoderFeatureTransport` puts those of a batch onto the
device, and :func:`prepare_shm_features` comes before: every rank opens what it can, before any rank removes a name.
"""

from __future__ import annotations

from .handle import ShmTensorHandle
from .pending import DeviceFeatureItem
from .reach import prepare_shm_features
from .transport import EncoderFeatureTransport

__all__ = ["DeviceFeatureItem", "EncoderFeatureTransport", "ShmTensorHandle", "prepare_shm_features"]
