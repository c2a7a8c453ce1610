"""Segments in shared memory, their names and owners, and copying with a cast. Built from ``rust/python/``.

Buffers are taken through the buffer protocol: C-contiguous, of any format, exported for the length of one call (those
of a :class:`CopyJob` until it is over). A
read-only buffer where a writable one is needed, and one that is not contiguous, are a ``BufferError``. A call that
touches at least :data:`GIL_RELEASE_BYTES` bytes releases the GIL. ``num_threads`` is the most threads that one call
uses, its own among them, and at least 1 (else :class:`ConfigError`); small copies use fewer.
"""

import os
import pathlib
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self, SupportsIndex, TypeAlias, TypedDict, final, type_check_only

from typing_extensions import Buffer

from mmcopy.arrays import FlatArray
from mmcopy.errors import MmcopyError
from mmcopy.tensors import ShmHandle, TensorData

__all__ = [
    "CASTS",
    "DEBUG_BUILD",
    "DTYPES",
    "GIL_RELEASE_BYTES",
    "LEASE_PREFIX",
    "Arena",
    "ArenaMap",
    "ChunkTable",
    "CopyJob",
    "CopyPool",
    "Extents",
    "KeptLeases",
    "LaterWrite",
    "Lease",
    "LeaseWriter",
    "Process",
    "Request",
    "RequestOpener",
    "Segment",
    "SegmentOwner",
    "SenderLink",
    "Sweeper",
    "WorkerEndpoint",
    "__version__",
    "available_cores",
    "cast_into",
    "copy_into",
    "is_lease_name",
    "lease_arena_id",
    "memory_budget",
    "shm_namespace_id",
    "start_copy_threads",
    "sweep",
    "unlink_segment",
    "validate_segment_name",
    "write_segment",
]

__version__: Final[str]
"""Version of the package, from Cargo.toml."""
DEBUG_BUILD: Final[bool]
"""Whether this module was compiled without optimisation: right, and many times slower."""
DTYPES: Final[dict[str, int]]
"""The closed table: a dtype's name (torch's, without the prefix) to its bytes an element."""
CASTS: Final[frozenset[tuple[str, str]]]
"""The pairs (from, to) that :func:`cast_into` and :func:`write_segment` cast between."""
GIL_RELEASE_BYTES: Final[int]
"""A call that touches at least this many bytes releases the GIL."""

LEASE_PREFIX: Final[str]
"""What the names of leases begin with. No segment's name does."""

@type_check_only
class MemoryBudget(TypedDict):
    """Bytes; None where the kernel does not say, or nothing limits."""

    available: int | None
    """The least that the machine and every control group of this process up to the root have left."""
    limited_by: str | None
    """Which of them that is."""
    machine: int | None
    """MemAvailable of the machine."""
    limit: int | None
    """The limit of the control group that has least left."""
    used: int | None
    """What that group uses, without file pages that were not used lately: the kernel gives those up first."""

def shm_namespace_id(shm_dir: str | os.PathLike[str] = "/dev/shm") -> str:
    """Which shared-memory file system ``shm_dir`` is on: ``"<boot id>:<st_dev>"``, ``""`` when unknown.

    Two processes with equal, non-empty ids see each other's files, also in different containers.
    """

def memory_budget(proc: str | os.PathLike[str] = "/proc") -> MemoryBudget:
    """What limits this process's memory, read as an arena's size is checked against it. Never raises."""

def available_cores() -> int:
    """Cores that this process can keep busy: its affinity and its control group's quota, rounded down, at least 1."""

def validate_segment_name(name: str) -> str:
    """``name`` without ``/`` in front, when it is one path component of at most 255 bytes without NUL.

    One that begins with ``mmcopy-`` has to be a segment's. Raises :class:`PayloadError` otherwise.
    """

def write_segment(
    shm_dir: str | os.PathLike[str],
    name: str,
    src: Buffer,
    *,
    src_dtype: str | None = None,
    dst_dtype: str | None = None,
    num_threads: int = 1,
) -> int:
    """Create a segment (mode 0600, exactly as long as its contents), fill it from ``src``, and return its bytes.

    With ``src_dtype`` and ``dst_dtype`` the elements are cast on the way. Blocks until the segment is complete; ``src``
    may be reused right after. On any error no file is left, and a full file system is never a SIGBUS.

    Raises :class:`SegmentError` (that file is left alone), :class:`NoSpaceError`,
    :class:`SegmentPermissionError`, :class:`SegmentNotFoundError` (no such directory),
    :class:`PayloadError` (the name, or ``src`` is not whole elements) and :class:`DtypeError` (an unknown name, no such
    pair, or only one of the two dtypes).
    """

