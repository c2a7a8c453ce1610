"""Tensors that are announced before all their bytes are there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any, Self

import numpy as np

from mmcopy.errors import ClosedError, SendTimeoutError
from mmcopy.tensors import TensorData

__all__ = ["Reservation", "StreamingSend"]

_log = logging.getLogger(__name__)


class StreamingSend:
    """A tensor that is being written. ``data`` can be sent at once; the source is in use until :meth:`wait` returns."""

    def __init__(self, data: TensorData, writing: Future[None] | None) -> None:
        self.data = data
        """What goes into the message."""
        self._writing = writing
        self._pid = os.getpid()

    def done(self) -> bool:
        """Whether the source may be reused. Never blocks."""
        return self._writing is None or self._writing.done() or self._is_forked

    def wait(self, timeout_s: float = 60.0) -> TensorData:
        """Block until every byte is written; :attr:`data`. From then on the source may be reused.

        Raises what the writing raised (the receiver then gets an error, too), and :class:`SendTimeoutError`. In a
        forked child :class:`ClosedError` at once, because the parent writes.
        """
        if self._is_forked:
            raise ClosedError(f"process {self._pid} writes it, of which this one is a child")
        if self._writing is not None:
            try:
                self._writing.result(timeout_s)
            except FutureTimeoutError:
                raise SendTimeoutError(f"{self.data.nbytes} bytes were not written within {timeout_s:g} s") from None
        return self.data

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_forked:
            self.wait()

    @property
    def _is_forked(self) -> bool:
        return self._pid != os.getpid()


class Reservation:
    """Memory to write a tensor into, where the receiver reads it. A context manager: it commits, or aborts on an error.

    ``array`` is C-contiguous and writable, with what was there before in it. Use it no more after :meth:`commit`: what
    is written then can reach the receiver, or another tensor's.
    """

    def __init__(
        self, array: np.ndarray[Any, Any], commit: Callable[[], TensorData], abort: Callable[[], None]
    ) -> None:
        self.array: np.ndarray[Any, Any] | None = array
        self._commit = commit
        self._abort = abort
        self._data: TensorData | None = None

    @property
    def data(self) -> TensorData | None:
        """What goes into the message, once it is committed."""
        return self._data

    def commit(self) -> TensorData:
        """The bytes are in place; what goes into the message. Once. Raises :class:`ClosedError` when it is over."""
        if self.array is None:
            raise ClosedError("the reservation is over: it was committed or aborted before")
        self.array = None
        self._data = self._commit()
        return self._data

    def abort(self) -> None:
        """Give the memory back. Harmless when it is over."""
        if self.array is not None:
            self.array = None
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort()
        elif self.array is not None:
            self.commit()

    def __del__(self) -> None:
        # Forgotten: nobody was told of it.
        if self.array is not None:
            self.array = None
            self._abort()
