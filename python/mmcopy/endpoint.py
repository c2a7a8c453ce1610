"""The socket that tells a sender and a worker on one host of each other.

A worker opens a :class:`WorkerEndpoint` and advertises its path; a sender that knows the path connects with
:class:`SenderLink`. While the connection is open both sides are alive, whatever containers they run in, as long as they
share the socket's directory.
"""

from __future__ import annotations

import os
import pathlib
import stat
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from ._native import SenderLink as NativeSenderLink
from ._native import WorkerEndpoint as NativeWorkerEndpoint
from .config import parse_count, parse_prefixes, parse_seconds
from .errors import ConfigError, EndpointError

__all__ = ["PROBE_PREFIXES", "ProbeResult", "SenderLink", "WorkerEndpoint", "default_directory"]

PROBE_PREFIXES = ("mmcopy-",)
"""How the names of segments begin that mmcopy's senders write for a probe."""


def default_directory() -> pathlib.Path:
    """Where sockets live by default: ``/run/user/<uid>/mmcopy`` where the system keeps such a
    directory, else ``/tmp/mmcopy-<uid>``. Containers do not share it by themselves.

    Where another user has made a file of the latter name it is a ``/tmp/mmcopy-<uid>-<random>`` of ours, which is made
    if there is none yet.
    """
    uid = os.geteuid()
    runtime = pathlib.Path(f"/run/user/{uid}")
    if runtime.is_dir():
        return runtime / "mmcopy"
    usual = pathlib.Path(f"/tmp/mmcopy-{uid}")
    if not os.path.lexists(usual) or _is_directory_of(usual, uid):
        return usual
    others = sorted(path for path in usual.parent.glob(f"{usual.name}-*") if _is_directory_of(path, uid))
    return others[0] if others else pathlib.Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=usual.parent))


def _is_directory_of(path: pathlib.Path, uid: int) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid


def _sequence(value: Sequence[Any], *, setting: str, wanted: str) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{setting} is {value!r}, want a sequence of {wanted}")
    return list(value)


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether a worker can read the segments that we write."""

    ok: bool
    """The worker read back the bytes that we wrote."""
    reason: str
    """What happened, in words, with the numbers: errno, uid, mode."""

    def __bool__(self) -> bool:
        return self.ok


class WorkerEndpoint:
    """A socket that senders on this host connect to; one thread serves all of them.

    ``directory`` (None: :func:`default_directory`) is created with mode 0700 when it is missing, and must belong to us
    and be closed to others. Sockets that dead workers of our user left there are removed: those that accept no
    connection. With ``allowed_uids`` other users may connect too; then the directory must let them through (0711) and
    no other user may write to it. Every user is checked as the kernel reports it.

    A probe opens segments in ``shm_dir`` whose names begin with one of ``accept_prefixes``, by the rules by which a
    receiver opens them. What senders that are gone left in ``shm_dir`` is removed at the start and now and then. At
    most ``max_links`` senders are connected at once, with ``max_arenas`` arenas of ``max_arena_bytes`` bytes in all,
    which a receiver on a GPU pins; one that connects has ``hello_timeout_s`` to say so. A peer's bad frame ends its own
    connection and no other. A sender whose arena is refused sends segments.

    Creating it does not block for peers. It raises :class:`EndpointError` (also for a path
    longer than a unix socket takes) and
    :class:`ConfigError`. Methods may be called from several threads. In a forked child it is closed:
    the child has no socket, and the parent keeps its own.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        shm_dir: str | os.PathLike[str] = "/dev/shm",
        accept_prefixes: Sequence[str] = PROBE_PREFIXES,
        allowed_uids: Sequence[int] = (),
        max_links: int = 256,
        max_arenas: int = 64,
        max_arena_bytes: int = 256 << 30,
        hello_timeout_s: float = 5.0,
    ) -> None:
        prefixes = parse_prefixes(accept_prefixes, setting="accept_prefixes")
        uids = _sequence(allowed_uids, setting="allowed_uids", wanted="user ids")
        for uid in uids:
            if not isinstance(uid, int) or not 0 <= uid < 2**32:
                raise ConfigError(f"allowed_uids has {uid!r}, want user ids from 0 to 2**32 - 1")
        self._native = NativeWorkerEndpoint(
            default_directory() if directory is None else directory,
            shm_dir=shm_dir,
            accept_prefixes=list(prefixes),
            allowed_uids=uids,
            max_links=parse_count(max_links, setting="max_links"),
            max_arenas=parse_count(max_arenas, setting="max_arenas", least=0),
            max_arena_bytes=parse_count(max_arena_bytes, setting="max_arena_bytes", least=0),
            hello_timeout_s=parse_seconds(hello_timeout_s, setting="hello_timeout_s"),
        )

    @property
    def native(self) -> NativeWorkerEndpoint:
        """The part in Rust, for those who receive arenas."""
        return self._native

    @property
    def path(self) -> str:
        """Path of the socket, which a sender needs to connect."""
        return str(self._native.path)

    @property
    def closed(self) -> bool:
        """Whether it was closed, or belongs to the process that this one was forked from."""
        return self._native.closed

    def statistics(self) -> dict[str, int | str]:
        """What has happened: links, accepted, refused_users, faults, last_fault, swept (sockets of dead workers), and
        what senders that are gone left in ``shm_dir``: segments_swept, sweep_failures, last_sweep_failure."""
        return self._native.statistics()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Remove the socket, end every connection and the thread, and block for the thread. May be called again.

        Raises :class:`MmcopyTimeoutError`.
        """
        self._native.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mmcopy.WorkerEndpoint {self.path} {'closed' if self.closed else 'open'}>"


class SenderLink:
    """A sender's connection to a worker's endpoint; made by :meth:`connect`. A context manager.

    Calls of several threads follow one another. In a forked child it is closed, and the parent's goes on.
    """

    def __init__(self, native: NativeSenderLink) -> None:
        self._native = native

    @classmethod
    def connect(cls, path: str | os.PathLike[str], *, timeout_s: float, allowed_uids: Sequence[int] = ()) -> SenderLink:
        """Connect to the worker that listens at ``path``. Blocks, without the GIL, for ``timeout_s`` at most.

        The worker must run as our user or as one of ``allowed_uids``. Raises
        :class:`EndpointGoneError` (no worker listens there),
        :class:`EndpointRefusedError` (by either side), :class:`MmcopyTimeoutError`,
        and :class:`EndpointError` (a path too long, or not one at all, among others).
        """
        try:
            os.fsencode(path)
        except UnicodeEncodeError as error:  # it came from another process, perhaps out of JSON
            raise EndpointError(f"socket path {path!r} is no path: {error}") from None
        return cls(NativeSenderLink.connect(path, timeout_s=timeout_s, allowed_uids=list(allowed_uids)))

    @property
    def native(self) -> NativeSenderLink:
        """The part in Rust, for those who hand arenas over."""
        return self._native

    @property
    def path(self) -> str:
        """Path of the worker's socket."""
        return str(self._native.path)

    @property
    def closed(self) -> bool:
        """Whether it was closed here, the worker has gone, or this process is a forked child. Never blocks."""
        return self._native.closed

    def probe(self, shm_dir: str | os.PathLike[str] = "/dev/shm", *, timeout_s: float) -> ProbeResult:
        """Write a small segment to ``shm_dir``, let the worker read it, and remove it. Blocks, without the GIL.

        What is wrong with the shared memory on either side is the result; what is wrong with the connection is raised:
        :class:`EndpointGoneError`, :class:`MmcopyTimeoutError`,
        :class:`EndpointError` and :class:`ClosedError`.
        """
        return ProbeResult(*self._native.probe(shm_dir, timeout_s=timeout_s))

    def close(self) -> None:
        """End the connection, and calls that wait in other threads. Never blocks. May be called again."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mmcopy.endpoint.SenderLink {self.path} {'closed' if self.closed else 'open'}>"