def unlink_segment(shm_dir: str | os.PathLike[str], name: str, owner: Process) -> bool:
    """Remove a segment by name, for the process ``owner`` that takes back its own. False when it is gone already.

    Raises :class:`ClosedError` in every other process, :class:`SegmentError` for what is not a regular file,
    :class:`SegmentPermissionError`, :class:`PayloadError` and
    :class:`SegmentError`.
    """

@final
class Segment:
    """An open segment, to be read and removed by its consumer.

    A context manager: leaving it closes the file and does not remove the name. Several threads may use one at once; a
    ``close`` lets a ``read_into`` of another thread finish. ``name``, ``file_nbytes`` and ``uid`` stay readable.
    """

    @property
    def name(self) -> str:
        """Name of the segment, without ``/`` in front."""

    @property
    def file_nbytes(self) -> int:
        """Bytes of the file when it was opened."""

    @property
    def uid(self) -> int:
        """User id of the file's owner."""

    @staticmethod
    def open(shm_dir: str | os.PathLike[str], name: str) -> Segment:
        """Open a segment for reading. Never blocks, also not on a FIFO, and follows no symbolic link.

        Raises :class:`SegmentNotFoundError`, :class:`SegmentPermissionError`,
        :class:`SegmentError` (not a regular file, among others) and :class:`PayloadError`.
        """

    def check(self, offset: SupportsIndex, nbytes: SupportsIndex) -> None:
        """Raise :class:`SegmentSizeError` unless the range is inside the file as it was opened.

        Negative numbers and those of 2**64 and more are outside too.
        """

    def read_into(self, dst: Buffer, offset: SupportsIndex, *, num_threads: int = 1) -> None:
        """Fill ``dst`` with the bytes from ``offset`` on. Blocks until every byte is there.

        Raises :class:`SegmentSizeError` when the range is not inside the file, or when a peer cut the
        file while it was read (never SIGBUS; ``dst`` holds anything then), and
        :class:`SegmentError`.
        """

    def unlink(self) -> bool:
        """Remove the name, at most once and only while it still names this very file.

        True when this call removed it, False when it was gone already. The open file can still be read. Raises
        :class:`SegmentPermissionError` and :class:`SegmentError`.
        """

    def close(self) -> None:
        """Close the file; the name stays. May be called again.

        Every other method raises :class:`ClosedError` from then on. The memory of a removed segment is
        freed here, without the GIL when it is big.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...

@final
class SegmentOwner:
    """A sender's identity on this host: a lock file that is locked as long as this process lives, and unique names.

    A child after ``os.fork`` has no part in it, and does not keep it alive: there ``next_name`` and ``write`` raise,
    and ``close`` removes nothing.
    """

    def __new__(cls, shm_dir: str | os.PathLike[str]) -> Self:
        """Create and lock ``mmcopy-<instance_id>.lock`` (mode 0600) in ``shm_dir``.

        Raises :class:`SegmentNotFoundError` (no such directory),
        :class:`SegmentPermissionError`, :class:`NoSpaceError` and
        :class:`SegmentError`.
        """

    @property
    def instance_id(self) -> str:
        """The random part of this sender's names: 16 hexadecimal digits."""

    def next_name(self) -> str:
        """A name that no segment has had before: ``mmcopy-<instance_id>-<number>``. What comes next cannot be foreseen.

        Raises :class:`ClosedError` after :meth:`close`, after :meth:`forget` and in a forked child.
        """

    def write(
        self, src: Buffer, *, src_dtype: str | None = None, dst_dtype: str | None = None, num_threads: int = 1
    ) -> tuple[str, int]:
        """:func:`write_segment` under a name that is free; the name, and the segment's bytes.

        Raises :class:`ClosedError` as :meth:`next_name`, and what :func:`write_segment` raises. What the handler of a
        signal raises meanwhile is raised, with no segment left.
        """

    def close(self) -> None:
        """Remove the lock file and release the lock. May be called again.

        Segments on their way stay for their consumers; a sweep removes them once they are old.
        """

    def forget(self) -> None:
        """Close the descriptor and remove nothing, as when the process is killed. May be called again."""

