"""The threads that copy for the whole process: they stay, no send starts one, some may be refused, a child has none."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from mmcopy import _native
from mmcopy.errors import ConfigError
from tests.rigs.arrays import MIB

LOOK = """
import os, pathlib, time
import numpy as np
from mmcopy import _native

def named(prefix="mmcopy-host-"):
    '''Threads of this process by their number, with the nanoseconds that each has run.'''
    found = {}
    for task in pathlib.Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().startswith(prefix):
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found

def settle(condition, limit_s=20.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, named("")
        time.sleep(0.01)

source = np.random.default_rng(1).integers(0, 256, 64 << 20, np.uint8)
target = np.zeros_like(source)

def copy(num_threads, nbytes=len(source)):
    target[:] = 0
    _native.copy_into(source[:nbytes], target[:nbytes], num_threads=num_threads)
    assert np.array_equal(source[:nbytes], target[:nbytes]) and not target[nbytes:].any()
"""


def run(script: str, *arguments: object, limit_s: float = 120.0) -> None:
    """``script`` in a process of its own; it must end well and write nothing to stderr."""
    warnings = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]  # which is about fork and threads
    command = [sys.executable, *warnings, "-c", LOOK + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_same_threads_serve_one_job_after_the_other() -> None:
    run("""
copy(1)
assert named() == {}
copy(4)
settle(lambda: len(named()) == 3)
before = named()
for num_threads in (4, 2, 3, 4):
    copy(num_threads)
# Each was woken at least once, by a job that it had not been started for.
settle(lambda: all(named()[thread] > ran for thread, ran in before.items()))
assert named().keys() == before.keys()
copy(5)
settle(lambda: len(named()) == 4)
assert named().keys() > before.keys()
""")


def test_threads_are_started_once_up_to_256() -> None:
    run("""
assert _native.start_copy_threads(2) == 2
assert _native.start_copy_threads(1) == 2
assert _native.start_copy_threads(3) == 3
settle(lambda: len(named()) == 3)
assert _native.start_copy_threads(1000) == 256
settle(lambda: len(named()) == 256)
copy(1000)
assert len(named()) == 256
names = {(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()}
assert {f"mmcopy-host-{n}" for n in range(256)} <= names
""")
    for wrong in (0, -1):
        with pytest.raises(ConfigError):
            _native.start_copy_threads(wrong)


def test_a_send_starts_no_thread(tmp_path: pathlib.Path) -> None:
    run(
        """
import sys
from mmcopy import Receiver, Sender, TransportConfig, WorkerEndpoint, WorkerSpec
with (
    WorkerEndpoint(sys.argv[1]) as endpoint,
    Receiver("cpu", framework="numpy", endpoint=endpoint) as receiver,
    Sender(TransportConfig(mode="auto", shm_min_bytes=1), num_threads=3) as sender,
):
    worker = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": str(endpoint.path)})
    sender.connect(worker)
    settle(lambda: len(named()) >= 4)
    before = named("").keys()
    for paths in ("lease", "segment"):
        sent = sender.send_many([source, source[:100_000]], worker=worker if paths == "lease" else None)
        assert {data.path for data in sent} <= {paths, "inline"}
        receiver.release(sent)
        assert named("").keys() == before
""",
        tmp_path / "run",
    )


@pytest.mark.root
def test_refused_threads_leave_the_work_to_the_caller_and_are_tried_again() -> None:
    """A user's limit on processes, which counts threads: two more are there, then none, then enough."""
    run("""
import resource
user = 54_321
def allow(count):
    resource.setrlimit(resource.RLIMIT_NPROC, (count, 1000))
there = len(named(""))
os.setgroups([])
allow(there + 2)
os.setresuid(user, user, user)
copy(8)
settle(lambda: len(named()) == 2)
copy(8)
assert _native.start_copy_threads(8) == 2
allow(there + 4)
settle(lambda: copy(8) or len(named()) == 4)
allow(1000)
settle(lambda: copy(8) or len(named()) == 7)
""")


FORK = """
import signal, threading
stopping = threading.Event()
def load(seed):
    ours = bytes([seed]) * (3 << 20)
    mine = bytearray(len(ours))
    while not stopping.is_set():
        _native.copy_into(ours, mine, num_threads=4)
        assert mine == ours
loads = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
for thread in loads:
    thread.start()
settle(lambda: len(named()) == 3)
ours, mine = bytes(range(256)) * (1 << 13), bytearray(1 << 21)
for n in range(30):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(30)
            inherited = named()
            _native.copy_into(ours, mine, num_threads=3)
            settle(lambda: len(named()) == 2)  # a thread names itself
            code = 7 if inherited == {} and mine == ours else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7, n
stopping.set()
for thread in loads:
    thread.join(60)
    assert not thread.is_alive()
"""


def test_children_forked_while_others_copy_start_their_own() -> None:
    run(FORK)


def test_a_copy_that_one_thread_does_starts_none() -> None:
    run(f"copy(8, {MIB // 4}); copy(1); assert named() == {{}}")
