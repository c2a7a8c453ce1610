"""A program that is a sender or a worker: ``tests.rigs.fault_process sender|worker OPTIONS``, driven by fault_rig.py.

Takes one JSON command a line, ``[number, name, arguments]``, and runs it on a thread; answers one JSON line each.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import os
import pathlib
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mmcopy import Inline, Receiver, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec, _native
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import ClosedError

from .arrays import random_bytes

CHILD_LIMIT_S = 20.0


def packed(data: TensorData) -> dict[str, Any]:
    """As JSON."""
    payload = data.payload
    if isinstance(payload, Inline):
        return {"path": "inline", "nbytes": data.nbytes, "bytes": base64.b64encode(bytes(payload.data)).decode()}
    fields = [payload.name, payload.offset, payload.nbytes, payload.owner_id]
    return {"path": data.path, "nbytes": data.nbytes, "handle": fields}


def unpacked(told: dict[str, Any]) -> TensorData:
    payload: Inline | ShmHandle
    payload = ShmHandle(*told["handle"]) if "handle" in told else Inline(base64.b64decode(told["bytes"]))
    return TensorData("uint8", (told["nbytes"],), payload)


class Role:
    """What both can do."""

    on_main_thread = ("fork",)
    then_stops = ("stream",)

    def fork(self, stays: bool) -> tuple[int, list[str]]:
        """A child that tries everything; its pid and what went wrong in it. ``stays``: it lives until it is killed."""
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(0)
            os.close(1)
            problems = kept_by_a_child() + self.problems_of_a_child()
            os.write(theirs, json.dumps(problems).encode() + b"\n")
            os.close(theirs)
            if stays:
                threading.Event().wait(120)
            sys.exit(0)
        os.close(theirs)
        ready, _, _ = select.select([ours], [], [], CHILD_LIMIT_S)
        said = json.loads(os.read(ours, 65536) or b'["it died"]') if ready else ["it hangs"]
        os.close(ours)
        if not ready:
            os.kill(child, 9)
        if not (ready and stays):
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said += [f"it ended with {status}"] if status else []
        return child, said

    def shared_files(self) -> list[str]:
        return os.listdir("/dev/shm")  # noqa: PTH208

    def problems_of_a_child(self) -> list[str]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def kept_by_a_child() -> list[str]:
    """Shared memory and files of ours that this process still has."""
    maps = {line.split(maxsplit=5)[-1].strip() for line in pathlib.Path("/proc/self/maps").read_text().splitlines()}
    files = {str(link.readlink()) for link in pathlib.Path("/proc/self/fd").iterdir() if link.is_symlink()}
    ours = re.compile(r"/memfd:mmcopy.*|/dev/shm/.*mmcopy-.*|socket:.*")
    return [f"it keeps {name}" for name in sorted(maps | files) if ours.fullmatch(name)]


def frame_name(frame: Any) -> str:
    return str(frame.f_code.co_name)


def not_refused(calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Which of the calls do not raise ClosedError."""
    problems = []
    for name, call in calls.items():
        try:
            problems.append(f"{name} gives {call()!r}")
        except ClosedError:
            pass
        except Exception as error:
            problems.append(f"{name} raises {error!r}")
    return problems


