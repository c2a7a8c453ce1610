"""Workers that are probed over their sockets: in real processes, killed, stopped, restarted, of another user."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Metrics, Receiver, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec, shm_namespace_id
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import ClosedError
from mmcopy.metrics import Counter
from mmcopy.send.routing import Reason
from mmcopy.send.workers import Workers
from tests.rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")

BIG = np.ones(1 << 16, np.uint8)
AUTO = TransportConfig(mode="auto")
LIMIT_S = 20.0
WORKER = """
import os, sys
from mmcopy.endpoint import WorkerEndpoint
if len(sys.argv) > 3:
    os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
with WorkerEndpoint(sys.argv[1], shm_dir=sys.argv[2], allowed_uids=[0]) as endpoint:
    print(endpoint.path, flush=True)
    sys.stdin.read()
"""


class Worker:
    """A process with an endpoint; the spec is what a gateway knows of it."""

    def __init__(self, *arguments: object, prefix: tuple[str, ...] = (), url: str = "grpc://w") -> None:
        command = [*prefix, sys.executable, "-c", textwrap.dedent(WORKER), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        path = self.process.stdout.readline().strip()
        assert path, "the worker did not start"
        self.spec = WorkerSpec(url, labels={"mmcopy_endpoint": path, "shm_namespace_id": "not:looked-at"})

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.communicate(timeout=30)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        if self.process.poll() is None:
            self.process.communicate("", timeout=30)


@pytest.fixture
def directory() -> Iterator[pathlib.Path]:
    """For sockets, whose paths are short."""
    with tempfile.TemporaryDirectory(prefix="mmcopy-test-") as name:
        yield pathlib.Path(name) / "run"


@pytest.fixture
def start(directory: pathlib.Path, shm_dir: pathlib.Path) -> Iterator[Callable[..., Worker]]:
    started: list[Worker] = []

    def start(**options: Any) -> Worker:
        started.append(Worker(directory, options.pop("shm_dir", shm_dir), **options))
        return started[-1]

    yield start
    for worker in started:
        worker.end()


def segments(shm_dir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in shm_dir.iterdir() if path.suffix != ".lock")


def fallbacks(sender: Sender) -> dict[str, int]:
    return sender.metrics.snapshot().get("inline_fallbacks", {})


def take(shm_dir: pathlib.Path, data: TensorData) -> None:
    assert isinstance(data.payload, ShmHandle)
    (shm_dir / data.payload.name).unlink()


def test_the_first_tensor_goes_by_shared_memory_already(shm_dir: pathlib.Path, start: Callable[..., Worker]) -> None:
    worker = start().spec
    with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
        for _ in range(20):
            data = sender.send(BIG, worker=worker)
            assert data.path == "segment"
            take(shm_dir, data)
        assert segments(shm_dir) == []  # the proof's own is gone
        assert sender.metrics.snapshot()["proofs"] == {"ok": 1}  # not one a tensor
        assert sender.connect(worker).ok
        assert sender.metrics.get(Counter.PROBES, "ok") == 2


def test_another_directory_is_noticed_whatever_the_labels_say(
    shm_dir: pathlib.Path, start: Callable[..., Worker], tmp_path: pathlib.Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    spec = start(shm_dir=other).spec
    spec = WorkerSpec(spec.url, labels={**spec.labels, "shm_namespace_id": shm_namespace_id(str(shm_dir))})
    with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
        assert sender.send(BIG, worker=spec).path == "inline"
        assert fallbacks(sender) == {"proof_failed": 1}
        found = sender.connect(spec)
        assert found.reason is Reason.PROBE_FAILED
        assert "the worker cannot read our segment (errno 2)" in found.detail
        assert str(other) in found.detail
        assert segments(shm_dir) == []


def test_a_killed_worker_gets_nothing_more_and_what_it_was_sent_is_taken_back(
    shm_dir: pathlib.Path, start: Callable[..., Worker]
) -> None:
    worker, other = start(), start(url="grpc://other")
    with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
        for _ in range(3):
            assert sender.send(BIG, worker=worker.spec).path == "segment"
        kept = sender.send(BIG, worker=other.spec)
        worker.kill()
        # Nobody sends: the sender finds out by itself.
        assert settle(lambda: sender.metrics.get(Counter.SEGMENTS_REMOVED, "worker_gone") == 3)
        assert len(segments(shm_dir)) == 1
        assert sender.send(BIG, worker=worker.spec).path == "inline"
        assert fallbacks(sender) == {"worker_gone": 1}
        assert sender.send(BIG, worker=other.spec).path == "segment"
        assert sender.mark_down(other.spec) == 2
        assert not (shm_dir / getattr(kept.payload, "name", "")).is_file()


def test_also_where_shared_memory_is_forced(shm_dir: pathlib.Path, start: Callable[..., Worker]) -> None:
    worker = start()
    with Sender(TransportConfig(mode="shm"), shm_dir=shm_dir, arena_bytes=0) as sender:
        assert sender.send(BIG, worker=worker.spec).path == "segment"
        assert settle(lambda: sender.metrics.get(Counter.PROBES, "ok") == 1)  # connected, in the background
        worker.kill()
        assert settle(lambda: segments(shm_dir) == [])
        assert sender.send(BIG, worker=worker.spec).path == "inline"
        assert fallbacks(sender) == {"worker_gone": 1}


def test_a_forced_segment_needs_no_socket(shm_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    spec = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": str(tmp_path / "nobody.sock")})
    with Sender(TransportConfig(mode="shm"), shm_dir=shm_dir, arena_bytes=0) as sender:
        for _ in range(3):
            take(shm_dir, sender.send(BIG, worker=spec))
            assert settle(lambda: sender.metrics.get(Counter.PROBES, "gone") >= 1)
        assert fallbacks(sender) == {}


def test_a_worker_that_starts_again_is_used_again(shm_dir: pathlib.Path, start: Callable[..., Worker]) -> None:
    first = start()
    with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
        assert sender.send(BIG, worker=first.spec).path == "segment"
        first.kill()
        assert settle(lambda: segments(shm_dir) == [])
        second = start()  # the same url, another socket
        assert second.spec != first.spec
        data = sender.send(BIG, worker=second.spec)
        assert data.path == "segment"
        assert sender.send(BIG, worker=first.spec).path == "inline"
        take(shm_dir, data)


def test_a_worker_that_comes_back_on_the_same_path_is_found(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    directory.mkdir(mode=0o700)
    unlinked: list[str] = []
    path = directory / "link.sock"
    workers = Workers(
        str(shm_dir),
        probe_max_age_s=30,
        metrics=Metrics(),
        unlink=unlinked.extend,
        retry_s=0.02,
        first_wait_s=LIMIT_S,
    )
    spec = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": str(path)})
    try:
        for round_ in (1, 2):
            with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
                path.symlink_to(endpoint.path)
                assert settle(lambda: workers.sharing(spec).reason is None)
                assert workers.snapshot([spec], wants_sharing=False).down == ""
                assert workers.note(spec, [f"s{round_}"])
            path.unlink()
            assert settle(lambda: workers.sharing(spec).reason is Reason.WORKER_DOWN)
            assert workers.snapshot([spec], wants_sharing=False).down == spec.url
            assert not workers.note(spec, ["too late"])
            assert settle(lambda round_=round_: unlinked == ["s1", "s2"][:round_])  # type: ignore[misc]  # each once
    finally:
        workers.close()


def test_a_worker_that_hangs_costs_a_bounded_wait_once(shm_dir: pathlib.Path, start: Callable[..., Worker]) -> None:
    worker = start()
    with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
        worker.signal(signal.SIGSTOP)
        assert settle(lambda: "T" in pathlib.Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2])
        assert sender.send(BIG, worker=worker.spec).path == "inline"
        assert fallbacks(sender) == {"not_proved": 1}
        assert settle(lambda: sender.metrics.get(Counter.PROBES, "failed") == 1)
        found = sender.connect(worker.spec, timeout_s=LIMIT_S)
        assert found.reason is Reason.PROBE_FAILED
        worker.signal(signal.SIGCONT)
        assert settle(lambda: sender.connect(worker.spec, timeout_s=LIMIT_S).reason is None)
        take(shm_dir, sender.send(BIG, worker=worker.spec))
        assert segments(shm_dir) == []


def test_a_proof_has_an_age_and_is_renewed_while_it_is_used(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        spec = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": endpoint.path})
        with Sender(TransportConfig(mode="auto", probe_max_age_s=0.2), shm_dir=shm_dir, arena_bytes=0) as sender:
            ok = 0
            for _ in range(3):
                take(shm_dir, sender.send(BIG, worker=spec))
                assert sender.metrics.get(Counter.PROBES, "ok") > ok
                ok = sender.metrics.get(Counter.PROBES, "ok")
                time.sleep(0.25)  # older than it may be: asked before it is used
            assert fallbacks(sender) == {}


def test_connecting_again_probes_again(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        spec = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": endpoint.path})
        with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
            take(shm_dir, sender.send(BIG, worker=spec))
            shm_dir.rename(shm_dir.with_name("away"))  # the first failure drops what was found before
            try:
                assert sender.connect(spec).reason is Reason.PROBE_FAILED
                assert sender.send(BIG, worker=spec).path == "inline"
                assert fallbacks(sender) == {"proof_failed": 1}
            finally:
                shm_dir.with_name("away").rename(shm_dir)
            assert sender.connect(spec).reason is None
            take(shm_dir, sender.send(BIG, worker=spec))


def test_many_threads_ask_once(shm_dir: pathlib.Path, start: Callable[..., Worker]) -> None:
    spec = start().spec
    with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
        gate = threading.Barrier(8)

        def publish() -> None:
            gate.wait(LIMIT_S)
            for _ in range(20):
                sender.cancel(sender.send(BIG, worker=spec))

        threads = [threading.Thread(target=publish) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert sender.metrics.get(Counter.PROBES) == 1
        assert segments(shm_dir) == []
        # Those that came while the first asked did not wait.
        assert set(fallbacks(sender)) <= {"not_proved"}


def test_what_is_remembered_of_workers_is_bounded(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    workers = Workers(str(shm_dir), probe_max_age_s=30, metrics=Metrics(), unlink=lambda _: None, max_workers=4)
    with contextlib.ExitStack() as opened:
        endpoints = [opened.enter_context(WorkerEndpoint(directory, shm_dir=shm_dir)) for _ in range(12)]
        for n, endpoint in enumerate(endpoints):
            spec = WorkerSpec(f"grpc://{n}", labels={"mmcopy_endpoint": endpoint.path})
            assert workers.connect(spec, timeout_s=LIMIT_S).reason is None
        assert settle(lambda: [endpoint.statistics()["links"] for endpoint in endpoints] == [0] * 8 + [1] * 4)
        workers.close()
        assert settle(lambda: not any(endpoint.statistics()["links"] for endpoint in endpoints))


def test_a_sender_that_is_dropped_or_closed_ends_its_connections(
    shm_dir: pathlib.Path, directory: pathlib.Path
) -> None:
    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        spec = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": endpoint.path})
        sender = Sender(AUTO, shm_dir=shm_dir, arena_bytes=0)
        sender.cancel(sender.send(BIG, worker=spec))
        assert endpoint.statistics()["links"] == 1
        sender.close()
        sender.close()
        assert settle(lambda: endpoint.statistics()["links"] == 0)
        with pytest.raises(ClosedError):
            sender.connect(spec)
        sender = Sender(AUTO, shm_dir=shm_dir, arena_bytes=0)
        sender.cancel(sender.send(BIG, worker=spec))
        assert endpoint.statistics()["links"] == 1
        del sender
        assert settle(lambda: endpoint.statistics()["links"] == 0)
        for lock in shm_dir.glob("*.lock"):
            lock.unlink()


def test_closing_while_a_worker_is_asked_takes_nothing_back(
    shm_dir: pathlib.Path, start: Callable[..., Worker]
) -> None:
    """A link that the sender ends itself says nothing of the worker, who keeps what was handed over."""
    worker = start()
    sender = Sender(AUTO, shm_dir=shm_dir, arena_bytes=0)
    data = sender.send(BIG, worker=worker.spec)
    worker.signal(signal.SIGSTOP)
    assert settle(lambda: "T" in pathlib.Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2])
    assert sender.connect(worker.spec, timeout_s=0.1).reason is Reason.NOT_PROBED  # asked, and not answered
    sender.close()
    assert sender.metrics.get(Counter.SEGMENTS_REMOVED) == 0
    take(shm_dir, data)


def test_closing_does_not_ask_the_workers_that_wait_their_turn(directory: pathlib.Path) -> None:
    directory.mkdir()
    with contextlib.ExitStack() as listening:
        sender = Sender(TransportConfig(mode="shm"), arena_bytes=0)
        for n in range(12):
            path = directory / f"{n}.sock"
            silent = listening.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            silent.bind(str(path))
            silent.listen()
            spec = WorkerSpec(f"grpc://{n}", labels={"mmcopy_endpoint": str(path)})
            sender.cancel(sender.send(BIG, worker=spec))
        sender.close()
        assert not [thread for thread in threading.enumerate() if thread.name == "mmcopy-probe"]
        assert sender.metrics.get(Counter.PROBES) < 12


def test_a_sender_that_the_thread_collects_does_not_block_it(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    """As a part of a cycle it can be found in any thread, also by the prover's own, and while that holds its lock."""

    class Lock:
        """The real one, within which garbage is collected once."""

        def __init__(self) -> None:
            self.lock, self.is_due = threading.Lock(), True

        def __enter__(self) -> None:
            self.lock.acquire()
            if self.is_due and threading.current_thread().name == "mmcopy-probe":
                self.is_due = False
                gc.collect()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        cycle: list[Any] = [Sender(AUTO, shm_dir=shm_dir, arena_bytes=0)]
        cycle.append(cycle)
        workers = cycle[0]._workers
        assert workers.connect(WorkerSpec("grpc://w", labels={"mmcopy_endpoint": endpoint.path}), timeout_s=LIMIT_S).ok
        thread = workers._thread
        del cycle
        workers._lock = Lock()
        thread.join(LIMIT_S)
        assert not thread.is_alive()
        assert settle(lambda: endpoint.statistics()["links"] == 0)


