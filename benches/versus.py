"""Times two installed versions of mmcopy against each other on one machine, in turn, and prints the ratios.

    pip install --no-deps --target /tmp/before OLD_WHEEL
    pip install --no-deps --target /tmp/after NEW_WHEEL
    python benches/versus.py /tmp/before /tmp/after [--device cuda:0] [--rounds 7]

Each round starts one process per version, in alternating order. A process sends and receives every work back to back,
checks the bytes once, and reports medians: of its sends and of its receives (until the device is synchronised), of
"streamed" from the call of ``send_streaming`` until all is received and synchronised. On a GPU it also times one pinned
H2D of the same bytes, in the same turn. "behind torch" sends and receives right after torch has copied 64 MiB on the
CPU, while its OpenMP threads still spin.

The table shows, per version, the fastest and the median round, the ratio after / before of the fastest, the median of
the rounds' own ratios with their range, and the speed over the pinned H2D of the same process. Some hosts have two
paces for seconds at a time: there the rounds' ratios scatter widely, and the fastest rounds are what compares.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

WORKS = {  # label: (number of tensors, bytes of each, calls that are timed)
    "1 x 64 KiB": (1, 64 << 10, 600),
    "256 x 64 KiB": (256, 64 << 10, 40),
    "1 x 1 MiB": (1, 1 << 20, 200),
    "1 x 16 MiB": (1, 16 << 20, 60),
    "8 x 16 MiB": (8, 16 << 20, 12),
    "1 x 64 MiB": (1, 64 << 20, 20),
    "1 x 256 MiB": (1, 256 << 20, 8),
}
STREAMED_FROM_BYTES = 1 << 20
BEHIND_TORCH = "8 x 16 MiB"
TORCH_COPY_BYTES = 64 << 20
ARENA_BYTES = 1 << 30
H2D = "pinned H2D"

Figures = dict[str, float]
"""Median seconds by "work, path, what", and by "work, pinned H2D"."""


class Measuring:
    """One process's measurements of the version of mmcopy that is on its path."""

    def __init__(self, device: str) -> None:
        import numpy as np

        from mmcopy import Receiver, Sender, TransportConfig, WorkerSpec
        from mmcopy.endpoint import WorkerEndpoint

        self.np = np
        try:
            import torch
        except ImportError:
            torch = None
        self.torch: Any = torch
        self.device = device
        self.figures: Figures = {}
        self._open = ExitStack()
        opened = self._open.enter_context
        endpoint = opened(WorkerEndpoint(opened(tempfile.TemporaryDirectory(prefix="mmcopy-versus-"))))
        framework = "numpy" if device == "cpu" else "torch"
        self.receiver = opened(Receiver(device, framework=framework, endpoint=endpoint))
        self.sender = opened(Sender(TransportConfig(mode="auto", shm_min_bytes=0), arena_bytes=ARENA_BYTES))
        self.stock = opened(Sender(TransportConfig(mode="shm", shm_min_bytes=0), arena_bytes=0))
        self.worker = WorkerSpec("versus", labels={"mmcopy_endpoint": endpoint.path})
        # What is now `connect` was `prove` until 2026-12.
        connect = self.sender.connect if hasattr(self.sender, "connect") else self.sender.prove
        connect(self.worker, timeout_s=60)

    def close(self) -> None:
        self._open.close()

    def synchronize(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize(self.device)

    def run(self, label: str) -> None:
        """Measure one work on every path."""
        count, nbytes, calls = WORKS[label]
        rng = self.np.random.default_rng(0)
        arrays = [rng.integers(0, 256, nbytes, self.np.uint8) for _ in range(count)]
        self.send_and_receive(label, "lease", arrays, calls, source=self.sender, worker=self.worker)
        self.send_and_receive(label, "segment", arrays, calls, source=self.stock, worker=None)
        if nbytes >= STREAMED_FROM_BYTES:
            self.stream(label, arrays, calls)
        if label == BEHIND_TORCH and self.torch is not None:
            first, second = (self.torch.ones(TORCH_COPY_BYTES, dtype=self.torch.uint8) for _ in range(2))
            self.send_and_receive(
                label,
                "lease behind torch",
                arrays,
                calls,
                source=self.sender,
                worker=self.worker,
                first=lambda: first.copy_(second),
            )
        if self.device != "cpu":
            self.copy_pinned(label, count * nbytes, calls)

    def send_and_receive(
        self,
        label: str,
        path: str,
        arrays: list[Any],
        calls: int,
        *,
        source: Any,
        worker: Any,
        first: Callable[[], object] = lambda: None,
    ) -> None:
        sends, receives = [], []
        for call in range(calls + calls // 4 + 2):
            first()
            begun = time.perf_counter()
            if len(arrays) > 1:
                data = source.send_many(arrays, worker=worker)
            else:
                data = [source.send(arrays[0], worker=worker)]
            sent = time.perf_counter()
            tensors = self.receiver.receive(data)
            self.synchronize()
            ended = time.perf_counter()
            if call == 0:
                check(data, tensors, arrays, path.split(" ")[0])
            elif call > calls // 4:
                sends.append(sent - begun)
                receives.append(ended - sent)
            del tensors
        self.figures[f"{label}, {path}, send"] = statistics.median(sends)
        self.figures[f"{label}, {path}, receive"] = statistics.median(receives)

    def stream(self, label: str, arrays: list[Any], calls: int) -> None:
        totals = []
        for call in range(calls + calls // 4 + 2):
            begun = time.perf_counter()
            streams = [self.sender.send_streaming(array, worker=self.worker) for array in arrays]
            data = [stream.data for stream in streams]
            tensors = self.receiver.receive(data)
            self.synchronize()
            ended = time.perf_counter()
            for stream in streams:
                stream.wait(60)
            if call == 0:
                check(data, tensors, arrays, "lease")
            elif call > calls // 4:
                totals.append(ended - begun)
            del tensors
        self.figures[f"{label}, streamed, both"] = statistics.median(totals)

    def copy_pinned(self, label: str, nbytes: int, calls: int) -> None:
        host = self.torch.ones(nbytes, dtype=self.torch.uint8, pin_memory=True)
        target = self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)
        times = []
        for _ in range(calls + 2):
            begun = time.perf_counter()
            target.copy_(host, non_blocking=True)
            self.synchronize()
            times.append(time.perf_counter() - begun)
        self.figures[f"{label}, {H2D}"] = statistics.median(times[2:])


def measure(device: str, works: list[str]) -> Figures:
    """Runs in a process that has one version on its path."""
    measuring = Measuring(device)
    try:
        for label in works:
            measuring.run(label)
    finally:
        measuring.close()
    return measuring.figures


def check(sent: list[Any], received: list[Any], arrays: list[Any], path: str) -> None:
    """The tensors came by ``path``, and every byte is right."""
    for data, tensor, array in zip(sent, received, arrays, strict=True):
        if data.path != path:
            raise SystemExit(f"a tensor of {array.nbytes} bytes went by {data.path}, not by {path}")
        host = tensor if isinstance(tensor, type(array)) else tensor.cpu().numpy()
        if not (host == array).all():
            raise SystemExit(f"wrong bytes in a tensor of {array.nbytes} bytes by {path}")


def run(site: str, device: str, works: list[str]) -> Figures:
    environment = {**os.environ, "PYTHONPATH": site}
    command = [sys.executable, __file__, "--measure", "--device", device, "--works", *works]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if child.returncode:
        raise SystemExit(f"{site}: exit code {child.returncode}\n{child.stderr}")
    figures: Figures = json.loads(child.stdout)
    return figures


def row(what: str, rounds: list[tuple[Figures, Figures]]) -> str:
    """One line of the table: a figure of both versions in every round."""
    versions = [[each[which][what] * 1e6 for each in rounds] for which in (0, 1)]
    before, after = versions
    ratios = [b / a for a, b in zip(before, after, strict=True)]
    cells = [f"{min(each):.1f}, {statistics.median(each):.1f}" for each in versions]
    cells += [
        f"{min(after) / min(before):.2f}",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    ]
    h2d = f"{what.partition(', ')[0]}, {H2D}"
    if h2d in rounds[0][0] and not what.endswith(", send"):
        cells += [
            f"{statistics.median(each[which][h2d] / each[which][what] for each in rounds):.2f}" for which in (0, 1)
        ]
    else:
        cells += ["-", "-"]
    return f"| {what} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sites", nargs="*", metavar="SITE", help="two folders, each with a version of mmcopy")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.device, args.works)))
        return
    if len(args.sites) != 2:
        parser.error("want two folders: before and after")
    rounds: list[tuple[Figures, Figures]] = []
    for number in range(args.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found = {which: run(args.sites[which], args.device, args.works) for which in order}
        rounds.append((found[0], found[1]))
    print(f"{args.rounds} rounds on {args.device}; us: fastest, median round; ratios after / before\n")
    print(f"| work | before | after | ratio of fastest | ratio by round | before, of {H2D} | after, of {H2D} |")
    print("|" + " --- |" * 7)
    for what in rounds[0][0]:
        print(row(what, rounds), flush=True)


if __name__ == "__main__":
    main()
