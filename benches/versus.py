"""Times two installed versions of mmcopy against each other on one machine, in turn, and prints the ratios.

    pip install --no-deps --target /tmp/before OLD_WHEEL
    pip install --no-deps --target /tmp/after NEW_WHEEL
    python benches/versus.py /tmp/before /tmp/after [--device cuda:0] [--rounds 7]

Each round starts one process per version, in alternating order. A process sends and receives every work back to back,
checks the bytes once, and reports the median seconds of its sends and of its receives (until the device is
synchronised). The table shows, per version, the fastest and the median round, the ratio after / before of the fastest,
and the median of the rounds' own ratios with their range. Some hosts have two paces for seconds at a time: there the
rounds' ratios scatter widely, and the fastest rounds are what compares.
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

WORKS = {  # label: (number of tensors, bytes of each, calls that are timed)
    "1 x 64 KiB": (1, 64 << 10, 600),
    "256 x 64 KiB": (256, 64 << 10, 40),
    "1 x 1 MiB": (1, 1 << 20, 200),
    "1 x 64 MiB": (1, 64 << 20, 20),
    "1 x 256 MiB": (1, 256 << 20, 8),
}
ARENA_BYTES = 1 << 30


def measure(device: str, works: list[str]) -> dict[str, list[float]]:
    """Median seconds of send and receive per work and path. Runs in a process that has one version on its path."""
    import numpy as np

    from mmcopy import Receiver, Sender, TransportConfig, WorkerSpec
    from mmcopy.endpoint import WorkerEndpoint

    if device == "cpu":

        def synchronize() -> None:
            pass
    else:
        import torch

        def synchronize() -> None:
            torch.cuda.synchronize(device)

    found: dict[str, list[float]] = {}
    rng = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-versus-") as directory,
        WorkerEndpoint(directory) as endpoint,
        Receiver(device, framework="numpy" if device == "cpu" else "torch", endpoint=endpoint) as receiver,
        Sender(TransportConfig(mode="auto", shm_min_bytes=0), arena_bytes=ARENA_BYTES) as sender,
        Sender(TransportConfig(mode="shm", shm_min_bytes=0), arena_bytes=0) as stock,
    ):
        worker = WorkerSpec("versus", labels={"mmcopy_endpoint": endpoint.path})
        # What is now `connect` was `prove` until 2026-12.
        (sender.connect if hasattr(sender, "connect") else sender.prove)(worker, timeout_s=60)
        for label in works:
            count, nbytes, calls = WORKS[label]
            arrays = [rng.integers(0, 256, nbytes, np.uint8) for _ in range(count)]
            for path, source, target in (("lease", sender, worker), ("segment", stock, None)):
                sends, receives = [], []
                for call in range(calls + calls // 4 + 2):
                    begun = time.perf_counter()
                    data = (
                        source.send_many(arrays, worker=target) if count > 1 else source.send(arrays[0], worker=target)
                    )
                    sent = time.perf_counter()
                    tensors = receiver.receive(data)
                    synchronize()
                    ended = time.perf_counter()
                    if call == 0:
                        check(data if count > 1 else [data], tensors if count > 1 else [tensors], arrays, path)
                    elif call > calls // 4:
                        sends.append(sent - begun)
                        receives.append(ended - sent)
                    del tensors
                found[f"{label} {path}"] = [statistics.median(sends), statistics.median(receives)]
    return found


def check(sent: list, received: list, arrays: list, path: str) -> None:
    """The tensors came by ``path``, and every byte is right."""
    for data, tensor, array in zip(sent, received, arrays, strict=True):
        if data.path != path:
            raise SystemExit(f"a tensor of {array.nbytes} bytes went by {data.path}, not by {path}")
        host = tensor if isinstance(tensor, type(array)) else tensor.cpu().numpy()
        if not (host == array).all():
            raise SystemExit(f"wrong bytes in a tensor of {array.nbytes} bytes by {path}")


def run(site: str, device: str, works: list[str]) -> dict[str, list[float]]:
    environment = {**os.environ, "PYTHONPATH": site}
    command = [sys.executable, __file__, "--measure", "--device", device, "--works", *works]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if child.returncode:
        raise SystemExit(f"{site}: exit code {child.returncode}\n{child.stderr}")
    found: dict[str, list[float]] = json.loads(child.stdout)
    return found


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
    rounds: list[dict[str, dict[str, list[float]]]] = []
    for number in range(args.rounds):
        order = args.sites if number % 2 == 0 else args.sites[::-1]
        rounds.append({site: run(site, args.device, args.works) for site in order})
    before, after = args.sites
    print(f"{args.rounds} rounds on {args.device}; us: fastest, median round; ratios after / before\n")
    head = "before | after | ratio of fastest | ratio by round"
    print(f"| work | send {head} | receive {head} |")
    print("|" + " --- |" * 9)
    for work in rounds[0][before]:
        cells = []
        for which in (0, 1):
            old = [each[before][work][which] * 1e6 for each in rounds]
            new = [each[after][work][which] * 1e6 for each in rounds]
            ratios = [b / a for a, b in zip(old, new, strict=True)]
            cells += [f"{min(each):.1f}, {statistics.median(each):.1f}" for each in (old, new)]
            cells.append(f"{min(new) / min(old):.2f}")
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        print(f"| {work} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