def test_an_address_that_is_none_stops_no_other_worker_from_being_asked(
    shm_dir: pathlib.Path, start: Callable[..., Worker]
) -> None:
    odd = WorkerSpec("grpc://odd", labels={"mmcopy_endpoint": "/tmp/\ud800"})
    without = WorkerSpec("grpc://without", labels={"mmcopy_endpoint": ""})
    with Sender(TransportConfig(mode="shm"), shm_dir=shm_dir, arena_bytes=0) as sender:
        take(shm_dir, sender.send(BIG, worker=without))
        assert "proofs" not in sender.metrics.snapshot()  # there is nobody to ask
        assert sender.connect(odd, timeout_s=LIMIT_S).reason is Reason.PROBE_FAILED
        assert sender.connect(start().spec, timeout_s=LIMIT_S).ok


def test_a_worker_of_two_urls_is_one_consumer_with_one_connection(
    directory: pathlib.Path, shm_dir: pathlib.Path
) -> None:
    """By ip and by name, as two roles, or because one advertises the other's socket."""
    with (
        WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint,
        Receiver("cpu", framework="numpy", endpoint=endpoint) as receiver,
        Sender(AUTO, shm_dir=shm_dir, arena_bytes=4 << 20) as sender,
    ):
        alias = directory / "alias.sock"
        alias.symlink_to(endpoint.path)
        paths = {"grpc://10.0.0.1": endpoint.path, "grpc://host": endpoint.path, "grpc://alias": str(alias)}
        specs = [WorkerSpec(url, labels={"mmcopy_endpoint": path}) for url, path in paths.items()]
        found = [sender.connect(spec, timeout_s=LIMIT_S) for spec in specs]
        assert [(each.ok, each.slot) for each in found] == [(True, found[0].slot)] * 3
        assert endpoint.statistics()["links"] == 1
        for _ in range(2):
            for spec in specs:
                data = sender.send(BIG, worker=spec)
                assert data.path == "lease"
                assert (receiver.receive(data) == BIG).all()
        # One process can claim a lease once: two readers in it need two segments.
        assert sender.send(BIG, worker=specs[:2], consumers=2).path != "lease"
        assert settle(lambda: sender.leases_out == 0)
        for path in shm_dir.iterdir():
            if path.suffix != ".lock":
                path.unlink()


