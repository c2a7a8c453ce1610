"""Arenas between processes that are killed, forked, restarted, cut off, or short of descriptors."""

from __future__ import annotations

import os
import pathlib
import random
import resource
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from mmcopy import _native
from mmcopy.endpoint import SenderLink, WorkerEndpoint
from mmcopy.errors import ArenaError, EndpointGoneError, EndpointRefusedError, MmcopyTimeoutError
from tests.rigs.arena_rig import LIMIT_S, Handle, Process, Worker, connect, handle_of, send
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")

Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Process] = []

    def begin(role: str, *arguments: object, prefix: tuple[str, ...] = ()) -> Process:
        started.append(Process(role, *arguments, prefix=prefix))
        return started[-1]

    yield begin
    for process in started:
        process.kill()


def a_sender(start: Start, *paths: str, data_nbytes: int = 4 * MIB) -> tuple[Process, list[int]]:
    sender = start("sender")
    sender.ask("create", data_nbytes=data_nbytes)
    return sender, [sender.ask("connect", path=path) for path in paths]


def is_empty(sender: Process) -> bool:
    found = sender.ask("statistics")
    return (found["used_nbytes"], found["leases_out"]) == (0, 0)


def test_two_processes(start: Start, tmp_path: pathlib.Path) -> None:
    worker = start("worker", tmp_path / "run")
    sender, slots = a_sender(start, worker.ask("path"))
    for nbytes in (0, 1, 4096, MIB + 3):
        handle = sender.ask("send", nbytes=nbytes, seed=nbytes, consumers=slots)
        assert worker.ask("receive", handle=handle, nbytes=nbytes, seed=nbytes)
    assert settle(lambda: is_empty(sender))
    assert (sender.end(), worker.end()) == (0, 0)


@pytest.mark.parametrize("stage", ["before the message", "claimed", "half written", "released"])
def test_a_killed_worker_gives_its_leases_back(start: Start, tmp_path: pathlib.Path, stage: str) -> None:
    victim, witness = start("worker", tmp_path / "run"), start("worker", tmp_path / "run")
    sender, slots = a_sender(start, victim.ask("path"), witness.ask("path"))
    if stage == "half written":
        handle = sender.ask("take", nbytes=1000, consumers=slots)
    else:
        handle = sender.ask("send", nbytes=1000, seed=1, consumers=slots)
    if stage != "before the message":
        victim.ask("claim", handle=handle)
    if stage == "released":
        victim.ask("release", name=handle[0])
    witness.ask("claim", handle=handle)
    victim.kill()
    if stage == "half written":
        sender.ask("finish", name=handle[0], seed=1)
    assert settle(lambda: sender.ask("statistics")["consumers"] == 1)
    assert sender.ask("statistics")["leases_out"] == 1  # the witness reads it
    assert witness.ask("check", name=handle[0], nbytes=1000, seed=1)
    witness.ask("release", name=handle[0])
    assert settle(lambda: is_empty(sender))
    # A worker in its place gets new leases, and a clean error for the old one.
    third = start("worker", tmp_path / "run")
    assert sender.ask("connect", path=third.ask("path")) == slots[0]
    with pytest.raises(RuntimeError, match=r"LeaseError: .* is over"):
        third.ask("claim", handle=handle)
    fresh = sender.ask("send", nbytes=500, seed=2, consumers=[slots[0]])
    assert third.ask("receive", handle=fresh, nbytes=500, seed=2)


@pytest.mark.parametrize("stage", ["before the message", "claimed", "half written"])
def test_a_killed_sender_fails_what_waits_and_leaves_what_is_there(
    start: Start, tmp_path: pathlib.Path, stage: str
) -> None:
    worker = start("worker", tmp_path / "run")
    sender, slots = a_sender(start, worker.ask("path"))
    whole = sender.ask("send", nbytes=1000, seed=1, consumers=slots)
    half = sender.ask("take", nbytes=1000, consumers=slots)
    if stage != "before the message":
        worker.ask("claim", handle=whole)
    if stage == "half written":
        worker.ask("claim", handle=half)
        worker.tell("wait", name=half[0], upto=1000, timeout_s=LIMIT_S)
    sender.kill()
    if stage == "half written":
        with pytest.raises(RuntimeError, match=r"LeaseError: .* has gone after 0 of 1000 bytes, 1000 wanted"):
            worker.answer()
    if stage == "before the message":
        assert settle(lambda: worker.ask("arenas") == 0)
        with pytest.raises(RuntimeError, match="no arena for"):
            worker.ask("claim", handle=whole)
    else:
        assert worker.ask("check", name=whole[0], nbytes=1000, seed=1)
        assert worker.ask("release", name=whole[0])
    # The next sender starts anew.
    second, slots = a_sender(start, worker.ask("path"))
    handle = second.ask("send", nbytes=700, seed=3, consumers=slots)
    assert worker.ask("receive", handle=handle, nbytes=700, seed=3)
    assert worker.end() == 0


