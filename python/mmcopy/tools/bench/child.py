"""A process that answers one request after the other, and ends when the process that started it does."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from mmcopy.errors import MmcopyError

__all__ = ["Child", "PeerError", "answer_all"]

START_LIMIT_S = 120.0
END_LIMIT_S = 30.0


class PeerError(MmcopyError):
    """Another process of the benchmark failed, or has ended."""


class Child:
    """``body(connection, *args)`` in a new process, which first sends that it is ready. Not thread-safe.

    What it sends is an answer; where that is an :class:`MmcopyError` it is raised here.
    """

    def __init__(self, body: Callable[..., None], *args: Any, name: str, has_children: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, *args), name=name, daemon=not has_children)
        try:
            self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        pid = self._process.pid
        assert pid is not None  # it was started
        return pid

    def send(self, request: object) -> None:
        """Send a request; its :meth:`answer` must be taken before the next. Raises :class:`PeerError`."""
        try:
            self._connection.send(request)
        except OSError as error:
            raise PeerError(f"{self._name} is gone: {error}") from error

    def answer(self, limit_s: float = START_LIMIT_S) -> Any:
        """The next answer. Raises :class:`PeerError` when none comes within the limit, or what it was answered."""
        try:
            if not self._connection.poll(limit_s):
                raise PeerError(f"{self._name} did not answer within {limit_s:g} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise PeerError(f"{self._name} ended") from error
        if isinstance(answer, MmcopyError):
            raise answer
        return answer

    def disconnect(self) -> None:
        """Let the process end, without waiting for that."""
        self._connection.close()

    def close(self) -> None:
        """End the process and wait for that."""
        self.disconnect()
        self._process.join(END_LIMIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(END_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def answer_all(
    connection: Connection, open_: Callable[[], AbstractContextManager[tuple[Any, Callable[[Any], Any]]]]
) -> None:
    """The body of a child: ``open_`` gives what to send first and the function that answers requests.

    Returns when the parent has gone. An error is sent as the answer.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the first process, which closes the connections
    with contextlib.suppress(OSError):
        try:
            with open_() as (ready, answer), contextlib.suppress(EOFError, OSError):
                connection.send(ready)
                while True:
                    connection.send(_answer_or_error(answer, connection.recv()))
        except Exception as error:
            connection.send(_as_answer(error))


def _answer_or_error(answer: Callable[[Any], Any], request: Any) -> Any:
    try:
        return answer(request)
    except Exception as error:
        return _as_answer(error)


def _as_answer(error: Exception) -> MmcopyError:
    return error if isinstance(error, MmcopyError) else PeerError(f"{type(error).__name__}: {error}")