def test_a_shared_connection_outlives_one_of_its_urls(directory: pathlib.Path, shm_dir: pathlib.Path) -> None:
    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        workers = Workers(str(shm_dir), probe_max_age_s=60, metrics=Metrics(), unlink=lambda names: None, max_workers=2)
        specs = [WorkerSpec(f"grpc://{n}", labels={"mmcopy_endpoint": endpoint.path}) for n in range(4)]
        for spec in specs:
            assert workers.connect(spec, timeout_s=LIMIT_S).ok
            assert endpoint.statistics()["links"] == 1
        assert workers.sharing(specs[-2]).ok
        workers.close()
        assert settle(lambda: endpoint.statistics()["links"] == 0)


def test_a_forgotten_worker_keeps_what_it_was_sent(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    unlinked: list[str] = []
    workers = Workers(str(shm_dir), probe_max_age_s=30, metrics=Metrics(), unlink=unlinked.extend, max_workers=1)
    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        for n in range(3):
            spec = WorkerSpec(f"grpc://{n}", labels={"mmcopy_endpoint": endpoint.path})
            assert workers.connect(spec, timeout_s=LIMIT_S).ok
            assert workers.note(spec, [f"s{n}"])
        workers.close()
    assert unlinked == []


def test_a_forked_child_asks_nobody(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        spec = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": endpoint.path})
        with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
            sender.cancel(sender.send(BIG, worker=spec))
            child = os.fork()
            if child == 0:
                try:
                    sender.send(BIG, worker=spec)
                except ClosedError:
                    sender.close()
                    os._exit(0)
                os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            data = sender.send(BIG, worker=spec)  # the parent's connection lives
            assert data.path == "segment"
            sender.cancel(data)
            assert sender.metrics.get(Counter.PROBES) == 1


@pytest.mark.root
def test_a_worker_of_another_user_cannot_read_and_says_so(shm_dir: pathlib.Path, directory: pathlib.Path) -> None:
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)
    for parent in (shm_dir, *shm_dir.parents):
        if parent.stat().st_uid == os.geteuid() and str(parent) != "/":
            parent.chmod(parent.stat().st_mode | 0o011)
    directory.parent.chmod(0o711)
    worker = Worker(directory, shm_dir, 65534)
    try:
        with Sender(AUTO, shm_dir=shm_dir, arena_bytes=0) as sender:
            assert sender.send(BIG, worker=worker.spec).path == "inline"
            assert fallbacks(sender) == {"proof_failed": 1}
            assert "65534" in sender.connect(worker.spec).detail
    finally:
        worker.end()
