"""How many files of mmcopy a receive runs through, counted on the second call: the first one fills caches."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mmcopy import Receiver, Sender, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from tests.rigs.walk import files_run_by

MOST_FILES = 8


@pytest.fixture
def endpoint(tmp_path: pathlib.Path) -> Iterator[WorkerEndpoint]:
    with WorkerEndpoint(tmp_path / "s") as endpoint:
        yield endpoint


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def receiver(request: pytest.FixtureRequest, endpoint: WorkerEndpoint) -> Iterator[Receiver]:
    with Receiver(request.param, endpoint=endpoint) as receiver:
        yield receiver


@pytest.mark.parametrize("num_tensors", [1, 5])
@pytest.mark.parametrize("path", ["lease", "segment"])
def test_a_receive_runs_few_files(
    receiver: Receiver, endpoint: WorkerEndpoint, path: str, num_tensors: int, segments: Callable[[], list[str]]
) -> None:
    worker = WorkerSpec("grpc://127.0.0.1:1", labels={"mmcopy_endpoint": endpoint.path})
    mode = "auto" if path == "lease" else "shm"
    arrays = [np.full((4, 1000), n, np.float32) for n in range(num_tensors)]
    with Sender(TransportConfig(mode=mode, shm_min_bytes=1), arena_bytes=4 << 20) as sender:
        if path == "lease":
            sender.connect(worker, timeout_s=20)
        first, second = (sender.send_many(arrays, worker=worker) for _ in range(2))
        assert {item.path for item in [*first, *second]} == {path}
        receiver.receive(first)
        files = files_run_by(lambda: receiver.receive(second))
    assert len(files) <= MOST_FILES, sorted(files)
    assert segments() == []
