"""What a rank tells the others before anything happens: a block of bytes of one fixed size. Pure functions.

Every exchange has that size, also those that follow a receive's first, so that ranks that are out of step with one
another exchange blocks all the same, and see that they are.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mmcopy import errors
from mmcopy.errors import MmcopyError, MmcopyTimeoutError, ParallelMismatchError, PeerFailedError
from mmcopy.tensors import ShmHandle, TensorData

from .plan import ParallelOptions

__all__ = [
    "BITS_A_BLOCK",
    "BLOCK_BYTES",
    "READY_STEP",
    "Digest",
    "Status",
    "check_agreement",
    "hash_items",
    "hash_options",
    "pack_bits",
    "raise_failure",
    "text_of",
    "unpack_bits",
]

BLOCK_BYTES = 1024
MAGIC = b"mmcopy-tp\x02"
_HEADER = struct.Struct("<10sBBHIIQQ16s16s")
BODY_BYTES = BLOCK_BYTES - _HEADER.size
BITS_A_BLOCK = BODY_BYTES * 8
_U64_MAX = 2**64 - 1
READY_STEP = 0xFFFF_FFFF
"""The exchange in which ranks say how reading went, before any collective; the last of a receive."""


class Status(enum.IntEnum):
    """How it has gone on a rank so far."""

    OK = 0
    """Every segment and lease is open."""
    PARTIAL = 1
    """Some segments or leases cannot be opened here; the body is a slice of the bits that say which can."""
    FAILED = 2
    """An error of another kind; the body is its class, its ``errno`` and its message."""


@dataclass(frozen=True, slots=True)
class Digest:
    """One rank's block. ``sequence`` counts the receives of a group, ``step`` the exchanges of one receive."""

    sequence: int
    step: int
    status: Status
    num_items: int
    nbytes: int
    items_hash: bytes
    options_hash: bytes
    is_denied: bool = False
    """What it cannot open is there, but not for it: a segment of another user's, a lease for other consumers."""
    body: bytes = b""

    @property
    def position(self) -> tuple[int, int]:
        """Ranks with the same position are in step."""
        return self.sequence, self.step

    def having(self, status: Status, body: bytes = b"") -> Digest:
        """The same, with how it went."""
        return replace(self, status=status, body=body)

    def encode(self) -> bytes:
        """The block; a body that is too long is cut."""
        body = self.body[:BODY_BYTES]
        header = _HEADER.pack(
            MAGIC,
            self.status,
            self.is_denied,
            len(body),
            self.step,
            self.num_items,
            self.sequence,
            min(self.nbytes, _U64_MAX),  # of a message that claims more nothing will be found
            self.items_hash,
            self.options_hash,
        )
        return (header + body).ljust(BLOCK_BYTES, b"\0")

    @classmethod
    def decode(cls, block: bytes) -> Digest:
        """Raises :class:`ParallelMismatchError` for what another version, or something else, has sent."""
        magic, status, denied, length, step, num_items, sequence, nbytes, items, options = _HEADER.unpack_from(block)
        if magic != MAGIC:
            raise ParallelMismatchError(
                f"a rank sent {magic!r}, want {MAGIC!r}: all ranks need the same mmcopy, and nothing else may use the "
                "CPU group at the same time"
            )
        body = block[_HEADER.size : _HEADER.size + length]
        return cls(sequence, step, Status(status), num_items, nbytes, items, options, bool(denied), body)


def hash_items(items: Sequence[TensorData], *further: object) -> bytes:
    """16 bytes that differ when names, offsets, shapes, dtypes, payload kinds or the order differ, or ``further``."""
    facts = [
        (item.dtype, item.shape, (payload.name, payload.offset) if isinstance(payload, ShmHandle) else None)
        for item, payload in ((item, item.payload) for item in items)
    ]
    return _hashed(facts, *further)


def hash_options(options: ParallelOptions) -> bytes:
    """16 bytes that differ when the options differ."""
    return _hashed(str(options.strategy), options.broadcast_min_bytes, options.scatter_min_bytes)


def check_agreement(digests: Sequence[Digest]) -> None:
    """Raise :class:`ParallelMismatchError`, the same on every rank, unless all were given the same."""
    first = digests[0]
    for rank, other in enumerate(digests):
        if other.options_hash != first.options_hash:
            raise ParallelMismatchError(f"ranks 0 and {rank} of the group have different ParallelOptions")
        if (other.num_items, other.nbytes) != (first.num_items, first.nbytes):
            raise ParallelMismatchError(
                f"rank 0 of the group was given {first.num_items} items of {first.nbytes} bytes, "
                f"rank {rank} {other.num_items} items of {other.nbytes} bytes"
            )
        if other.items_hash != first.items_hash:
            raise ParallelMismatchError(
                f"ranks 0 and {rank} of the group were each given {first.num_items} items of {first.nbytes} bytes, but "
                "with other names, shapes or dtypes, or in another order"
            )


def text_of(error: BaseException) -> bytes:
    """An error as a body: its class, its ``errno`` or 0, and its message."""
    number = getattr(error, "errno", None) or 0
    return f"{type(error).__name__}\0{number}\0{error}".encode(errors="replace")


def raise_failure(digests: Sequence[Digest], own: BaseException | None) -> None:
    """Raise the error of the lowest rank that failed, if one did, from this rank's ``own``: the same on every rank, of
    its class where that is one of mmcopy's, :class:`PeerFailedError` otherwise."""
    for rank, digest in enumerate(digests):
        if digest.status is Status.FAILED:
            # Not by way of a variable: with one the error would refer to itself, and keep what the callers hold.
            raise _error_of(rank, digest.body) from own


def _error_of(rank: int, body: bytes) -> MmcopyError:
    name, number, message = (*body.decode(errors="replace").split("\0", 2), "", "")[:3]
    kind = getattr(errors, name, None)
    if kind is MmcopyTimeoutError:
        what, _, message = message.partition(": ")
        return MmcopyTimeoutError(what, f"rank {rank} of the group: {message}")
    if not isinstance(kind, type) or not issubclass(kind, MmcopyError):
        return PeerFailedError(f"rank {rank} of the group: {name}: {message}")
    error: MmcopyError = kind(f"rank {rank} of the group: {message}")
    if isinstance(error, OSError) and number.isdecimal() and number != "0":
        error.errno = int(number)
    return error


def pack_bits(bits: Sequence[bool], part: int) -> bytes:
    """Slice number ``part`` of the bits, as a body."""
    return np.packbits(np.asarray(bits[part * BITS_A_BLOCK : (part + 1) * BITS_A_BLOCK], bool)).tobytes()


def unpack_bits(digests: Sequence[Digest], num_bits: int) -> tuple[bool, ...]:
    """The bits of one rank, from its digests of all slices; all true where it has everything."""
    if digests[0].status is not Status.PARTIAL:
        return (True,) * num_bits
    body = b"".join(digest.body for digest in digests)
    return tuple(bool(bit) for bit in np.unpackbits(np.frombuffer(body, np.uint8), count=num_bits))


def _hashed(*parts: object) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
