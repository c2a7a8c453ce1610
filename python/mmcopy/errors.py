"""Every exception mmcopy raises on purpose: one tree under :class:`MmcopyError`.

Where Python has a word for the condition the class is that standard class too, so ``except FileNotFoundError``
works. Messages carry the numbers: segment name, offset, bytes wanted, bytes found. The native module raises these
same classes.
"""

from __future__ import annotations

__all__ = [
    "ArrayTypeError",
    "CastError",
    "ClosedError",
    "ConfigError",
    "CopyPlanError",
    "DeviceError",
    "DeviceMemoryError",
    "InlineTooLargeError",
    "MissingDependencyError",
    "MmcopyError",
    "NoSpaceError",
    "PayloadError",
    "PrewarmError",
    "PrewarmTimeoutError",
    "ReceiveTimeoutError",
    "RepeatedHandleError",
    "SegmentExistsError",
    "SegmentIoError",
    "SegmentKindError",
    "SegmentNameError",
    "SegmentNotFoundError",
    "SegmentPermissionError",
    "SegmentSizeError",
    "UnknownDtypeError",
    "UnknownFamilyError",
    "UnsupportedPayloadError",
]


class MmcopyError(Exception):
    """Base of every error that mmcopy raises on purpose."""


class ConfigError(MmcopyError, ValueError):
    """A setting has a bad value; the message names the setting, the value and what is allowed."""


class MissingDependencyError(MmcopyError, ImportError):
    """An optional package is needed for this call; the message names the extra to install."""


class DeviceError(MmcopyError, RuntimeError):
    """The device does not exist, or CUDA refused."""


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has too little free memory; the message says how much was wanted and how much is free."""


class ClosedError(MmcopyError, RuntimeError):
    """The object was closed or cancelled, or belongs to the process that this one was forked from."""


class ArrayTypeError(MmcopyError, TypeError):
    """The object is no array that can be sent: wrong type, not in host memory, or not strided."""


class UnknownDtypeError(MmcopyError, ValueError):
    """A dtype name that is not in the closed table ``mmcopy.DTYPES``."""


class CastError(MmcopyError, ValueError):
    """A pair of dtypes that mmcopy does not cast between."""


class PayloadError(MmcopyError, ValueError):
    """The payload is missing, or its bytes are not shape x dtype."""


class CopyPlanError(MmcopyError, ValueError):
    """A table of pieces to copy that does not fit its sources and slots; the message says which piece and why."""


class UnsupportedPayloadError(MmcopyError, ValueError):
    """A kind of payload that mmcopy does not read (remote, for example nixl)."""


class InlineTooLargeError(MmcopyError, ValueError):
    """The bytes would travel inside the message, but exceed ``inline_max_bytes``."""


class RepeatedHandleError(MmcopyError, ValueError):
    """One request names the same segment twice; a segment has one tensor and one consumer."""


class ReceiveTimeoutError(MmcopyError, TimeoutError):
    """A receive, or a copy that is part of one, did not finish within its limit."""


class SegmentNameError(MmcopyError, ValueError):
    """Not a segment name: empty, ".", "..", with "/" or NUL, too long, or with a prefix that is not accepted."""


class SegmentSizeError(MmcopyError, ValueError):
    """The file is shorter than offset + nbytes, the sum overflows, or a peer cut the file while it was read."""


class SegmentNotFoundError(MmcopyError, FileNotFoundError):
    """No such segment: consumed already, taken back by its sender, or in another /dev/shm (ENOENT)."""


class SegmentPermissionError(MmcopyError, PermissionError):
    """The segment belongs to another user, or the directory is read-only (EACCES, EPERM, EROFS)."""


class SegmentExistsError(MmcopyError, FileExistsError):
    """A file of that name exists already (EEXIST)."""


class SegmentKindError(MmcopyError, OSError):
    """The name is a symbolic link, a FIFO, a directory or a device, not a regular file. It is left alone."""


class NoSpaceError(MmcopyError, OSError):
    """The shared-memory file system has too little room (ENOSPC, EDQUOT, ENOMEM); the message says how much is free."""


class SegmentIoError(MmcopyError, OSError):
    """Any other failure of the operating system; ``errno`` says which."""


class UnknownFamilyError(MmcopyError, LookupError):
    """No warm-up inputs are known for a model; the message names the function that adds a family."""


class PrewarmError(MmcopyError, RuntimeError):
    """A required prewarm failed: ``report`` says how far it came, ``__cause__`` is the encoder's own exception."""

    report: object = None


class PrewarmTimeoutError(PrewarmError, TimeoutError):
    """A required prewarm did not finish within its deadline."""
