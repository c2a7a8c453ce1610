"""Every exception mmcopy raises on purpose: one tree under :class:`MmcopyError`.

Where Python has a word for the condition the class is that standard class too, so ``except FileNotFoundError``
works. Messages carry the numbers: segment name, offset, bytes wanted, bytes found. The native module raises these
same classes.
"""

from __future__ import annotations

__all__ = [
    "ArenaConsumerError",
    "ArenaError",
    "ArenaFullError",
    "ArenaMemoryError",
    "ArrayTypeError",
    "CastError",
    "ClosedError",
    "ConfigError",
    "CopyPlanError",
    "DeviceError",
    "DeviceMemoryError",
    "EndpointDirectoryError",
    "EndpointGoneError",
    "EndpointIoError",
    "EndpointProtocolError",
    "EndpointRefusedError",
    "EndpointTimeoutError",
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
    "MissingDependencyError",
    "MmcopyError",
    "NoSpaceError",
    "ParallelMismatchError",
    "PayloadError",
    "PeerFailedError",
    "PeerLostError",
    "PeerTimeoutError",
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
    "SendTimeoutError",
    "UnknownDtypeError",
    "UnknownFamilyError",
    "UnsupportedPayloadError",
    "WorkerUnreachableError",
]


class MmcopyError(Exception):
    """Base of every error that mmcopy raises on purpose."""


class ConfigError(MmcopyError, ValueError):
    """A setting has a bad value; the message names the setting, the value and what is allowed."""


class MissingDependencyError(MmcopyError, ImportError):
    """An optional package is needed for this call; the message names the extra to install."""


class WorkerUnreachableError(MmcopyError, ConnectionError):
    """A worker was asked for its labels over gRPC and did not answer; the message has the status."""


class DeviceError(MmcopyError, RuntimeError):
    """The device does not exist, or CUDA refused."""


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has too little free memory; the message says how much was wanted and how much is free."""


class ClosedError(MmcopyError, RuntimeError):
    """The object was closed or cancelled, or belongs to the process that this one was forked from."""


class ArrayTypeError(MmcopyError, TypeError):
    """The object is no array that can be sent: wrong type, not in host memory, or not strided."""


class UnknownDtypeError(MmcopyError, ValueError):
    """A dtype name that is not in the closed table ``mmcopy.tensors.DTYPES``."""


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


class SendTimeoutError(MmcopyError, TimeoutError):
    """A tensor that is sent while it is written was not written within its limit."""


class ParallelMismatchError(MmcopyError, ValueError):
    """The ranks of a group were given different items, another order or other options; raised on every rank alike."""


class PeerTimeoutError(ReceiveTimeoutError):
    """A rank of the group did not take part in a receive within the limit, or had given it up when this one came."""


class PeerLostError(MmcopyError, ConnectionError):
    """A rank of the group is gone, or a collective failed: the process groups have to be made anew."""


class PeerFailedError(MmcopyError, RuntimeError):
    """A receive failed on another rank of the group, with an error that is none of mmcopy's own."""


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


class EndpointDirectoryError(MmcopyError, ValueError):
    """The directory of a worker's socket is not private to us, or its path is too long for a unix socket."""


class EndpointGoneError(MmcopyError, ConnectionError):
    """No worker listens at that path, or the other end of a connection has gone."""


class EndpointRefusedError(MmcopyError, PermissionError):
    """One end refused the other: its user is not allowed, or the worker does not take what was offered."""


class EndpointProtocolError(MmcopyError, ValueError):
    """The other end sent a frame that is truncated, unknown, too long, or without the descriptors that belong to it."""


class EndpointTimeoutError(MmcopyError, TimeoutError):
    """The other end did not answer within the limit, or a socket did not close within it."""


class EndpointIoError(MmcopyError, OSError):
    """Any other failure of the operating system with a socket or its directory; ``errno`` says which."""


class ArenaError(MmcopyError, RuntimeError):
    """An arena could not be made or handed over; the message says what the system or the worker said."""


class ArenaMemoryError(ArenaError, MemoryError):
    """More memory than the control group or the machine has left; the message has the numbers."""


class ArenaConsumerError(ArenaError):
    """A consumer that has gone, or never had the arena: hand it over again."""


class ArenaFullError(ArenaError):
    """No room for a lease within the limit; the message says how much was wanted and how much is free."""


class LeaseError(MmcopyError, ValueError):
    """A lease that cannot be read, or not in this way."""


class LeaseForgedError(LeaseError):
    """A handle that no arena made: a malformed name, another range, or for another consumer."""


class LeaseUnknownArenaError(LeaseError):
    """A handle of an arena that is not mapped here: never handed over, or its sender has gone."""


class LeaseStaleError(LeaseError):
    """A handle of a lease that is over: its block is another lease's, or its sender has taken it back."""


class LeaseRepeatedError(LeaseError):
    """A handle that this consumer has received already."""


class LeaseAbortedError(LeaseError):
    """The sender gave the lease up while it wrote."""


class LeaseOwnerGoneError(LeaseError, ConnectionError):
    """The sender died, or closed its connection, before it had written what was waited for."""


class LeaseBusyError(LeaseError):
    """The lease is being written, or was written already."""


class LeaseTimeoutError(MmcopyError, TimeoutError):
    """The sender did not write far enough within the limit, or an arena did not close within it."""


class UnknownFamilyError(MmcopyError, LookupError):
    """No warm-up inputs are known for a model; the message names the function that adds a family."""


class PrewarmError(MmcopyError, RuntimeError):
    """A required prewarm failed: ``report`` says how far it came, ``__cause__`` is the encoder's own exception."""

    report: object = None


class PrewarmTimeoutError(PrewarmError, TimeoutError):
    """A required prewarm did not finish within its deadline."""
