"""How many threads write leases fastest here, alone and right behind a torch copy, whose OpenMP threads still spin.

    python benches/writers.py [--threads 4,8,12,16] [--count 8] [--nbytes 16777216] [--rounds 30]

Each round sends ``count`` arrays by one ``send_many`` with each number of threads, in turn; the leases are released
between. "behind torch" sends right after torch has copied 64 MiB. The last row is torch's own copy of the same arrays
into memory that is warm. Prints a Markdown table of medians and fastest rounds; needs torch, and no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from mmcopy import Receiver, Sender, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.tools.bench.machine import cores, describe
from mmcopy.tools.units import bytes_text, time_text

DEFAULT_THREADS = (4, 8, 12, 16)
TORCH_COPY_BYTES = 64 << 20


def wait_until_free(senders: list[Sender]) -> None:
    deadline = time.monotonic() + 20
    while any(sender.leases_out for sender in senders):
        if time.monotonic() > deadline:
            raise SystemExit("leases were not given back within 20 s")
        time.sleep(0.0002)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=lambda text: [int(each) for each in text.split(",")])
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--nbytes", type=int, default=16 << 20)
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    threads = args.threads or sorted({*(n for n in DEFAULT_THREADS if n <= cores()), min(cores(), 16)})
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 256, args.nbytes, np.uint8) for _ in range(args.count)]
    tensors = [torch.from_numpy(array) for array in arrays]
    warm = [torch.ones_like(tensor) for tensor in tensors]
    other, another = (torch.ones(TORCH_COPY_BYTES, dtype=torch.uint8) for _ in range(2))
    total = args.count * args.nbytes

    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="mmcopy-writers-"))
        endpoint = stack.enter_context(WorkerEndpoint(directory))
        receiver = stack.enter_context(Receiver("cpu", framework="numpy", endpoint=endpoint))
        worker = WorkerSpec("bench", labels={"mmcopy_endpoint": endpoint.path})
        senders: list[Sender] = []
        rows: dict[str, Callable[[], Any]] = {}

        def writes(number: int | None) -> Callable[[], Any]:
            config = TransportConfig(mode="shm", shm_min_bytes=0)
            sender = stack.enter_context(Sender(config, num_threads=number, arena_bytes=total + (1 << 20)))
            senders.append(sender)
            sender.connect(worker, timeout_s=60)
            return lambda: sender.send_many(arrays, worker=worker)

        for number in threads:
            rows[f"{number} threads"] = writes(number)
        rows["default"] = writes(None)
        rows["torch"] = lambda: [a.copy_(b) for a, b in zip(warm, tensors, strict=True)]

        alone: dict[str, list[float]] = {label: [] for label in rows}
        behind: dict[str, list[float]] = {label: [] for label in rows}
        for number in range(args.rounds + 2):
            for label, write in rows.items():
                for kept in (alone, behind):
                    if kept is behind:
                        other.copy_(another)
                    begun = time.perf_counter()
                    sent = write()
                    seconds = time.perf_counter() - begun
                    if number >= 2:
                        kept[label].append(seconds)
                    if label != "torch":
                        if any(data.path != "lease" for data in sent):
                            raise SystemExit("a tensor was not sent as a lease: the arena is full or was not taken")
                        receiver.release(sent)
                    wait_until_free(senders)
                    time.sleep(0.002)  # threads of the one before come to rest

    print(describe("cpu"), end="\n\n")
    print(
        f"| {args.count} x {bytes_text(args.nbytes)} written by | alone: median, fastest | GB/s | behind torch | GB/s |"
    )
    print("| --- | --- | --- | --- | --- |")
    for label in rows:
        cells = []
        for kept in (alone, behind):
            median = statistics.median(kept[label])
            cells += [f"{time_text(median)}, {time_text(min(kept[label]))}", f"{total / median / 1e9:.1f}"]
        print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
