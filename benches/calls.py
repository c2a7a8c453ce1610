"""What the CUDA calls under one small receive cost on this machine: the floor under a receive of a lease, step by step.

    python benches/calls.py [--device cuda:0] [--nbytes 65536] [--calls 200] [--blocks 10]

Each row does what the row before does and one thing more, from pinned memory that is filled already until the device
is synchronised. The last is ``Receiver.receive`` of a lease that was written before. Rows take turns in blocks of
calls; the figures are medians over all blocks. Needs one NVIDIA GPU, torch and cupy; exits with 2 without them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from mmcopy import Receiver, Sender, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import DeviceError, MissingDependencyError
from mmcopy.receive.cuda.stream import CopyStream, CudaInterfaces, find_cuda
from mmcopy.tools.bench.machine import describe

Step = Callable[[], object]


class Calls:
    """The calls of a receive of ``nbytes`` bytes, from pinned host memory into memory that exists."""

    def __init__(self, cuda: CudaInterfaces, index: int, nbytes: int) -> None:
        torch = cuda.torch
        self._index = index
        self._torch = torch
        self._runtime = cuda.runtime
        self._device = torch.device("cuda", index)
        self._nbytes = nbytes
        self._host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
        self._flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._target = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._current_stream = cuda.current_stream
        self.stream = CopyStream(cuda, index)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._index)

    def copy(self) -> None:
        self._runtime.memcpyAsync(
            self._target.data_ptr(), self._host.data_ptr(), self._nbytes, 1, self._current_stream(self._index)
        )
        self.synchronize()

    def _queue(self, target: Any, *, with_flag: bool) -> None:
        current = self._current_stream(self._index)
        self.stream.wait_for(current)
        self.stream.copy(target.data_ptr(), self._host.data_ptr(), self._nbytes)
        if with_flag and not self.stream.write_word(self._flag.data_ptr(), 1):
            sys.exit("this driver writes no values from a stream")
        self.stream.release(current)

    def copy_between_events(self) -> None:
        self._queue(self._target, with_flag=False)
        self.synchronize()

    def copy_and_flag(self) -> None:
        self._queue(self._target, with_flag=True)
        self.synchronize()

    def copy_and_flag_and_tensor(self) -> None:
        self._queue(self._torch.empty(self._nbytes, dtype=self._torch.uint8, device=self._device), with_flag=True)
        self.synchronize()


@contextmanager
def receiving(device: str, nbytes: int) -> Iterator[tuple[Step, Callable[[object], object]]]:
    """A call that sends one lease, and the one that receives it."""
    array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-calls-") as directory,
        WorkerEndpoint(directory) as endpoint,
        Receiver(device, endpoint=endpoint) as receiver,
        Sender(TransportConfig(mode="shm", shm_min_bytes=0), arena_bytes=64 << 20) as sender,
    ):
        worker = WorkerSpec("bench", labels={"mmcopy_endpoint": endpoint.path})
        sender.connect(worker, timeout_s=60)
        found = receiver.receive(sender.send(array, worker=worker))
        if found.cpu().numpy().tobytes() != array.tobytes():
            sys.exit("the receiver delivered wrong bytes")
        yield lambda: sender.send(array, worker=worker), receiver.receive


def block(step: Callable[[object], object], prepare: Step, calls: int) -> list[float]:
    """Seconds of each call; the first tenth warms up."""
    seconds = []
    for _ in range(calls + calls // 10):
        message = prepare()
        begun = time.perf_counter()
        kept = step(message)
        seconds.append(time.perf_counter() - begun)
        del kept
    return seconds[calls // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--nbytes", type=int, default=64 << 10)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--blocks", type=int, default=10)
    args = parser.parse_args()
    if not args.device.startswith("cuda:") or not args.device[5:].isdecimal():
        parser.error(f"--device is {args.device!r}, want cuda:N")
    index = int(args.device[5:])
    try:
        cuda = find_cuda(index)
    except (DeviceError, MissingDependencyError) as error:
        print(f"benches/calls.py needs one NVIDIA GPU: {error}", file=sys.stderr)
        sys.exit(2)
    cuda.runtime.setDevice(index)
    calls = Calls(cuda, index, args.nbytes)
    with receiving(args.device, args.nbytes) as (send, receive):

        def receive_and_wait(message: object) -> object:
            tensor = receive(message)
            calls.synchronize()
            return tensor

        def nothing() -> None:
            pass

        rows: dict[str, tuple[Callable[[object], object], Step]] = {
            "synchronize alone": (lambda _: calls.synchronize(), nothing),
            "one pinned copy": (lambda _: calls.copy(), nothing),
            "on a stream of its own, an event at either edge": (lambda _: calls.copy_between_events(), nothing),
            "and a flag that the stream writes": (lambda _: calls.copy_and_flag(), nothing),
            "and a new tensor": (lambda _: calls.copy_and_flag_and_tensor(), nothing),
            "Receiver.receive of a lease": (receive_and_wait, send),
        }
        seconds: dict[str, list[float]] = {label: [] for label in rows}
        for _ in range(args.blocks):
            for label, (step, prepare) in rows.items():
                seconds[label] += block(step, prepare, args.calls)
    print(describe(args.device), end="\n\n")
    print(f"| {args.nbytes} bytes, until the device is synchronised | us | us more than the row before |")
    print("| --- | --- | --- |")
    before = 0.0
    for label, found in seconds.items():
        median = statistics.median(found) * 1e6
        print(f"| {label} | {median:.1f} | {median - before:.1f} |")
        before = median


if __name__ == "__main__":
    main()
