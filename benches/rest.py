"""How long a receive takes back to back, and after the process has rested: what a rest costs is not what a copy costs.

    python benches/rest.py [--device cuda:0] [--rounds 150]

Each round sends one tensor (its time is not counted), rests, and receives it until the device is synchronised. Segments
are new each time; leases are in an arena that was registered once. Prints a Markdown table of medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from mmcopy import Receiver, Sender, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.tools.bench.machine import describe
from mmcopy.tools.bench.place import framework_for, place_for
from mmcopy.tools.units import time_text

SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20, "64 MiB": 64 << 20}
RESTS_S = (0.0, 0.001, 0.010)


def measure(send: Callable[[], object], receive: Callable[[object], object], rest_s: float, rounds: int) -> float:
    """Median seconds; the first fifth of the rounds warms up."""
    seconds = []
    for _ in range(rounds):
        message = send()
        PLACE.synchronize()
        if rest_s:
            time.sleep(rest_s)
        begun = time.perf_counter()
        tensor = receive(message)
        PLACE.synchronize()
        seconds.append(time.perf_counter() - begun)
        del tensor
    return statistics.median(seconds[rounds // 5 :])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=150)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-rest-") as directory,
        WorkerEndpoint(directory) as endpoint,
        Receiver(args.device, framework=framework_for(args.device), endpoint=endpoint) as receiver,
        Sender(TransportConfig(mode="shm", shm_min_bytes=0), arena_bytes=256 << 20) as sender,
    ):
        PLACE = place_for(args.device)
        worker = WorkerSpec("bench", labels={"mmcopy_endpoint": endpoint.path})
        sender.connect(worker, timeout_s=60)
        print(describe(args.device), end="\n\n")
        rests = [f"{rest_s * 1e3:g} ms" if rest_s else "none" for rest_s in RESTS_S]
        print("| size | path |" + "".join(f" rest {rest} |" for rest in rests))
        print("| --- | --- |" + " --- |" * len(rests))
        for label, nbytes in SIZES.items():
            array = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
            for path, target in (("lease", worker), ("segment", None)):

                def send(array: np.ndarray = array, target: WorkerSpec | None = target) -> object:
                    return sender.send(array, worker=target)

                times = [measure(send, receiver.receive, rest_s, args.rounds) for rest_s in RESTS_S]
                print(f"| {label} | {path} |" + "".join(f" {time_text(each)} |" for each in times), flush=True)
