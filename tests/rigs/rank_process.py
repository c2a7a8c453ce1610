"""One rank of a group, as a process of its own: ``python -m tests.rigs.rank_process STORE_FILE RANK SIZE``.

Reads one command a line from stdin, a JSON object whose ``do`` names one of the functions below, and answers with one
line. Ends with its stdin. An error is an answer too.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mmcopy import (
    Inline,
    MmcopyError,
    ParallelOptions,
    Receiver,
    Sender,
    ShmHandle,
    TensorData,
    TransportConfig,
    _native,
    shm_namespace_id,
)
from mmcopy.endpoint import WorkerEndpoint

from . import rank_tokenspeed
from .ranks import as_json, told, wanted

receivers: dict[str, Receiver] = {}
senders: dict[str, Sender] = {}
groups: dict[str, Any] = {}
endpoints: dict[str, WorkerEndpoint] = {}


def item_of(given: dict[str, Any]) -> TensorData:
    payload: Any = Inline(bytes.fromhex(given["inline"])) if "inline" in given else ShmHandle(*given["handle"])
    return TensorData(given["dtype"], tuple(given["shape"]), payload)


def bytes_read() -> int:
    """What this process has read from files, pread included."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise AssertionError("no rchar")


def state() -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208
        "threads": int(status["Threads"]),
        "rss_kib": int(status["VmRSS"].split()[0]),
    }


def make(command: dict[str, Any]) -> dict[str, Any]:
    """A receiver on the whole group; with ``endpoint``, a folder, one that senders hand their arenas to."""
    options = dict(command.get("options", {}))
    if "parallel" in command:
        options["parallel"] = ParallelOptions(**command["parallel"])
    for key in ("group", "cpu_group"):
        if key in command:
            options[key] = groups.get(command[key], command[key])
    options.setdefault("group", dist.group.WORLD)
    answer = {}
    if "endpoint" in command:
        if command["endpoint"] not in endpoints:
            endpoints[command["endpoint"]] = WorkerEndpoint(command["endpoint"])
        options["endpoint"] = endpoints[command["endpoint"]]
        answer["endpoint"] = options["endpoint"].path
    try:
        receivers[command["name"]] = Receiver(command.get("device", "cpu"), **options)
    except MmcopyError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return answer


def close(command: dict[str, Any]) -> dict[str, Any]:
    receivers.pop(command["name"]).close()
    return {}


def group(command: dict[str, Any]) -> dict[str, Any]:
    """A further process group."""
    groups[command["name"]] = dist.new_group(command.get("ranks"), backend=command.get("backend", "gloo"))
    return {}


def receive(command: dict[str, Any]) -> dict[str, Any]:
    """Receive, after ``delay_s``. With ``cut`` a hostile peer truncates that file just before this rank reads."""
    receiver = receivers[command["receiver"]]
    time.sleep(command.get("delay_s", 0))
    items = [item_of(each) for each in command["items"]]
    out = None
    if command.get("out"):
        out = [torch.zeros(item.shape, dtype=getattr(torch, item.dtype)) for item in items]
        if command["out"] == "wrong":
            out[0] = torch.zeros(1, dtype=torch.float64)
    before, started = bytes_read(), time.monotonic()
    try:
        with contextlib.ExitStack() as stack:
            if "cut" in command:
                stack.enter_context(cutting(receiver, command["cut"]))
            if "die_reading" in command:
                destination: Any = receiver.destination
                destination.fill = lambda *_, **__: die({})
            if "owners" in command:
                tensors = receiver.receive_owned(items, command["owners"])
            else:
                tensors = receiver.receive(items, out=out)
    except MmcopyError as error:
        return {
            "error": type(error).__name__,
            "message": str(error),
            "cause": type(error.__cause__).__name__,
            "seconds": time.monotonic() - started,
        }
    if out is not None:
        assert all(a is b for a, b in zip(tensors, out, strict=True))
    return {
        "tensors": [None if tensor is None else told(tensor) for tensor in tensors],
        "read": bytes_read() - before,
        "metrics": receiver.metrics.snapshot(),
    }


