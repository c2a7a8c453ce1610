"""Which gRPC status an error becomes.

SMG's gateway sends a request again, with the same handles, when a worker answers RESOURCE_EXHAUSTED,
DEADLINE_EXCEEDED, UNAVAILABLE, UNKNOWN, CANCELLED or DATA_LOSS before its first response (seen with smg 1.13.0: five
attempts). The segments are gone by then, so the second attempt would answer NOT_FOUND and hide the first error.
Hence a request that named segments never gets one of these codes by itself; one whose bytes came inside the message
does, since it can be repeated.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass

from mmcopy.errors import (
    ClosedError,
    DeviceMemoryError,
    DtypeError,
    MmcopyError,
    MmcopyTimeoutError,
    NoSpaceError,
    PayloadError,
    SegmentError,
    SegmentNotFoundError,
    SegmentPermissionError,
    SegmentSizeError,
    UnsupportedPayloadError,
)

__all__ = ["RETRIED", "Status", "StatusError", "handler_status", "receive_status"]

CODES: dict[type[Exception], str] = {
    SegmentNotFoundError: "NOT_FOUND",
    SegmentPermissionError: "PERMISSION_DENIED",
    SegmentSizeError: "INVALID_ARGUMENT",
    PayloadError: "INVALID_ARGUMENT",
    DtypeError: "INVALID_ARGUMENT",
    UnsupportedPayloadError: "UNIMPLEMENTED",
    DeviceMemoryError: "RESOURCE_EXHAUSTED",
    MemoryError: "RESOURCE_EXHAUSTED",
    NoSpaceError: "RESOURCE_EXHAUSTED",
    MmcopyTimeoutError: "DEADLINE_EXCEEDED",
    ClosedError: "UNAVAILABLE",
}
"""By the nearest class in the error's ancestry; INTERNAL for any other."""

_NOT_A_FILE = frozenset({errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENODEV, errno.ENXIO})
"""``errno`` of a :class:`SegmentError` for a name that is not a regular file, which is the client's error."""

RETRIED = frozenset({"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "UNKNOWN", "CANCELLED", "DATA_LOSS"})
"""What the gateway answers with another attempt."""

_NAMES = RETRIED | {
    "ABORTED",
    "ALREADY_EXISTS",
    "FAILED_PRECONDITION",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "UNIMPLEMENTED",
}

_MESSAGE_BYTES = 1024
"""A status travels in a header, whose room is limited: gRPC writes up to three characters for each byte there, and a
client answers RESOURCE_EXHAUSTED itself where all headers take more than 8 KiB."""


class StatusError(MmcopyError):
    """What a handler raises to answer with a status of its choice, by its gRPC name: ``StatusError("ABORTED", why)``.

    A code in ``RETRIED`` becomes INTERNAL, with the code in front of the message, when the request named segments: they
    are consumed, so the gateway's second attempt could only fail, and would hide this error.
    """

    def __init__(self, code: str, message: str) -> None:
        if code not in _NAMES:
            raise ValueError(f"no gRPC error status is called {code!r}; known: {', '.join(sorted(_NAMES))}")
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Status:
    """A gRPC code by name, and the message that goes with it."""

    code: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", _cut(self.message))


def _cut(message: str) -> str:
    """``message`` as Unicode of limited length; lone surrogates, as in names of files, are written out."""
    encoded = message.encode("utf-8", "backslashreplace")
    if len(encoded) <= _MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: _MESSAGE_BYTES - 3].decode("utf-8", "ignore") + "..."


def receive_status(error: Exception, *, has_segments: bool) -> Status:
    """The status of a request whose tensors could not be received."""
    if isinstance(error, StatusError):
        return _chosen(error, has_segments)
    if type(error) is SegmentError:
        code = "INVALID_ARGUMENT" if error.errno in _NOT_A_FILE else "INTERNAL"
    else:
        code = next((CODES[kind] for kind in type(error).__mro__ if kind in CODES), "INTERNAL")
    if has_segments and code in RETRIED:
        code = "INTERNAL"
    return Status(code, f"{type(error).__name__}: {error}")


def handler_status(error: BaseException, *, has_segments: bool) -> Status:
    """The status of a request whose handler raised."""
    if isinstance(error, StatusError):
        return _chosen(error, has_segments)
    code = "UNIMPLEMENTED" if isinstance(error, NotImplementedError) else "INTERNAL"
    return Status(code, f"the handler raised {type(error).__name__}: {error}")


def _chosen(error: StatusError, has_segments: bool) -> Status:
    if has_segments and error.code in RETRIED:
        return Status("INTERNAL", f"{error.code}: {error}")
    return Status(error.code, str(error))