def sweep(shm_dir: str | os.PathLike[str], *, orphan_grace_s: float = 60.0) -> tuple[list[str], int, list[str]]:
    """Remove segments of senders that are gone; the names removed, the sum of their bytes, and what failed, in words.

    The segments of a sender that died go at once, and its lock file with them (which is not counted). A segment whose
    sender closed properly, and that was not consumed, goes when it was last written at least ``orphan_grace_s`` seconds
    ago (infinity: never). Nothing else is touched: no other names, no file that is not regular, none of other users
    unless we are root. Only the lock tells who is alive, never a process id, and only for segments of its own user.
    Several sweeps may run at once; each holds two descriptors at most.

    Raises :class:`SegmentNotFoundError`, :class:`SegmentPermissionError` or
    :class:`SegmentError` when ``shm_dir`` cannot be listed, and
    :class:`ConfigError` for a number of seconds that is negative or NaN.
    """

@final
class Sweeper:
    """Sweeps ``shm_dir`` now and then, each time on a thread that ends with it, so that nothing waits for it."""

    def __new__(cls, shm_dir: str | os.PathLike[str], *, every_s: float = 60.0) -> Self: ...
    def sweep_if_due(self) -> tuple[int, int, int, str] | None:
        """Start a :func:`sweep` when one is due: the first at once, each further one ``every_s`` later. Never blocks.

        Returns what sweeps that have ended did since the last call: segments removed, their bytes, failures, and the
        last of those in words; None for nothing. Does nothing in a forked child.
        """

def start_copy_threads(num_threads: int) -> int:
    """Start threads that copy for the whole process until there are ``num_threads``, 256 at most; how many there are.

    They serve ``copy_into``, ``cast_into``, :class:`LeaseWriter`, ``write_segment`` and :class:`Segment`, sleep while
    there is no work, and stay until the process ends. Where the system refuses some there are fewer, a later copy tries
    again, and callers do the rest of their copies themselves. A copy that asks for more threads than there are starts
    them. A forked child has none. Never raises for a refused thread; :class:`ConfigError` for a number below 1.
    """

def copy_into(src: Buffer, dst: Buffer, *, num_threads: int = 1) -> None:
    """Copy ``src`` to ``dst``, which has the same number of bytes.

    Blocks until every byte is there; both may be reused right after. The two may overlap. Raises
    :class:`PayloadError` when the lengths differ.
    """

def cast_into(src: Buffer, src_dtype: str, dst: Buffer, dst_dtype: str, *, num_threads: int = 1) -> None:
    """Cast the elements of ``src`` into ``dst``.

    Rounds to nearest, ties to even; NaN stays NaN, infinities and subnormals are kept. Equal dtypes are a plain copy.
    Blocks until every element is there; both may be reused right after.

    Raises :class:`DtypeError` for a pair outside :data:`CASTS`,
    :class:`DtypeError` for a name outside :data:`DTYPES`, and
    :class:`PayloadError` when ``dst`` has the wrong length, ``src`` is not whole elements, or a cast's
    two buffers share memory.
    """

@final
class CopyPool:
    """Threads that copy a request's items into a ring of slots. They sleep while there is nothing to do.

    Several jobs at once share the threads by turns, a chunk each. Several threads may use one pool. After ``os.fork``
    the child's pool and jobs raise :class:`ClosedError`. Dropping the pool closes it.
    """

    def __new__(cls, num_threads: int) -> Self:
        """Start ``num_threads`` threads, at least 1, besides those that wait for jobs and copy as well.

        Raises :class:`ConfigError`, also when the system refuses so many.
        """

    @property
    def num_threads(self) -> int:
        """Threads that it was made with."""

    def start(self, request: Request, slots: Sequence[Buffer], table: ChunkTable) -> CopyJob:
        """Take a job on; nothing is copied before :meth:`CopyJob.permit`. Chunk ``i`` goes into
        ``slots[i % len(slots)]``.

        Blocks, without the GIL, while the senders of staged leases are still writing them. The job keeps the slots
        exported and the staged items open until it is over, also when the request is closed meanwhile.

        Raises, before anything is copied, :class:`PayloadError` (a fill that does not fit),
        :class:`SegmentSizeError` (a fill that is not inside its segment as it was opened), :class:`LeaseError`,
        :class:`MmcopyTimeoutError` (a sender), ``BufferError`` and :class:`ClosedError` (the pool).
        """

    def copy_now(self, request: Request, slot: Buffer, table: ChunkTable) -> None:
        """Copy a table of one chunk into ``slot`` on the calling thread; no other thread has part in it.

        For a few hundred KiB at most: handing those over takes longer than copying them. Blocks until every byte is
        there; items and slot may be reused right after. Works on a closed pool.

        Raises as :meth:`start` does, and the error of the copy; then the slot holds anything.
        """

    def wake(self, num_threads: int) -> None:
        """Wake up to ``num_threads`` threads for a job that starts within microseconds. Never blocks.

        Waking a thread that sleeps takes about 50 us. They sleep again when no job comes.
        """

    def close(self, timeout_s: float) -> None:
        """Refuse further jobs, and block until the threads have ended, each after the chunk that it copies.

        Jobs are not cancelled: the rest of one is copied by the thread that waits for it. May be called again. Raises
        :class:`MmcopyTimeoutError`.
        """