class SenderRole(Role):
    def __init__(self, *, mode: str = "auto", probe_max_age_s: float = 15.0, **options: Any) -> None:
        config = TransportConfig(mode=mode, shm_min_bytes=1, probe_max_age_s=probe_max_age_s)
        self.sender = Sender(config, num_threads=2, **options)
        self.specs: dict[tuple[str, str], WorkerSpec] = {}
        self.sent: dict[str, TensorData] = {}
        self.streams: dict[str, Any] = {}

    def connect(self, worker: list[str]) -> str | None:
        found = self.sender.connect(self._spec(worker), timeout_s=20)
        return None if found.reason is None else str(found.reason)

    def send(self, nbytes: int, seed: int, workers: list[list[str]]) -> dict[str, Any]:
        return packed(self.sender.send(random_bytes(nbytes, seed), worker=self._target(workers)))

    def send_many(self, sizes: list[int], seed: int, workers: list[list[str]]) -> list[dict[str, Any]]:
        arrays = [random_bytes(nbytes, seed + n) for n, nbytes in enumerate(sizes)]
        return [packed(data) for data in self.sender.send_many(arrays, worker=self._target(workers))]

    def stream(self, nbytes: int, seed: int, workers: list[list[str]]) -> dict[str, Any]:
        """Begin to send. The whole process stands still once this is answered, wherever the writing is."""
        array = random_bytes(nbytes, seed)
        sending = self.sender.send_streaming(array, worker=self._target(workers))
        told = packed(sending.data)
        self.streams[told["handle"][0]] = sending
        return told

    def wait(self, name: str) -> None:
        self.streams.pop(name).wait(20)

    def cancel(self, told: dict[str, Any]) -> bool:
        return self.sender.cancel(unpacked(told))

    def worker_gone(self, url: str) -> int:
        return self.sender.mark_down(url)

    def waiting(self) -> int:
        """Sends that found the arena full and wait: threads that are asleep inside ``Sender._lease``."""
        return sum(frame_name(frame) == "_lease" for frame in sys._current_frames().values())

    def statistics(self) -> dict[str, Any]:
        arena = self.sender.arena
        return {} if arena is None else arena.statistics()

    def metrics(self) -> dict[str, Any]:
        return self.sender.metrics.snapshot()

    def close(self) -> None:
        self.sender.close()

    def problems_of_a_child(self) -> list[str]:
        sender = self.sender
        specs = list(self.specs.values())
        array = random_bytes(100, 0)
        problems = not_refused(
            {
                "send": lambda: sender.send(array, worker=specs[0]),
                "send inline": lambda: sender.send(array),
                "send_many": lambda: sender.send_many([array], worker=specs),
                "send_streaming": lambda: sender.send_streaming(array, worker=specs[0]),
                "reserve": lambda: sender.reserve((3,), "uint8", worker=specs[0]),
                "connect": lambda: sender.connect(specs[0]),
            }
        )
        if sender.leases_out:
            problems.append("leases are out")
        for data in self.sent.values():  # a child that fails in the parent's guard takes nothing of the parent's back
            try:
                with sender.guard(data):
                    raise KeyError
            except KeyError:
                pass
            problems += not_refused({"cancel": functools.partial(sender.cancel, data)})
            sender.mark_down(next(iter(self.specs.values())))
        sender.close()
        return problems

    def send_and_note(self, nbytes: int, seed: int, workers: list[list[str]]) -> dict[str, Any]:
        """What a child then tries to take back."""
        data = self.sender.send(random_bytes(nbytes, seed), worker=self._target(workers))
        told = packed(data)
        self.sent[told["handle"][0]] = data
        return told

    def _spec(self, worker: list[str]) -> WorkerSpec:
        url, path = worker
        return self.specs.setdefault((url, path), WorkerSpec(url, labels={"mmcopy_endpoint": path}))

    def _target(self, workers: list[list[str]]) -> Any:
        specs = [self._spec(worker) for worker in workers]
        return specs[0] if len(specs) == 1 else specs


