"""The process groups of torch.distributed that a receiver was given, and the few calls that are made on them.

Each call has a limit. What was waited for in vain may still be under way behind the caller's back: it keeps its own
buffers alive, and the next call on the CPU group waits for it first.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from mmcopy.errors import ConfigError, MissingDependencyError, MmcopyTimeoutError, PeerLostError

from .digest import BLOCK_BYTES

if TYPE_CHECKING:
    import torch

__all__ = ["Line", "RankGroup"]


class Line:
    """What all receivers on one CPU group share: whose turn it is, how many receives there were, what is under way.

    Found by :meth:`of`, so that two receivers on one group do not each count for themselves and lose step.
    """

    _lines: ClassVar[weakref.WeakKeyDictionary[Any, Line]] = weakref.WeakKeyDictionary()
    _finding: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.order = threading.Lock()
        """Held for one receive."""
        self.sequence = 0
        """Receives that were begun on this group."""
        self.late: Any = None
        """An exchange that was given up, and may still be under way."""
        self.lost = ""
        """Why there can be no further exchange; empty while there can."""

    @classmethod
    def of(cls, cpu_group: Any) -> Line:
        """The group's own; it goes when the group goes."""
        with cls._finding:
            return cls._lines.setdefault(cpu_group, Line())


class RankGroup:
    """Two process groups of the same ranks: ``group`` moves tensors of ``device_type``, ``cpu_group`` agrees.

    ``cpu_group`` None: ``group`` itself, when it can move host memory (gloo). Raises :class:`ConfigError` for groups
    that this process is not in, that cannot do what they are for, or that have other ranks or another order.
    """

    def __init__(self, group: Any, cpu_group: Any, *, device_type: str) -> None:
        try:
            import torch
            import torch.distributed as dist
        except ImportError as error:
            raise MissingDependencyError("group= needs torch: pip install 'mmcopy[torch]'") from error
        self._torch = torch
        self._dist: Any = dist
        self._is_stream_ordered = False
        self._group = group
        self._cpu_group = group if cpu_group is None else cpu_group
        for name, each, kind in (("group", group, device_type), ("cpu_group", self._cpu_group, "cpu")):
            if each is dist.GroupMember.NON_GROUP_MEMBER:
                raise ConfigError(f"this process is not in {name}")
            try:
                self.rank: int = dist.get_rank(each)
                backends = _backends(dist, each)
            except (TypeError, ValueError, RuntimeError, AttributeError) as error:
                raise ConfigError(f"{name} is {each!r}, want a process group of torch.distributed: {error}") from error
            if self.rank < 0:
                raise ConfigError(f"this process is not in {name}")
            if kind not in backends:
                hint = "; give a gloo group of the same ranks as cpu_group" if name == "cpu_group" else ""
                raise ConfigError(f"{name} has a backend for {', '.join(backends) or 'nothing'}, want {kind}{hint}")
            if name == "group":
                self._is_stream_ordered = backends[kind] == "nccl"
        self.global_ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        others = tuple(dist.get_process_group_ranks(self._cpu_group))
        if others != self.global_ranks:
            raise ConfigError(f"group has the ranks {list(self.global_ranks)}, cpu_group {list(others)}")
        self.size = len(self.global_ranks)
        self.line = Line.of(self._cpu_group)
        self._lost = ""

    @property
    def lost(self) -> str:
        """Why no collective can be made any more; empty while that is not so."""
        return self.line.lost or self._lost

    @contextlib.contextmanager
    def turn(self, deadline: float) -> Iterator[None]:
        """Around one receive: one at a time, counted. Raises :class:`MmcopyTimeoutError`, :class:`PeerLostError`."""
        wait_s = max(0.0, deadline - time.monotonic())
        if not self.line.order.acquire(timeout=wait_s):
            raise MmcopyTimeoutError(
                "receive", f"another thread's receive on the same group did not end within {wait_s:.3g} s"
            )
        try:
            if self.lost:
                raise PeerLostError(
                    f"rank {self.rank} of {self.size}: the group was lost before: {self.lost}; "
                    "make new process groups and a new receiver"
                )
            self.line.sequence += 1
            yield
        finally:
            self.line.order.release()

    def exchange(self, block: bytes, deadline: float) -> list[bytes]:
        """Every rank's block, in the order of ranks. Blocks until all are here.

        Raises :class:`MmcopyTimeoutError`, after which the exchange goes on behind the caller's back and the next one
        waits for it, and :class:`PeerLostError`, after which there is no next one.
        """
        line, torch = self.line, self._torch
        try:
            if line.late is not None:
                self._wait_until(line.late, deadline, "an earlier exchange")
                line.late = None
            # New memory each time: an exchange that is late goes on writing to it.
            mine = torch.frombuffer(bytearray(block), dtype=torch.uint8)
            blocks = torch.empty(self.size * BLOCK_BYTES, dtype=torch.uint8)
            line.late = self._queue(lambda: self._all_gather(blocks, mine, self._cpu_group))
            self._wait_until(line.late, deadline, "an exchange")
            line.late = None
        except PeerLostError as error:
            line.lost = str(error)
            raise
        whole = blocks.numpy().tobytes()
        return [whole[start : start + BLOCK_BYTES] for start in range(0, len(whole), BLOCK_BYTES)]

    def broadcast(self, tensor: torch.Tensor, source: int, deadline: float) -> None:
        """Send rank ``source``'s bytes of ``tensor`` to every other's.

        With NCCL it is queued on the current stream and does not wait for the GPU; otherwise it blocks. Raises
        :class:`PeerLostError`, and :class:`MmcopyTimeoutError`.
        """
        root = self.global_ranks[source]
        if self._is_stream_ordered:
            self._queue(lambda: self._dist.broadcast(tensor, root, group=self._group))
        else:
            work = self._queue(lambda: self._dist.broadcast(tensor, root, group=self._group, async_op=True))
            self._wait(work, deadline, "a broadcast")

    def gather_shares(self, whole: torch.Tensor, share: torch.Tensor, deadline: float) -> None:
        """Fill ``whole`` with every rank's ``share``, which is that rank's equal part of its own ``whole``.

        As :meth:`broadcast` in everything else. NCCL works in place; gloo goes through a buffer of its own.
        """
        if self._is_stream_ordered:
            self._queue(lambda: self._dist.all_gather_into_tensor(whole, share, group=self._group))
        else:
            work = self._queue(lambda: self._all_gather(whole, share, self._group))
            self._wait(work, deadline, "a gather")

    def transfer(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]], deadline: float
    ) -> None:
        """Send host tensors to ranks, and receive others from ranks, all at once. Blocks until all is done."""
        works: list[Any] = []

        def queue_all() -> None:
            for tensor, rank in receives:
                works.append(self._dist.irecv(tensor, self.global_ranks[rank], group=self._cpu_group))
            for tensor, rank in sends:
                works.append(self._dist.isend(tensor, self.global_ranks[rank], group=self._cpu_group))

        self._queue(queue_all)
        for work in works:
            self._wait(work, deadline, "a transfer")

    def _all_gather(self, whole: torch.Tensor, mine: torch.Tensor, group: Any) -> Any:
        return self._dist.all_gather(list(whole.chunk(self.size)), mine, group=group, async_op=True)

    def _queue(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self._lose(str(error)) from error

    def _wait(self, work: Any, deadline: float, what: str) -> None:
        """Block until ``work`` is done. A late one loses the group: what it still writes to could not be waited for."""
        try:
            self._wait_until(work, deadline, what)
        except MmcopyTimeoutError as error:
            self._lost = str(error)
            raise

    def _wait_until(self, work: Any, deadline: float, what: str) -> None:
        # Work.wait takes whole milliseconds, and takes 0 of them for ever.
        limit = timedelta(milliseconds=max(1, int((deadline - time.monotonic()) * 1000)))
        try:
            work.wait(limit)
        except RuntimeError:
            if not work.is_completed():
                raise MmcopyTimeoutError(
                    "peer",
                    f"rank {self.rank} of {self.size}: {what} did not end within {limit.total_seconds():.3g} s: "
                    "a rank is late or does not take part",
                ) from None
            try:
                work.wait(limit)  # it has ended: well, if that was in the moment between
            except RuntimeError as error:
                raise self._lose(f"{what} failed: {error}") from error

    def _lose(self, why: str) -> PeerLostError:
        self._lost = why
        return PeerLostError(f"rank {self.rank} of {self.size}: {why}")


def _backends(dist: Any, group: Any) -> dict[str, str]:
    """The name of the backend for each type of device."""
    parts = str(dist.get_backend_config(group)).split(",")
    return {device: backend for device, _, backend in (part.partition(":") for part in parts) if backend}