@final
class CopyJob:
    """Chunks that are being copied; made by :meth:`CopyPool.start`.

    It is over when all chunks are in their slots, when a :meth:`wait` raised an error of the copy, or after
    :meth:`cancel`; from then on it touches neither sources nor slots. Its slots and items are released by the
    first :meth:`wait`, :meth:`is_done` or :meth:`cancel` that finds it over. Dropping it cancels it.
    """

    @property
    def num_chunks(self) -> int:
        """Number of chunks."""

    def permit(self, upto: int) -> None:
        """Let the chunks below ``upto`` start: nothing reads or writes their slots any more.

        The number of permitted chunks is 0 at the start and only rises; more than :attr:`num_chunks` means all. Never
        blocks. Chunk ``i + len(slots)`` overwrites chunk ``i``.
        """

    def wait(self, index: int, timeout_s: float) -> int:
        """Block, without the GIL, until chunk ``index`` is in its slot; how many in a row are, this one first.

        Meanwhile this thread copies chunks of the job that are permitted and not begun, so a job of one
        chunk needs no other thread, and the limit can be passed by the time one chunk takes. A limit of 0 or less
        copies what can be copied and does not sleep.

        Raises the first error of any chunk (:class:`SegmentSizeError`,
        :class:`SegmentError`), after which the job is over;
        :class:`MmcopyTimeoutError`, after which it goes on; :class:`ClosedError` when it
        was cancelled before this chunk was there, and in a forked child; :class:`PayloadError` for a
        chunk that there is not.
        """

    def is_done(self, index: int) -> bool:
        """Whether chunk ``index`` is in its slot. Never blocks.

        When it is not, threads of the pool are asked to go on, so polling gets there without :meth:`wait` as long as
        the pool is open. An error is raised by :meth:`wait` alone.
        """

    def cancel(self) -> None:
        """Start no further chunk, and block until those that run have ended. May be called again.

        Chunks that are there stay. Does nothing to a job that is over, and nothing in a forked child.
        """

@final
class Process:
    """A process, distinguished from its forked children also where a child has the number of its parent.

    Compares by value and can be hashed.
    """

    @staticmethod
    def current() -> Process:
        """The process that calls this."""

    def is_current(self) -> bool:
        """Whether the calling process is still this one, and not a child that was forked from it."""

    @property
    def pid(self) -> int:
        """Its number in its own pid namespace: for messages, not an identity."""

    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

_GivenBack: TypeAlias = tuple[int, int, int, list[tuple[str, MmcopyError]]]
"""Items that are in shared memory no more because of a call, segments unlinked, leases released, and what could not be
given back, with the reason."""

@final
class RequestOpener:
    """Opens the items of requests, and gives back what is not received. Thread-safe."""

    def __new__(
        cls,
        shm_dir: str | os.PathLike[str],
        accept_prefixes: Sequence[str],
        endpoint: WorkerEndpoint | None,
        *,
        timeout_s: float,
    ) -> Self:
        """Segments are opened in ``shm_dir`` when their names begin with one of ``accept_prefixes``, leases when their
        arenas came to ``endpoint``. ``timeout_s`` limits how long a request waits for senders that are still writing.
        """

    def request(self, items: Sequence[TensorData]) -> Request:
        """A request with nothing open yet. Inline bytes stay exported as long as it, or a job of it, exists."""

    def release(self, items: Sequence[TensorData | ShmHandle]) -> _GivenBack:
        """Unlink the segments and release the leases that ``items`` name, unread. What cannot be opened is left
        alone."""

    @property
    def pending(self) -> int:
        """Segments that were closed and are not freed yet."""

    def join(self, timeout_s: float) -> bool:
        """Block until all that was closed is freed; False when the limit came first."""