@contextlib.contextmanager
def cutting(receiver: Receiver, path: str) -> Iterator[None]:
    """The file at ``path`` loses its second half between the agreement and this rank's reading."""
    destination: Any = receiver.destination
    fill = destination.fill
    with Path(path).open("r+b") as file:

        def cut_and_read(*args: Any, **options: Any) -> None:
            file.truncate(os.fstat(file.fileno()).st_size // 2)
            fill(*args, **options)

        destination.fill = cut_and_read
        try:
            yield
        finally:
            del destination.fill


def receive_async(command: dict[str, Any]) -> dict[str, Any]:
    try:
        receivers[command["receiver"]].receive_async([item_of(each) for each in command["items"]])
    except MmcopyError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {}


def many(command: dict[str, Any]) -> dict[str, Any]:
    """Thousands of small receives, of a segment and an inline tensor each; rank 0 writes the segments one ahead."""
    receiver, shm_dir, count = receivers[command["receiver"]], command["shm_dir"], command["count"]

    def write(n: int) -> None:
        if dist.get_rank() == 0:
            _native.write_segment(shm_dir, f"smg-tokenspeed-many-{n}", np.full(4096, n % 251, np.uint8))

    states, wrong = [], 0
    write(0)
    dist.barrier()
    gc.disable()  # what only a collection would free counts as growth
    for n in range(count):
        if n + 1 < count:
            write(n + 1)
        segment = TensorData("uint8", (4096,), ShmHandle(f"smg-tokenspeed-many-{n}", 0, 4096))
        got, grid = receiver.receive([segment, TensorData("int64", (), Inline(n.to_bytes(8, "little")))])
        wrong += int(got[4095]) != n % 251 or int(grid) != n
        if n in (count // 10, count - 1):
            states.append(state())
    gc.enable()
    return {"wrong": wrong, "states": states}


def many_failing(command: dict[str, Any]) -> dict[str, Any]:
    """Receives that fail on every rank, each with a MiB of its own, and no garbage collection."""
    receiver = receivers[command["receiver"]]
    missing = TensorData("uint8", (4,), ShmHandle(command["name"], 0, 4))
    states, kinds = [], set()
    gc.disable()
    for n in range(command["count"]):
        try:
            receiver.receive([TensorData("uint8", (1 << 20,), Inline(b"x" * (1 << 20))), missing])
        except MmcopyError as error:
            kinds.add(type(error).__name__)
        if n in (9, command["count"] - 1):
            states.append(state())
    gc.enable()
    return {"states": states, "errors": list(kinds)}


def publish(command: dict[str, Any]) -> dict[str, Any]:
    """Random bytes of these sizes in segments of this rank's own /dev/shm."""
    sender = senders.setdefault("", Sender(TransportConfig(mode="shm", shm_min_bytes=0)))
    arrays = [np.random.default_rng(n).integers(0, 256, n, np.uint8) for n in command["sizes"]]
    return {"items": [as_json(sender.send(array)) for array in arrays], "told": [wanted(a, "uint8") for a in arrays]}


def surroundings(command: dict[str, Any]) -> dict[str, Any]:
    """What this rank sees: its /dev/shm, what is in it, and what its network has sent."""
    sent = sum(int(each.read_text()) for each in Path("/sys/class/net").glob("*/statistics/tx_bytes"))
    left = sorted(path.name for path in Path("/dev/shm").iterdir() if path.suffix != ".lock")
    links = sorted(path.name for path in Path("/sys/class/net").iterdir())
    return {"shm": shm_namespace_id(), "left": left, "sent": sent, "links": links}


def tell_state(command: dict[str, Any]) -> dict[str, Any]:
    return state()


def die(command: dict[str, Any]) -> dict[str, Any]:
    """Die after ``delay_s`` without a word. Answers nothing."""
    time.sleep(command.get("delay_s", 0))
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def main() -> None:
    store, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no answer
    backend = os.environ.get("RANK_BACKEND", "gloo")
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            do = command["do"]
            answer = (globals().get(do) or getattr(rank_tokenspeed, do))(command)
        except Exception as error:
            answer = {"crash": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    for each in [*receivers.values(), *senders.values(), *rank_tokenspeed.transports, *endpoints.values()]:
        each.close()
    with contextlib.suppress(RuntimeError):  # after the death of a peer
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
