"""A sender with an arena, and a worker's receiver that takes it, for the tests of leases."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmcopy import Receiver, Sender, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint

from .arrays import MIB
from .waiting import settle


def statistics(sender: Sender) -> dict[str, Any]:
    arena = sender.arena
    assert arena is not None
    return arena.statistics()


def is_empty(sender: Sender) -> bool:
    now = statistics(sender)
    return bool(now["leases_out"] == 0 and now["used_nbytes"] == 0)


class Side:
    """A worker's receiver with its socket."""

    def __init__(self, directory: pathlib.Path, url: str = "grpc://127.0.0.1:1", **options: Any) -> None:
        self.endpoint = WorkerEndpoint(directory)
        self.receiver = Receiver("cpu", framework="numpy", endpoint=self.endpoint, **options)
        self.spec = WorkerSpec(url, labels={"mmcopy_endpoint": self.endpoint.path})

    def close(self) -> None:
        self.receiver.close()
        self.endpoint.close()


@pytest.fixture
def sockets(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def side(sockets: pathlib.Path, segments: Callable[[], list[str]]) -> Iterator[Side]:
    side = Side(sockets)
    yield side
    side.close()
    assert segments() == []


@pytest.fixture
def sender(side: Side) -> Iterator[Sender]:
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=16 * MIB, num_threads=2) as sender:
        sender.connect(side.spec, timeout_s=20)
        yield sender
        assert settle(lambda: is_empty(sender)), statistics(sender)
