"""fork under load: children own nothing, hang nowhere, and keep neither side alive."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mmcopy import Inline, Receiver, TensorData, TransportConfig, WorkerSpec, _native
from mmcopy import Sender as PlainSender
from mmcopy.endpoint import SenderLink, WorkerEndpoint
from mmcopy.errors import ClosedError
from mmcopy.send.leases import StreamingSend
from tests.rigs.arrays import MIB
from tests.rigs.fault_rig import LIMIT_S, Failed, Host, Sender, Worker, host
from tests.rigs.waiting import settle

__all__ = ["host"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@contextlib.contextmanager
def load(sender: Sender, *workers: Worker) -> Iterator[None]:
    """Round trips on two threads a worker meanwhile; every byte must be right."""
    stopping = threading.Event()
    problems: list[str] = []
    rounds: list[int] = []

    def run(worker: Worker, first_seed: int) -> None:
        seed = first_seed
        while not stopping.is_set():
            seed += 1
            nbytes = 1 + seed * 7919 % 60_000
            told = sender.send(worker, nbytes=nbytes, seed=seed)
            if not worker.receive(told, seeds=[seed]):
                problems.append(f"{told['path']} of {nbytes} bytes with wrong bytes")
            rounds.append(nbytes)

    threads = [
        threading.Thread(target=run, args=(worker, 10_000 * n))
        for n, worker in enumerate(worker for worker in workers for _ in range(2))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert problems == []
    assert rounds


def is_alive(pid: int) -> bool:
    """And no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Writing:
    """The parent's writing of a stream, which goes on until a test says so."""

    is_over = False

    def done(self) -> bool:
        return self.is_over

    def wait(self, timeout_s: float) -> bool:
        return self.is_over


def test_children_under_load_own_nothing_and_hang_nowhere(host: Host) -> None:
    workers = [host.worker(f"grpc://{n}") for n in range(2)]
    sender = host.sender(*workers, arena_bytes=8 * MIB)
    lease = sender.ask("send_and_note", nbytes=5000, seed=1, workers=[workers[0].address])
    held = sender.ask("send_and_note", nbytes=6000, seed=3, workers=[worker.address for worker in workers])
    assert (lease["path"], held["path"]) == ("lease", "lease")
    with load(sender, *workers):
        for _ in range(8):
            for process in (sender, workers[0]):
                _, problems = process.ask("fork", stays=False)
                assert problems == []
    assert workers[0].receive(lease, held, seeds=[1, 3])
    assert workers[1].receive(held, seeds=[3])
    sender.check_books()


def test_a_child_takes_no_segment_of_its_parent_back(host: Host) -> None:
    worker = host.worker("grpc://w")
    sender = host.sender(worker, arena_bytes=0)
    told = sender.ask("send_and_note", nbytes=5000, seed=1, workers=[worker.address])
    assert told["path"] == "segment"
    assert sender.ask("fork", stays=False)[1] == []
    assert worker.receive(told, seeds=[1])


def test_a_child_takes_nothing_that_its_parent_was_handed(host: Host) -> None:
    worker = host.worker("grpc://w")
    leases = host.sender(worker, arena_bytes=8 * MIB)
    segments = host.sender(worker, arena_bytes=0)
    by_lease, viewed, watched = (leases.send(worker, nbytes=5000, seed=seed) for seed in (1, 2, 3))
    by_segment = segments.send(worker, nbytes=5000, seed=4)
    assert [by_lease["path"], by_segment["path"]] == ["lease", "segment"]
    worker.ask("note", items=[by_lease, by_segment])
    worker.ask("view", told=viewed)
    worker.ask("watch", told=watched)
    assert worker.ask("fork", stays=False)[1] == []
    assert worker.receive(by_lease, by_segment, seeds=[1, 4])
    assert worker.ask("viewed", seed=2)
    assert worker.ask("let_go", name=watched["handle"][0], seed=3)
    leases.check_books()


def test_a_receive_under_way_is_the_parents(tmp_path: pathlib.Path, shm_dir: pathlib.Path) -> None:
    """One that has not begun, inherited: the child neither waits for it for ever nor removes its segments."""
    with (
        Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver,
        PlainSender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir) as sender,
    ):
        begun, go_on = threading.Semaphore(0), threading.Event()
        receive = receiver._receive

        def held(*arguments: Any) -> Any:
            begun.release()
            assert go_on.wait(LIMIT_S)
            return receive(*arguments)

        receiver._receive = held  # type: ignore[method-assign]
        pending = [receiver.receive_async(sender.send(bytes(range(n, n + 9)))) for n in range(3)]
        for _ in range(2):
            assert begun.acquire(timeout=LIMIT_S)
        child = os.fork()
        if child == 0:
            problems = 0
            for each in pending:
                for call in (each.cancel, each.wait, each.done, lambda: each.settle(1.0)):  # noqa: B023
                    try:
                        call()
                        problems += 1
                    except ClosedError:
                        pass
            receiver.close()
            os._exit(problems)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go_on.set()
        assert [each.wait(LIMIT_S).tobytes() for each in pending] == [bytes(range(n, n + 9)) for n in range(3)]


