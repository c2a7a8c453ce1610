"""Receiving off the event loop, in a bounded number of threads, with every segment removed whatever happens.

A request's segments are this worker's from the moment its message is here. Each way out removes them: a receive that
succeeds or fails does so itself; one that is given up (cancelled, or over its limit) while it still waits for a
thread is never run, and its segments are released; one that is given up while it runs goes on to its end, because a
copy cannot be interrupted, and its tensors are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from mmcopy.errors import MmcopyTimeoutError
from mmcopy.tensors import ShmHandle, TensorData
from mmcopy.wire.payload import Key, label_of

from .request import quoted

__all__ = ["Intake", "Received"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Received:
    """A request's tensors by key, what described them, and how long it took from the call on."""

    data: dict[Key, TensorData]
    tensors: Mapping[Key, Any]
    seconds: float


class _Job:
    """One request's receive: what a thread runs."""

    def __init__(
        self,
        request_id: str,
        handles: Sequence[ShmHandle],
        read: Callable[[], dict[Key, TensorData]],
        receive: Callable[[Mapping[Key, TensorData]], Mapping[Key, Any]],
        release: Callable[[Sequence[ShmHandle]], object],
    ) -> None:
        self.handles = handles
        self.given_up = False
        self._request_id = request_id
        self._read = read
        self._receive = receive
        self._release = release
        self._started = time.perf_counter()

    def run(self) -> Received:
        try:
            data = self._read()
            tensors = self._receive(data)
            if tensors.keys() != data.keys():
                # An override may return keys of any kind: only ours have a label.
                found = sorted(label_of(key) if key in data else repr(key) for key in tensors)
                raise TypeError(f"receive returned {found}, want {sorted(map(label_of, data))}")
        except BaseException as error:
            # The receiver has released what it was given; not so when reading the message or an override failed.
            self.release()
            if self.given_up:
                _log.warning("%s: the receive that was given up failed: %s", quoted(self._request_id), error)
            raise
        return Received(data, tensors, time.perf_counter() - self._started)

    def release(self) -> None:
        self._release(self.handles)


class Intake:
    """The worker's receiving threads. All methods but the callbacks run on the event loop.

    ``receive`` and ``release`` are called on threads of this object: ``receive`` on one of ``num_threads``,
    ``release`` also on one of its own, so that it never waits behind a receive.
    """

    def __init__(
        self,
        receive: Callable[[Mapping[Key, TensorData]], Mapping[Key, Any]],
        release: Callable[[Sequence[ShmHandle]], object],
        *,
        num_threads: int,
        timeout_s: float,
    ) -> None:
        self._receive = receive
        self._remove = release
        self._timeout_s = timeout_s
        self._receivers = ThreadPoolExecutor(num_threads, thread_name_prefix="mmcopy-receive")
        self._releaser = ThreadPoolExecutor(1, thread_name_prefix="mmcopy-release")
        self._outstanding: set[Future[Any]] = set()

    async def receive(
        self, request_id: str, handles: Sequence[ShmHandle], read: Callable[[], dict[Key, TensorData]]
    ) -> Received:
        """Run ``read``, which describes the tensors, and receive them, on a thread.

        Raises what they raise; :class:`MmcopyTimeoutError` when the limit passes first. The segments of
        ``handles`` are removed in every case; after a timeout or a cancellation when the running copy ends.
        """
        job = _Job(request_id, handles, read, self._receive, self._release)
        future: Future[Received] = self._submit(self._receivers, job.run)
        waiter = asyncio.wrap_future(future)
        try:
            done, _ = await asyncio.wait([waiter], timeout=self._timeout_s)
        except asyncio.CancelledError:
            self._give_up(job, future, waiter)
            raise
        if done:
            try:
                return waiter.result()
            finally:
                # An error's traceback refers to this frame, and these to the error: such a cycle would keep the call,
                # its tensors and gRPC's descriptors until it is collected.
                del future, waiter, done
        queued = self._give_up(job, future, waiter)
        raise MmcopyTimeoutError(
            "receive",
            f"{len(handles)} segments were not received within {self._timeout_s:g} s: the receive "
            + ("was still waiting for a thread" if queued else "still runs"),
        )

    async def release(self, handles: Sequence[ShmHandle]) -> None:
        """Remove the segments of a request that is refused unread. Done also when the caller is cancelled meanwhile."""
        if handles:
            await asyncio.wait([asyncio.wrap_future(self._submit(self._releaser, self._release, handles))])

    async def close(self, timeout_s: float) -> int:
        """Wait for what was submitted, ``timeout_s`` at most, and end the threads; how many jobs still run."""
        waiters = [asyncio.wrap_future(future) for future in list(self._outstanding)]
        running = 0
        if waiters:
            done, pending = await asyncio.wait(waiters, timeout=timeout_s)
            running = len(pending)
            for waiter in done:
                if not waiter.cancelled():
                    waiter.exception()  # asked for, so that asyncio does not report it as forgotten
            for waiter in pending:
                waiter.cancel()
        # With nothing outstanding the threads are idle and end at once, so waiting for them does not block.
        for pool in (self._receivers, self._releaser):
            pool.shutdown(wait=running == 0)
        return running

    def _release(self, handles: Sequence[ShmHandle]) -> None:
        try:
            self._remove(handles)
        except Exception:
            _log.exception("could not release %s", ", ".join(repr(handle.name) for handle in handles))

    def _give_up(self, job: _Job, future: Future[Received], waiter: asyncio.Future[Received]) -> bool:
        """Whether the job was still queued; its segments are then released, otherwise its own run removes them."""
        job.given_up = True
        queued = future.cancel()
        waiter.cancel()
        if queued and job.handles:
            self._submit(self._releaser, job.release)
        return queued

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any) -> Future[Any]:
        future = pool.submit(work, *args)
        self._outstanding.add(future)
        future.add_done_callback(self._outstanding.discard)
        return future
