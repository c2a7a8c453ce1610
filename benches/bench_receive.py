"""Receiving a segment that was not seen before, beside its limit and a plain baseline, by size.

    pytest benches/bench_receive.py            on the CPU; with an NVIDIA GPU, torch and cupy also onto cuda:0

Groups are sizes. On the CPU the limit is one memcpy of the same bytes into new memory; on CUDA it is one asynchronous
copy out of pinned memory that is filled already. The baseline reads the file with one thread into memory that torch
pins (and caches) on CUDA, queues the copy, and removes the file. Publishing is not timed. Bytes are compared before
anything is timed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Receiver, Sender, ShmHandle, TensorData, TransportConfig

SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "64MiB": 64 << 20, "256MiB": 256 << 20}
SHM_DIR = pathlib.Path("/dev/shm")


def devices() -> list[str]:
    try:
        import cupy  # noqa: F401
        import torch
    except ImportError:
        return ["cpu"]
    return ["cpu", "cuda:0"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="module", params=devices())
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=0)) as sender:
        yield sender


@pytest.fixture(params=SIZES)
def source(request: pytest.FixtureRequest, benchmark: Any) -> np.ndarray[Any, Any]:
    nbytes = SIZES[request.param]
    benchmark.extra_info["nbytes"] = nbytes
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)


def measure(
    benchmark: Any, device: str, size: int, setup: Callable[[], tuple[Any, ...]], run: Callable[..., Any]
) -> None:
    benchmark.group = f"{device} {next(name for name, n in SIZES.items() if n == size)}"
    rounds = max(7, min(200, (1 << 30) // size))
    benchmark.pedantic(run, setup=lambda: (setup(), {}), rounds=rounds, warmup_rounds=3)


def synchronized(torch: Any, device: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, and then the GPU has finished."""

    def run(*args: Any) -> Any:
        result = call(*args)
        if device != "cpu":
            torch.cuda.synchronize()
        return result

    return run


def test_limit(benchmark: Any, torch: Any, device: str, source: Any) -> None:
    host = torch.from_numpy(source)
    if device != "cpu":
        host = host.pin_memory()
    copy = synchronized(torch, device, lambda: host.clone() if device == "cpu" else host.to(device, non_blocking=True))
    assert torch.equal(copy().cpu(), host)
    measure(benchmark, device, len(source), tuple, copy)


def test_mmcopy_segment(benchmark: Any, torch: Any, device: str, source: Any, sender: Sender) -> None:
    with Receiver(device) as receiver:
        receive = synchronized(torch, device, receiver.receive)
        assert receive(sender.send(source)).cpu().numpy().tobytes() == source.tobytes()
        measure(benchmark, device, len(source), lambda: (sender.send(source),), receive)


def test_baseline_file_staged(benchmark: Any, torch: Any, device: str, source: Any, sender: Sender) -> None:
    def staged(data: TensorData) -> Any:
        assert isinstance(data.payload, ShmHandle)
        path = SHM_DIR / data.payload.name
        host = torch.empty(data.nbytes, dtype=torch.uint8, pin_memory=device != "cpu")
        with path.open("rb", buffering=0) as file:
            assert file.readinto(host.numpy()) == data.nbytes
        tensor = host if device == "cpu" else host.to(device, non_blocking=True)
        path.unlink()
        return tensor

    receive = synchronized(torch, device, staged)
    assert receive(sender.send(source)).cpu().numpy().tobytes() == source.tobytes()
    measure(benchmark, device, len(source), lambda: (sender.send(source),), receive)