def test_children_that_live_on_keep_neither_side_alive(host: Host) -> None:
    victim, witness = host.worker("grpc://victim"), host.worker("grpc://witness")
    sender = host.sender(victim, witness, arena_bytes=8 * MIB)
    unread = sender.send(victim, witness, nbytes=50_000, seed=1)
    segment_sender = host.sender(witness, arena_bytes=0)
    left = segment_sender.send(witness, nbytes=50_000, seed=2)
    children = []
    try:
        with load(sender, victim, witness):
            for process in (sender, victim, segment_sender):
                child, problems = process.ask("fork", stays=True)
                children.append(child)
                assert problems == []
        victim.kill()
        assert settle(lambda: sender.ask("statistics")["consumers"] == 1)
        assert witness.receive(unread, seeds=[1])
        sender.check_books()
        lost = sender.send(witness, nbytes=50_000, seed=3)
        sender.kill()
        assert settle(lambda: witness.ask("held") == [])
        with pytest.raises(Failed, match="LeaseUnknownArenaError"):
            witness.receive(lost, seeds=[3])
        # The lock of a killed sender is free, too: the next one removes its segments.
        segment_sender.kill()
        heir = host.sender(witness, arena_bytes=0)
        assert settle(lambda: left["handle"][0] not in heir.ask("shared_files"))
        with pytest.raises(Failed, match="SegmentNotFoundError"):
            witness.receive(left, seeds=[2])
        assert all(is_alive(child) for child in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert settle(lambda: not any(is_alive(child) for child in children))


def test_a_child_forked_during_a_hand_over_does_not_keep_the_worker_alive(host: Host) -> None:
    worker = host.worker("grpc://w")
    arena = _native.Arena(2 * MIB)
    link = SenderLink.connect(worker.address[1], timeout_s=LIMIT_S)
    child = 0
    try:
        worker.stop()
        with ThreadPoolExecutor(1) as threads:
            handed_over = threads.submit(arena.hand_over, link.native, timeout_s=LIMIT_S)
            files = pathlib.Path("/proc/self/fd")
            names = lambda: [str(fd.readlink()) for fd in files.iterdir() if fd.is_symlink()]  # noqa: E731
            assert settle(lambda: any("mmcopy-arena-flags" in name for name in names()))
            child = os.fork()
            if child == 0:
                signal.pause()
                os._exit(0)
            worker.go_on()
            handed_over.result(LIMIT_S)
        assert arena.statistics()["consumers"] == 1
        worker.kill()
        assert settle(lambda: arena.statistics()["consumers"] == 0)
        assert is_alive(child)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        link.close()
        arena.close(LIMIT_S)


def test_what_is_being_written_is_the_parents(tmp_path: pathlib.Path) -> None:
    """A stream and a reservation, inherited: the child waits for nothing and commits nothing."""
    with (
        WorkerEndpoint(tmp_path / "s") as endpoint,
        Receiver("cpu", framework="numpy", endpoint=endpoint) as receiver,
        PlainSender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=2 * MIB) as sender,
    ):
        spec = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": endpoint.path})
        sender.connect(spec, timeout_s=LIMIT_S)
        reserved = sender.reserve((5,), "uint8", worker=spec)
        assert reserved.array is not None
        reserved.array[:] = range(5)
        array = reserved.array
        never = Writing()
        stream = StreamingSend(TensorData("uint8", (1,), Inline(b"a")), never)  # type: ignore[arg-type]
        child = os.fork()
        if child == 0:
            problems = 0
            try:
                for call in (stream.wait, reserved.commit):
                    try:
                        call()
                        problems += 1
                    except ClosedError:
                        pass
                problems += not stream.done()
                problems += array.tolist() != [0] * 5  # an array of a lease ends at the fork
                array[:] = 7
                with stream:
                    pass
                with contextlib.suppress(KeyError), reserved:
                    raise KeyError
                del reserved
                os._exit(problems)
            finally:
                os._exit(99)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        del array
        never.is_over = True
        assert stream.wait() is stream.data
        assert receiver.receive(reserved.commit()).tolist() == [0, 1, 2, 3, 4]
        assert settle(lambda: sender.leases_out == 0)


SAME_NUMBER = """
import ctypes, os, sys
import numpy as np
from mmcopy import Receiver, Sender, TransportConfig
from mmcopy._native import CopyPool, Process, SegmentOwner
from mmcopy.errors import ClosedError

directory = sys.argv[1]
assert os.getpid() == 1, os.getpid()
here, pool, owner = Process.current(), CopyPool(1), SegmentOwner(directory)
receiver = Receiver("cpu", framework="numpy", shm_dir=directory)
item = Sender(TransportConfig(mode="inline"), shm_dir=directory).send(np.zeros(4, np.uint8))
assert here.is_current() and here == Process.current() and receiver.receive(item).nbytes == 4
assert ctypes.CDLL(None, use_errno=True).unshare(0x20000000) == 0  # CLONE_NEWPID: the next child is number 1, too
child = os.fork()
if child == 0:
    refused = []
    for call in (owner.next_name, lambda: receiver.receive(item)):
        try:
            call()
        except ClosedError:
            refused.append(True)
    pool.close(1.0)  # its threads are not here: returns at once
    same = os.getpid() == 1 and not here.is_current() and here != Process.current() and here.pid == 1
    os._exit(0 if same and refused == [True, True] else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert here.is_current()
print(code, owner.next_name())
owner.close()
receiver.close()
pool.close(5.0)
"""


@pytest.mark.root
def test_a_child_with_its_parents_number_is_another_process(tmp_path: pathlib.Path) -> None:
    """In a new pid namespace: there a process id alone would not tell the two apart."""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", SAME_NUMBER, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout[:9]) == (0, "0 mmcopy-"), ended.stderr
    assert list(tmp_path.iterdir()) == []