def test_children_keep_neither_side_alive(start: Start, tmp_path: pathlib.Path) -> None:
    worker, other = start("worker", tmp_path / "run"), start("worker", tmp_path / "run")
    sender, slots = a_sender(start, worker.ask("path"), other.ask("path"))
    handle = sender.ask("send", nbytes=1000, seed=1, consumers=slots)
    worker.ask("claim", handle=handle)
    other.ask("claim", handle=handle)
    children = [worker.ask("fork"), sender.ask("fork")]
    try:
        worker.kill()
        assert settle(lambda: sender.ask("statistics")["consumers"] == 1)
        half = sender.ask("take", nbytes=10, consumers=[slots[1]])
        other.ask("claim", handle=half)
        sender.kill()
        with pytest.raises(RuntimeError, match=r"LeaseError: .* has gone after"):
            other.ask("wait", name=half[0], upto=10, timeout_s=LIMIT_S)
        assert other.ask("check", name=handle[0], nbytes=1000, seed=1)
        for child in children:
            os.kill(child, 0)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_a_slow_worker_does_not_hold_the_others_up(start: Start, tmp_path: pathlib.Path) -> None:
    slow, fast = start("worker", tmp_path / "run"), start("worker", tmp_path / "run")
    sender, slots = a_sender(start, slow.ask("path"), fast.ask("path"), data_nbytes=MIB)
    held = sender.ask("send", nbytes=MIB // 2, seed=0, consumers=[slots[0]])
    slow.ask("claim", handle=held)
    for seed in range(30):
        handle = sender.ask("send", nbytes=MIB // 2, seed=seed, consumers=[slots[1]])
        assert fast.ask("receive", handle=handle, nbytes=MIB // 2, seed=seed)
    assert settle(lambda: sender.ask("statistics")["held"][:2] == [1, 0])
    assert slow.ask("check", name=held[0], nbytes=MIB // 2, seed=0)
    slow.ask("release", name=held[0])
    assert settle(lambda: is_empty(sender))


def test_two_senders_and_two_workers_and_each_side_restarted(start: Start, tmp_path: pathlib.Path) -> None:
    workers = [start("worker", tmp_path / "run") for _ in range(2)]
    paths = [worker.ask("path") for worker in workers]
    senders = [a_sender(start, *paths) for _ in range(2)]

    def round_trip(seed: int) -> None:
        for sender, slots in senders:
            for at, worker in enumerate(workers):
                nbytes = 1000 * seed + at
                handle = sender.ask("send", nbytes=nbytes, seed=seed, consumers=[slots[at]])
                assert worker.ask("receive", handle=handle, nbytes=nbytes, seed=seed)

    for seed in range(1, 9):
        round_trip(seed)
        if seed % 4 == 2:
            workers[0].kill()
            workers[0] = start("worker", tmp_path / "run")
            path = workers[0].ask("path")
            for sender, slots in senders:
                slots[0] = sender.ask("connect", path=path)
        if seed % 4 == 0:
            senders[0][0].kill()
            senders[0] = a_sender(start, workers[0].ask("path"), paths[1])
    for sender, _ in senders:
        assert settle(lambda sender=sender: is_empty(sender))  # type: ignore[misc]
        found = sender.ask("statistics")
        assert found["taken"] == found["committed"] == found["released"]
        assert sender.end() == 0
    assert settle(lambda: workers[1].ask("arenas") == 0)
    assert [worker.end() for worker in workers] == [0, 0]
    # A killed worker's socket is the next worker's to remove.
    with Worker(tmp_path / "run"):
        assert len(list((tmp_path / "run").iterdir())) == 1
    assert list((tmp_path / "run").iterdir()) == []


def test_a_worker_that_is_stopped_reaches_the_limit(start: Start, tmp_path: pathlib.Path) -> None:
    worker = start("worker", tmp_path / "run")
    path = worker.ask("path")
    arena = _native.Arena(MIB)
    link = SenderLink.connect(path, timeout_s=LIMIT_S)
    worker.process.send_signal(signal.SIGSTOP)
    state = pathlib.Path(f"/proc/{worker.process.pid}/task")
    assert settle(lambda: all(one.read_text().rpartition(") ")[2][0] == "T" for one in state.glob("*/stat")))
    with pytest.raises(MmcopyTimeoutError, match="the worker's answer to an arena did not end within 50ms"):
        arena.hand_over(link.native, timeout_s=0.05)
    assert link.closed
    link.close()
    assert arena.statistics()["consumers"] == 0
    worker.process.send_signal(signal.SIGCONT)
    # It maps what waited for it, sees that the sender has gone, and lets go again.
    assert settle(lambda: worker.ask("arenas") == 0)
    slot, link = connect(arena, path)
    assert slot == 0
    assert worker.ask("receive", handle=send(arena, random_bytes(10, 1).tobytes(), [slot]), nbytes=10, seed=1)
    link.close()
    arena.close(LIMIT_S)
    assert worker.end() == 0


def test_workers_that_die_under_load(start: Start, tmp_path: pathlib.Path) -> None:
    """Two threads send to a worker each and to both, while one worker is killed and replaced again and again."""
    arena = _native.Arena(2 * MIB)
    workers = [start("worker", tmp_path / "run") for _ in range(2)]
    connected = [connect(arena, worker.ask("path")) for worker in workers]
    counts = [0, 0]
    is_over = threading.Event()
    failures: list[BaseException] = []

    def receive(at: int, handle: Handle, nbytes: int, seed: int) -> None:
        assert workers[at].ask("receive", handle=handle, nbytes=nbytes, seed=seed)
        counts[at] += 1

    def load(at: int) -> None:
        chance = random.Random(at)
        try:
            while not is_over.is_set():
                nbytes, seed = chance.randrange(600_000), chance.randrange(1000)
                slots = [connected[at][0]] if chance.random() < 0.7 else [slot for slot, _ in connected]
                (writer,) = arena.take([nbytes], slots, timeout_s=LIMIT_S)
                if chance.random() < 0.1:
                    del writer  # forgotten
                    continue
                writer.write(random_bytes(nbytes, seed).tobytes())
                writer.commit()
                try:
                    receive(at, handle_of(writer), nbytes, seed)
                finally:  # the other worker does not get the message, and the one that died not either
                    arena.cancel(*handle_of(writer))
        except BaseException as error:
            failures.append(error)

    for round_number in range(4):
        is_over.clear()
        threads = [threading.Thread(target=load, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        threading.Event().wait(0.3)
        if round_number % 2 == 0:
            workers[0].process.kill()  # in the middle of whatever it does
        else:
            is_over.set()
        threads[0].join(timeout=60)
        is_over.set()
        threads[1].join(timeout=60)
        assert not any(thread.is_alive() for thread in threads)
        if round_number % 2 == 0:
            # The thread of the worker that died, and the other's when it took for both in that moment.
            assert all(isinstance(error, (AssertionError, BrokenPipeError, ArenaError)) for error in failures)
            failures.clear()
            connected[0][1].close()
            workers[0] = start("worker", tmp_path / "run")
            connected[0] = connect(arena, workers[0].ask("path"))
        assert failures == []
    assert min(counts) > 10
    assert settle(lambda: arena.statistics()["leases_out"] == 0), arena.statistics()
    found = arena.statistics()
    assert found["used_nbytes"] == 0
    assert found["taken"] == found["committed"] + found["aborted"]
    assert (found["consumers"], found["consumers_gone"], found["full"]) == (2, 2, 0)
    for _, link in connected:
        link.close()
    arena.close(LIMIT_S)


def test_many_leases_cost_no_descriptors(tmp_path: pathlib.Path) -> None:
    arena = _native.Arena(4 * MIB)
    with Worker(tmp_path / "run") as worker:
        slot, link = connect(arena, worker.path)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        leases = [worker.claim(send(arena, random_bytes(100, seed).tobytes(), [slot])) for seed in range(500)]
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        assert all(bytes(lease) == random_bytes(100, seed).tobytes() for seed, lease in enumerate(leases))
        del leases
        link.close()
    arena.close(LIMIT_S)


@pytest.mark.parametrize("free", [0, 1, 2, 3])
def test_a_worker_short_of_descriptors_says_so(tmp_path: pathlib.Path, start: Start, free: int) -> None:
    """The worker's limit leaves room for some of the four that travel with an arena; the kernel drops the rest."""
    arena = _native.Arena(MIB)
    worker = start("worker", tmp_path / "run")
    path = worker.ask("path")
    link = SenderLink.connect(path, timeout_s=LIMIT_S)
    pid = worker.process.pid
    in_use = len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (in_use + free, hard))
    with pytest.raises(
        (EndpointRefusedError, EndpointGoneError), match=rf"lost on the way: {free} of 4 .*{in_use + free}"
    ):
        arena.hand_over(link.native, timeout_s=LIMIT_S)
    link.close()
    assert arena.statistics()["consumers"] == 0
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert settle(lambda: len(os.listdir(f"/proc/{pid}/fd")) == in_use - 1)  # noqa: PTH208
    slot, link = connect(arena, path)
    handle = send(arena, random_bytes(10, 1).tobytes(), [slot])
    assert worker.ask("receive", handle=handle, nbytes=10, seed=1)
    link.close()
    arena.close(LIMIT_S)
    assert worker.end() == 0


@pytest.mark.root
def test_containers_that_share_only_the_sockets_directory(start: Start, tmp_path: pathlib.Path) -> None:
    apart = ("unshare", "-m", "-p", "-i", "-f", "--kill-child", "sh", "-c")
    mount = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && mount -t proc proc /proc && exec "$@"'
    worker = start("worker", tmp_path / "run", prefix=(*apart, mount, "sh"))
    sender = start("sender", prefix=(*apart, mount, "sh"))
    sender.ask("create", data_nbytes=8 * MIB)
    slot = sender.ask("connect", path=worker.ask("path"))
    handle: Handle = sender.ask("send", nbytes=6 * MIB, seed=4, consumers=[slot])
    assert worker.ask("receive", handle=handle, nbytes=6 * MIB, seed=4)
    assert settle(lambda: is_empty(sender))
    worker.kill()  # unshare, and with it what runs inside
    assert settle(lambda: sender.ask("statistics")["consumers"] == 0)


@pytest.mark.root
def test_a_worker_of_another_user_gets_the_arena_by_descriptor(tmp_path: pathlib.Path, start: Start) -> None:
    """0600 segments cannot cross users; descriptors can."""
    read, write = os.pipe()
    directory = f"/tmp/mmcopy-test-arena-{os.getpid()}"
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            endpoint = WorkerEndpoint(directory, allowed_uids=[0])
            os.write(write, endpoint.path.encode())
            endpoint.native.wait_arena(0, LIMIT_S)
            (found,) = endpoint.native.arenas()
            handle_file = pathlib.Path(directory) / "handle"
            settle(handle_file.exists)
            name, offset, nbytes, owner_id = handle_file.read_text().split()
            lease = found.claim(name, int(offset), int(nbytes), owner_id)
            good = bytes(lease) == random_bytes(1000, 1).tobytes() and lease.release()
            handle_file.unlink()
            endpoint.close()
            os.rmdir(directory)  # noqa: PTH106
            os._exit(7 if good else 1)
        finally:
            os._exit(99)
    path = os.read(read, 4096).decode()
    os.close(read)
    os.close(write)
    arena = _native.Arena(MIB)
    with SenderLink.connect(path, timeout_s=LIMIT_S, allowed_uids=[65534]) as link:
        slot = arena.hand_over(link.native, timeout_s=LIMIT_S)
        handle = send(arena, random_bytes(1000, 1).tobytes(), [slot])
        new = pathlib.Path(directory) / "new"
        new.write_text(" ".join(map(str, handle)))
        os.chown(new, 65534, 65534)
        new.rename(pathlib.Path(directory) / "handle")
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert settle(lambda: arena.statistics()["leases_out"] == 0)
    arena.close(LIMIT_S)
