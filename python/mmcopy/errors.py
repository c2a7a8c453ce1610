"""Every exception that mmcopy raises on purpose: one tree under :class:`MmcopyError`.

Where Python has a standard class for the condition, the class is that one too: ``except FileNotFoundError`` works.
Messages carry the numbers: segment name, offset, bytes wanted, bytes found. The native module raises these same
classes.
"""

from __future__ import annotations

__all__ = [
    "ArenaError",
    "ArenaFullError",
    "ArenaMemoryError",
    "ArrayTypeError",
    "ClosedError",
    "ConfigError",
    "DeviceError",
    "DeviceMemoryError",
    "DtypeError",
    "EndpointError",
    "EndpointGoneError",
    "EndpointRefusedError",
    "InlineTooLargeError",
    "LeaseError",
    "LeaseForgedError",
    "LeaseUnknownArenaError",
    "MissingDependencyError",
    "MmcopyError",
    "MmcopyTimeoutError",
    "NoSpaceError",
    "ParallelMismatchError",
    "PayloadError",
    "PeerFailedError",
    "PeerLostError",
    "PrewarmError",
    "SegmentError",
    "SegmentNotFoundError",
    "SegmentPermissionError",
    "SegmentSizeError",
    "UnknownFamilyError",
    "UnsupportedPayloadError",
    "WorkerUnreachableError",
]


class MmcopyError(Exception):
    """Base of every error that mmcopy raises on purpose."""


class ConfigError(MmcopyError, ValueError):
    """A setting has a bad value; the message names the setting, the value and what is allowed."""


class MissingDependencyError(MmcopyError, ImportError):
    """This call needs an optional package; the message names the extra to install."""


class MmcopyTimeoutError(MmcopyError, TimeoutError):
    """A wait reached its limit.

    Attributes:
        what: What was waited for, also at the start of the message:

            - ``"receive"``: a receive, or a copy that is part of one.
            - ``"send"``: the writing of a tensor that is sent while it is written.
            - ``"lease"``: a sender that has to write a lease further.
            - ``"endpoint"``: an answer from the other end of a socket, or the closing of the socket.
            - ``"arena"``: the closing of an arena.
            - ``"peer"``: a rank of the group that is late, or that had given up the receive when this rank came.
            - ``"prewarm"``: a required prewarm.
        report: The :class:`~mmcopy.PrewarmReport` of a prewarm; None otherwise.
    """

    report: object = None

    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.what = what

    def __reduce__(self) -> tuple[object, ...]:
        message = str(self).removeprefix(f"{self.what}: ")
        return type(self), (self.what, message), self.__dict__


class WorkerUnreachableError(MmcopyError, ConnectionError):
    """A worker was asked for its labels over gRPC and did not answer; the message has the status."""


class DeviceError(MmcopyError, RuntimeError):
    """The device does not exist, or CUDA returned an error."""


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has too little free memory; the message says how much was wanted and how much is free."""


class ClosedError(MmcopyError, RuntimeError):
    """The object was closed or cancelled, or belongs to the process that this one was forked from."""


class ArrayTypeError(MmcopyError, TypeError):
    """The object is not an array that can be sent: wrong type, not in host memory, or not strided."""


class DtypeError(MmcopyError, ValueError):
    """A dtype name that is not in ``mmcopy.tensors.DTYPES``, or a pair of dtypes that mmcopy does not cast between."""


class PayloadError(MmcopyError, ValueError):
    """The description of a tensor or of a copy is invalid.

    The payload is missing or has another size than shape x dtype, a segment's name is malformed, has a prefix that is
    not accepted or appears twice in one request, or a table of copies does not fit its sources and slots.
    """


class UnsupportedPayloadError(PayloadError):
    """A kind of payload that mmcopy does not read (remote, for example nixl)."""


class InlineTooLargeError(MmcopyError, ValueError):
    """The bytes would travel inside the message, but exceed ``inline_max_bytes``."""


class ParallelMismatchError(MmcopyError, ValueError):
    """The ranks of a group were given different items, another order or other options. Every rank raises it."""


class PeerLostError(MmcopyError, ConnectionError):
    """A rank of the group is gone, or a collective failed: the process groups have to be made anew."""


class PeerFailedError(MmcopyError, RuntimeError):
    """A receive failed on another rank of the group, with an error that is not one of mmcopy's."""


class SegmentError(MmcopyError, OSError):
    """The operating system refused something with a segment, or its name is not a regular file; ``errno`` says why.

    EEXIST: the name is taken. ELOOP, EISDIR, EINVAL, ENXIO, ENODEV: the name is a symbolic link, a directory, a FIFO, a
    socket or a device, which is left alone.
    """


class SegmentNotFoundError(SegmentError, FileNotFoundError):
    """No such segment: consumed, cancelled by its sender, or in another /dev/shm (ENOENT)."""


class SegmentPermissionError(SegmentError, PermissionError):
    """The segment belongs to another user, or the directory is read-only (EACCES, EPERM, EROFS)."""


class SegmentSizeError(MmcopyError, ValueError):
    """The file is shorter than offset + nbytes, the sum overflows, or the file was truncated while it was read."""


class NoSpaceError(SegmentError):
    """The shared-memory file system has too little room (ENOSPC, EDQUOT, ENOMEM); the message says how much is free."""


class EndpointError(MmcopyError, OSError):
    """A worker's socket could not be used.

    Its directory is not private to our user, its path is too long, the other end broke the protocol, or a system call
    failed; then ``errno`` says how.
    """


class EndpointGoneError(EndpointError, ConnectionError):
    """No worker listens at that path, or the other end of a connection has gone."""


class EndpointRefusedError(EndpointError, PermissionError):
    """One end refused the other: its user is not allowed, or the worker does not take what was offered."""


class ArenaError(MmcopyError, RuntimeError):
    """An arena could not be made or handed over, or a consumer is not connected to it; the message says why."""


class ArenaMemoryError(ArenaError, MemoryError):
    """An arena would take more memory than the control group or the machine has left; the message has the numbers."""


class ArenaFullError(ArenaError):
    """No room for a lease within the limit; the message says how much was wanted and how much is free."""


class LeaseError(MmcopyError, ValueError):
    """A lease cannot be read or written: it is over, was received before, or its sender aborted it or has gone."""


class LeaseForgedError(LeaseError):
    """A handle that does not belong to this consumer: a malformed name, another extent, or for other consumers."""


class LeaseUnknownArenaError(LeaseError):
    """A handle of an arena that is not mapped here: never handed over, or its sender has gone."""


class UnknownFamilyError(MmcopyError, LookupError):
    """No warm-up inputs are known for a model; the message names the function that adds a family."""


class PrewarmError(MmcopyError, RuntimeError):
    """A required prewarm failed: ``report`` says how far it came, ``__cause__`` is the encoder's own exception."""

    report: object = None