class WorkerRole(Role):
    def __init__(self, *, directory: str, shm_dir: str, timeout_s: float = 60.0) -> None:
        self.endpoint = WorkerEndpoint(directory, shm_dir=shm_dir)
        self.receiver = Receiver(
            "cpu", framework="numpy", shm_dir=shm_dir, endpoint=self.endpoint, num_threads=2, timeout_s=timeout_s
        )
        self.scribbling = threading.Event()
        self.watched: dict[str, _native.Lease] = {}
        self.noted: list[TensorData] = []
        self.views: list[np.ndarray[Any, Any]] = []

    def note(self, items: list[dict[str, Any]]) -> None:
        """What a child then tries to receive and to release."""
        self.noted = [unpacked(told) for told in items]

    def view(self, told: dict[str, Any]) -> None:
        self.views.append(self.receiver.view(unpacked(told)))

    def viewed(self, seed: int) -> bool:
        """Whether the bytes of the last view are right; it ends."""
        array = self.views.pop()
        return array.tobytes() == random_bytes(len(array), seed).tobytes()

    def path(self) -> str:
        return self.endpoint.path

    def receive(self, items: list[dict[str, Any]], seeds: list[int], pause_s: float = 0.0) -> bool:
        """Whether all bytes of the request were right."""
        arrays = self.receiver.receive([unpacked(told) for told in items])
        time.sleep(pause_s)
        pairs = zip(arrays, seeds, strict=True)
        return all(array.tobytes() == random_bytes(len(array), seed).tobytes() for array, seed in pairs)

    def release(self, told: dict[str, Any]) -> int:
        return self.receiver.release(unpacked(told))

    def watch(self, told: dict[str, Any]) -> None:
        """Hold a lease."""
        arena = self.endpoint.native.find_arena(_native.lease_arena_id(*told["handle"]))
        assert arena is not None
        self.watched[told["handle"][0]] = arena.claim(*told["handle"])

    def written(self, name: str) -> int:
        """How far a lease that is held was written."""
        return self.watched[name].written()

    def let_go(self, name: str, seed: int) -> bool:
        """Whether all bytes of a lease that was held came, and right."""
        lease = self.watched.pop(name)
        lease.wait_written(lease.nbytes, 20)
        is_right = bytes(lease) == random_bytes(lease.nbytes, seed).tobytes()
        return lease.release() and is_right

    def forge_release(self, name: str) -> None:
        """Say that we are done with a lease that we read."""
        address, value = self.watched[name].release_flag
        ctypes.c_uint32.from_address(address).value = value

    def held(self) -> list[int]:
        return [arena.num_held for arena in self.endpoint.native.arenas()]

    def metrics(self) -> dict[str, Any]:
        return self.receiver.metrics.snapshot()

    def endpoint_statistics(self) -> dict[str, Any]:
        return self.endpoint.statistics()

    def scribble(self, seed: int) -> None:
        """Write over all our own marks, again and again, until :meth:`stop_scribbling`."""
        maps = self.endpoint.native.arenas()
        random = np.random.default_rng(seed)
        self.scribbling.set()

        def run() -> None:
            while self.scribbling.is_set():
                for arena in maps:
                    # Small numbers, too: generations that there are.
                    words = random.integers(0, random.choice([50, 2**32]), arena.flags_nbytes // 4, dtype=np.uint32)
                    ctypes.memmove(arena.flags_address, words.ctypes.data, arena.flags_nbytes)

        threading.Thread(target=run, name="scribble").start()

    def stop_scribbling(self) -> None:
        self.scribbling.clear()

    def problems_of_a_child(self) -> list[str]:
        data = TensorData("uint8", (1,), Inline(b"a"))
        problems = not_refused(
            {
                "receive": lambda: self.receiver.receive(data),
                "receive_async": lambda: self.receiver.receive_async(data),
                "statistics": self.endpoint.statistics,
            }
        )
        for item in self.noted:
            problems += not_refused(
                {
                    f"release of {item.path}": functools.partial(self.receiver.release, item),
                    f"receive of {item.path}": functools.partial(self.receiver.receive, item),
                    f"receive of {item.path} with a wrong out": functools.partial(
                        self.receiver.receive, [item], out=[np.empty(1), np.empty(1)]
                    ),
                    f"view of {item.path}": functools.partial(self.receiver.view, item),
                }
            )
        for lease in self.watched.values():
            problems += not_refused(
                {
                    "written": lease.written,
                    "wait_written": functools.partial(lease.wait_written, 1, 1.0),
                    "a buffer": functools.partial(memoryview, lease),
                    "release": lease.release,
                    "defer_release": lease.defer_release,
                }
            )
        if any(view.any() for view in self.views):
            problems.append("a view still has the parent's bytes")
        if self.endpoint.native.arenas():
            problems.append("it has arenas")
        self.close()
        return problems

    def close(self) -> None:
        self.scribbling.clear()
        self.receiver.close()
        self.endpoint.close()


def main() -> None:
    role: Any = {"sender": SenderRole, "worker": WorkerRole}[sys.argv[1]](**json.loads(sys.argv[2]))
    random_bytes(1, 0)  # loads what is loaded late
    with ThreadPoolExecutor(8) as pool:

        def run(number: int, name: str, arguments: dict[str, Any]) -> None:
            try:
                answer: dict[str, Any] = {"number": number, "result": getattr(role, name)(**arguments)}
            except Exception as error:
                answer = {"number": number, "error": [type(error).__name__, str(error)]}
            line = json.dumps(answer).encode() + b"\n"
            with writing:
                while line:
                    line = line[os.write(1, line) :]
                if name in role.then_stops and "result" in answer:
                    os.kill(os.getpid(), signal.SIGSTOP)

        writing = threading.Lock()
        for line in sys.stdin.buffer:
            number, name, arguments = json.loads(line)
            if name in role.on_main_thread:
                run(number, name, arguments)
            else:
                pool.submit(run, number, name, arguments)
    role.close()


if __name__ == "__main__":
    main()