@final
class Request:
    """The items of one receive, and what is open of them. Call :meth:`close` in any case."""

    def open_all(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Open every item: all segments exist and are long enough, all leases are claimed. Does not block for senders.
        Returns :meth:`opened`.

        Raises the error of the first item that cannot be opened: a :class:`SegmentError` or :class:`LeaseError`, or
        :class:`PayloadError` (a name that is invalid, not accepted, or there twice).
        """

    def open_reachable(self) -> list[tuple[int, MmcopyError]]:
        """Open what can be opened here; the index and the error of each item whose segment is not here or may not be
        opened, whose arena is not mapped here, or whose lease is not for this consumer. Raises any other error.
        Unlinks nothing."""

    def open_attached(self, segments: Sequence[Segment | None]) -> list[int]:
        """Take over open segments, one for each item that is not inline; the indices of the items without one."""

    def opened(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The bytes of each item that is open, in order; and the indices, among these, of the leases."""

    def totals(self, items: Sequence[int] | None = None) -> list[tuple[str, int, int]]:
        """How many tensors and bytes of these items (None: of all) come by each path: (path, tensors, bytes)."""

    def select(self, parts: Sequence[int | TensorData]) -> Request:
        """A request of these alone: open items by their indices, and inline tensors. What is open stays this one's to
        close."""

    def arenas(self) -> list[ArenaMap]:
        """The arenas of the open leases, each once."""

    def leases_in(self, arenas: Sequence[ArenaMap]) -> tuple[int, ...]:
        """Indices of the open leases of these arenas."""

    def runs(
        self, extents: Extents, addresses: Sequence[int], *, max_gap_bytes: int, part_bytes: int
    ) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int, int]]]:
        """The copies ``(dest, source, nbytes)`` of what is written of ``extents``, all of them leases, to bases at
        ``addresses``; and the parts ``(item, start, nbytes, dest)`` that are still being written, for :meth:`follow`.

        Copies that follow each other on both sides, with the same gap of at most ``max_gap_bytes``, are one; the gap is
        copied, too. None reads from two parts of ``part_bytes`` of the address space.

        From here on these leases stay claimed until :meth:`flags_written` or :meth:`keep`: a copy may read them. Never
        blocks. Raises :class:`LeaseError`, and then keeps none.
        """

    def follow(
        self, part: tuple[int, int, int, int], least: int, *, part_bytes: int
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Block, without the GIL, until ``least`` bytes of a part are written; how many can be copied, and the copies.

        Raises :class:`LeaseError` and, at the request's limit, :class:`MmcopyTimeoutError`.
        """

    def flags(self) -> list[tuple[int, int]]:
        """Where the 32-bit words are that end the leases which copies read, and what to write: (address, value)."""

    def flags_written(self, count: int) -> None:
        """A stream writes the first ``count`` of :meth:`flags`: nothing else releases these leases any more."""

    def keep(self) -> KeptLeases:
        """The leases that copies read and whose flags no stream writes."""

    def take_lease(self, index: int) -> Lease:
        """An open lease that is released when the result, and every buffer of it, is gone. Blocks, without the GIL,
        until its sender has written it. Raises :class:`LeaseError`, :class:`MmcopyTimeoutError`, :class:`PayloadError`
        (not a lease)."""

    def read(self, extents: Extents, bases: Sequence[Buffer | tuple[int, int]], *, num_threads: int) -> None:
        """Put ``extents`` into host memory, each base a writable buffer or the address and bytes of memory that stays
        valid. Senders that are still writing are followed. Blocks until all is there, without the GIL when it is much.

        Raises :class:`PayloadError` (an extent that does not fit; nothing is written), :class:`SegmentError`,
        :class:`LeaseError`, :class:`MmcopyTimeoutError`; then the bases hold anything.
        """

    @property
    def has_names(self) -> bool:
        """Whether a segment still has its name."""

    def unlink(self) -> _GivenBack:
        """Remove the names of the segments, once. What is open stays readable."""

    def close(self, release_rest: bool) -> _GivenBack:
        """Unlink what still has a name, release the leases and close the segments; with ``release_rest`` also give back
        the items that are not open. Leases that copies read stay."""

@final
class KeptLeases:
    """Leases that copies read. Dropping this releases none."""

    def __len__(self) -> int: ...
    def release(self) -> _GivenBack:
        """Release them: the copies have ended."""

@final
class Extents:
    """Extents of one layout, for native calls."""

    def __new__(cls, extents: Sequence[tuple[int, int, int, int, int, int]]) -> Self:
        """Each is ``(source, base, window, source_start, dest_start, nbytes)``, as :class:`mmcopy.receive.plan.Extent`;
        the window is not used."""

    def __len__(self) -> int: ...

@final
class ChunkTable:
    """What fills the slots of a request's chunks."""

    def __new__(cls, staged: Sequence[int], fills: Sequence[tuple[int, int, int, int, int]]) -> Self:
        """``staged`` are indices of open items. A fill is ``(chunk, source, source_start, slot_start, nbytes)``: that
        many bytes of item ``staged[source]``, from ``source_start`` on, go to ``slot_start`` of chunk ``chunk``'s slot.
        Fills come in the order of their chunks, which are counted from 0 without gaps.

        Raises :class:`PayloadError` for numbers outside 0 to 2**64 - 1.
        """

    def __len__(self) -> int: ...

@final
class WorkerEndpoint:
    """A socket that senders on this host connect to, served by one thread. See :class:`mmcopy.WorkerEndpoint`."""

    def __new__(
        cls,
        directory: str | os.PathLike[str],
        *,
        shm_dir: str | os.PathLike[str],
        accept_prefixes: Sequence[str],
        allowed_uids: Sequence[int],
        max_links: int,
        max_arenas: int,
        max_arena_bytes: int,
        hello_timeout_s: float,
    ) -> Self:
        """Create the directory when it is missing, remove dead workers' sockets of our user, and listen.

        Raises :class:`EndpointError` and
        :class:`ConfigError`.
        """

    @property
    def path(self) -> pathlib.Path:
        """Path of the socket, which a sender needs to connect."""

    @property
    def instance_id(self) -> str:
        """The random part of the path: 16 hexadecimal digits."""

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""

    def statistics(self) -> dict[str, int | str]:
        """What has happened: links, accepted, refused_users, faults, last_fault, swept.

        Raises :class:`ClosedError` in a forked child.
        """

    def arenas(self) -> list[ArenaMap]:
        """The arenas of all senders that are connected, the newest last."""

    def find_arena(self, instance_id: str) -> ArenaMap | None:
        """The arena of these 16 hexadecimal digits while its sender is connected."""

    def wait_arena(self, seen: int, timeout_s: float) -> int:
        """Block, without the GIL, until more than ``seen`` arenas were handed over since the start; how many were.

        At the limit it returns ``seen`` or less. Raises :class:`ClosedError` in a forked child.
        """

    def close(self, timeout_s: float) -> None:
        """Remove the socket, end every connection and the thread, and block for the thread. May be called again.

        Does nothing in a forked child. Raises :class:`MmcopyTimeoutError`.
        """

@final
class SenderLink:
    """A sender's connection to a worker's endpoint. See :class:`mmcopy.endpoint.SenderLink`."""

    @property
    def path(self) -> pathlib.Path:
        """Path of the worker's socket."""

    @property
    def worker_id(self) -> str:
        """The random part of the worker's path: 16 hexadecimal digits."""

    @staticmethod
    def connect(path: str | os.PathLike[str], *, timeout_s: float, allowed_uids: Sequence[int]) -> SenderLink:
        """Connect and say Hello. Blocks without the GIL.

        Raises :class:`EndpointGoneError`, :class:`EndpointRefusedError`,
        :class:`EndpointError` (a path too long, among others) and :class:`MmcopyTimeoutError`.
        """

    def probe(self, shm_dir: str | os.PathLike[str], *, timeout_s: float) -> tuple[bool, str]:
        """Whether the worker can read what we write to ``shm_dir``, and what happened in words.

        Writes 32 random bytes as a segment, lets the worker read them, and removes it. Blocks without the GIL. Raises
        :class:`EndpointGoneError`, :class:`MmcopyTimeoutError`,
        :class:`EndpointError` and :class:`ClosedError`.
        """

    @property
    def closed(self) -> bool:
        """Whether it was closed, the worker has gone, or it belongs to the process that this one was forked from."""

    def close(self) -> None:
        """End the connection, and calls that wait in other threads. Never blocks. May be called again."""

def is_lease_name(name: str) -> bool:
    """Whether a handle's name is meant as a lease's. Reading it may still raise."""

def lease_arena_id(name: str, offset: SupportsIndex, nbytes: SupportsIndex, owner_id: str) -> str:
    """The random part of the arena that a lease's handle names, for :meth:`WorkerEndpoint.find_arena`.

    Raises :class:`LeaseForgedError`.
    """

@final
class Arena:
    """Memory that a sender and its workers on the host map once and use again and again.

    One per sender, for all its workers. Leases go into :class:`~mmcopy.ShmHandle` (name, offset, nbytes, owner_id). A
    thread gives the blocks back of leases that all consumers have released, or whose consumers have gone; it sleeps
    while no lease is out. Methods may be called from several threads. In a forked child everything raises
    :class:`ClosedError`.
    """

    def __new__(
        cls,
        data_nbytes: int,
        *,
        num_leases: int | None = None,
        huge_pages: str = "transparent",
        num_threads: int = 1,
        unclaimed_timeout_s: float = 60.0,
    ) -> Self:
        """Make the memory: reserved, touched by ``num_threads`` threads, sealed. Blocks, about a second for 4 GiB.

        ``data_nbytes`` is rounded up to whole pages. ``num_leases`` at once (None: one for each 64 KiB, at least 1024,
        at most 65536). ``huge_pages``: ``"off"``, ``"transparent"`` (where the kernel makes them for shared memory) or
        ``"reserved"`` (of those the operator reserved; an error when they do not suffice). A lease that a consumer has
        not begun to read ``unclaimed_timeout_s`` after it was committed is taken back.

        Raises :class:`ArenaMemoryError` (more than the control group or the machine has left),
        :class:`ArenaError` and :class:`ConfigError`.
        """

    @property
    def instance_id(self) -> str:
        """The random part of its leases' names: 16 hexadecimal digits."""

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data."""

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""

    def report(self) -> dict[str, int | str | bool]:
        """How the memory turned out: noexec, read_only, huge_pages, huge_nbytes, huge_pages_setting, num_threads.

        ``noexec`` and ``read_only`` are False where the kernel does not know the seal.
        """

    def statistics(self) -> dict[str, Any]:
        """What is out now and what has happened so far.

        Now: data_nbytes, used_nbytes, largest_free_nbytes (that one lease finds for certain), num_leases, leases_out,
        consumers, held (leases that each consumer has not released). So far: taken, committed, aborted, released (once
        for each consumer of a lease), cancelled, expired, full, consumers_connected, consumers_gone.
        """

    def hand_over(self, link: SenderLink, *, timeout_s: float) -> int:
        """Give the arena to the worker at the other end of ``link``; the number that it has as a consumer.

        Blocks, without the GIL, until the worker has mapped it. Keep the link open as long as the worker shall receive
        leases: for the worker its end is ours. A worker that refuses it keeps its link; after any other error of the
        link that is closed, so that both sides start anew. Raises :class:`EndpointGoneError`,
        :class:`EndpointRefusedError`, :class:`MmcopyTimeoutError`, :class:`EndpointError`, :class:`ArenaError` and
        :class:`ClosedError`.
        """

    def take(self, sizes: Sequence[int], consumers: Sequence[int], *, timeout_s: float) -> list[LeaseWriter]:
        """Leases of these sizes for these consumers, side by side, each at a multiple of 256 bytes; all or none.

        Blocks, without the GIL, until there is room, and, where the arena has several consumers, until none of these
        holds more than twice of what would be left. Signals are handled meanwhile; what a handler raises ends the wait.
        Raises :class:`ArenaFullError` at the limit, and at once for what can never fit; :class:`ArenaError` for a
        consumer that has gone.
        """

    def send(
        self,
        tensors: Sequence[tuple[FlatArray, str, int]],
        consumers: Sequence[int],
        *,
        timeout_s: float,
        num_threads: int,
    ) -> list[TensorData]:
        """Send the tensors of one request as leases side by side; each is an array, its dtype and bytes after the cast.

        All or none. Blocks as :meth:`take`, then until all is written, without the GIL when it is much; the sources may
        be reused right after. Raises what :meth:`take` raises, :class:`DtypeError`, and :class:`PayloadError` for a
        number of bytes that is not the array's.
        """

    def cancel(self, name: str, offset: SupportsIndex, nbytes: SupportsIndex, owner_id: str) -> bool:
        """Take a lease back that was handed out: a consumer that has not begun to read it cannot any more.

        The block comes back when those that have begun are done, and its writer, if it is still being written. False
        when it is over. Never blocks. Raises :class:`LeaseForgedError` and
        :class:`LeaseUnknownArenaError`.
        """

    def close(self, timeout_s: float) -> None:
        """Give out no further lease, and end the thread. Leases that are out stay readable. May be called again.

        The memory is freed when the last lease and buffer are gone and the last worker has unmapped it. Does nothing in
        a forked child. Raises :class:`MmcopyTimeoutError`.
        """

@final
class LeaseWriter:
    """A lease that is not finished. Its handle may be sent already: consumers read as far as it is written.

    Its buffer (``memoryview(writer)``, ``numpy.frombuffer``) is the memory itself, writable. Writing to it after
    :meth:`commit` changes what consumers read. Dropping the writer gives the lease up, unless it was committed.
    """

    @property
    def name(self) -> str:
        """Name of its handle."""

    @property
    def offset(self) -> int:
        """First byte in the arena's data."""

    @property
    def nbytes(self) -> int:
        """Bytes."""

    @property
    def owner_id(self) -> str:
        """Owner in its handle."""

    @property
    def over(self) -> bool:
        """Whether it was committed or given up."""

    @property
    def num_views(self) -> int:
        """Buffers of it that exist. Its block is not given to another lease before they have gone."""

    def write(
        self, src: Buffer, *, src_dtype: str | None = None, dst_dtype: str | None = None, num_threads: int = 1
    ) -> None:
        """Fill the whole lease from ``src``, cast on the way when dtypes are given. Once a lease.

        Consumers see each step as soon as all before it are there. Blocks until all is written; commits nothing.
        ``src`` may be reused right after. Raises :class:`PayloadError` when the lengths differ,
        :class:`DtypeError`,
        :class:`LeaseError` and :class:`ClosedError`.
        """

    def write_later(self, tensor: tuple[FlatArray, str, int], *, num_threads: int) -> LaterWrite:
        """Begin to fill the whole lease from a tensor, as :meth:`Arena.send` takes it, and to commit it behind the last
        byte, by threads of the process. Once a lease. Blocks only where the system refused every thread.

        Raises :class:`PayloadError` when the lengths differ, :class:`LeaseError` and :class:`ClosedError`.
        """

    def describe(self, dtype: str, shape: tuple[int, ...]) -> TensorData:
        """What goes into the message, which may be sent before it is written. It is not checked against the lease."""

    def commit(self) -> None:
        """All bytes are in place. Never blocks.

        Raises :class:`LeaseError` while a write runs, :class:`ClosedError` when it is
        over.
        """

    def abort(self) -> None:
        """Give it up: consumers get an error instead of the rest. Does nothing when it is over."""

    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
        def __release_buffer__(self, view: memoryview, /) -> None: ...

@final
class LaterWrite:
    """A lease that is being filled, from :meth:`LeaseWriter.write_later`. It keeps the source. Dropping it does what is
    left first; in a forked child it does nothing."""

    def done(self) -> bool:
        """Whether all is written. Never blocks."""

    def wait(self, timeout_s: float) -> bool:
        """Block, without the GIL, until all is written and committed; False at the limit. Meanwhile this thread does
        what no other has begun. Raises :class:`ClosedError` when the lease was given up before."""

@final
class ArenaMap:
    """A sender's arena, mapped as long as this or one of its leases lives. From :meth:`WorkerEndpoint.find_arena`."""

    @property
    def instance_id(self) -> str:
        """The random part of its leases' names: 16 hexadecimal digits."""

    @property
    def slot(self) -> int:
        """Our number as a consumer."""

    @property
    def read_only(self) -> bool:
        """Whether the kernel keeps everyone but the sender from writing to the data."""

    @property
    def data_address(self) -> int:
        """Address of the data, for registering it with CUDA (read-only)."""

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data."""

    @property
    def flags_address(self) -> int:
        """Address of our flags (claims and release flags), for registering them with CUDA (read and write)."""

    @property
    def flags_nbytes(self) -> int:
        """Bytes of our flags."""

    @property
    def owner_gone(self) -> bool:
        """Whether the connection to the sender has ended. What it wrote stays readable."""

    @property
    def num_held(self) -> int:
        """Leases that are claimed and not released."""

    def claim(self, name: str, offset: SupportsIndex, nbytes: SupportsIndex, owner_id: str) -> Lease:
        """Check a handle, and tell its sender that we read it from now on. Never blocks.

        Raises :class:`LeaseForgedError`, :class:`LeaseError`, :class:`LeaseUnknownArenaError` and
        :class:`ClosedError`.
        """

    def is_same(self, other: ArenaMap) -> bool:
        """Whether the two are the same mapping."""

@final
class Lease:
    """A lease that we may read until we release it. Its buffer is the memory itself, read-only.

    Dropping it does not release it, because a copy on a GPU's stream may still read; one of
    :meth:`Request.take_lease` is released then.
    """

    @property
    def name(self) -> str:
        """Name of its handle."""

    @property
    def offset(self) -> int:
        """First byte in the arena's data."""

    @property
    def nbytes(self) -> int:
        """Bytes."""

    @property
    def release_flag(self) -> tuple[int, int]:
        """Address of the word that tells the sender that our reads are over, and what to write: 32 bits.

        The address is in the :class:`ArenaMap`'s flags. For a GPU's stream, after its copy; then :meth:`defer_release`.
        """

    def written(self) -> int:
        """Bytes that the sender has written. Never blocks. Raises :class:`LeaseError`."""

    def wait_written(self, upto: int, timeout_s: float) -> int:
        """Block, without the GIL, until the sender has written ``upto`` bytes; how many are there, which can be more.

        Raises :class:`LeaseError` and
        :class:`MmcopyTimeoutError`.
        """

    def release(self) -> bool:
        """Tell the sender that our reads are over. False when that was said already, or handed on."""

    def defer_release(self) -> bool:
        """A GPU's stream writes the release flag: :meth:`release` does nothing any more. False when it is not held."""

    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...
