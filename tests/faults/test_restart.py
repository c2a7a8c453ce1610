"""Two senders and two workers crossed, and each of the four killed and started again in turn, all under load."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import Counter

import pytest

from tests.rigs.arrays import MIB
from tests.rigs.fault_rig import LIMIT_S, Failed, Gone, Host, Process, Sender, Told, Worker, host
from tests.rigs.waiting import settle

__all__ = ["host"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")

LOAD_S = 20.0
"""How long; make it longer to look harder."""
THREADS_A_PAIR = 2
SENDER_OPTIONS = {"arena_bytes": 2 * MIB, "arena_wait_s": 0.001}
"""Small enough that some tensors go by segments."""
OF_A_KILL = {
    "LeaseError: .* (is over|was given up|its sender has gone)",
    "LeaseForgedError: ",
    "LeaseUnknownArenaError: ",
    "SegmentNotFoundError: ",
}
"""What a worker may say of a tensor whose sender was killed, or that was meant for the one before it."""
KINDS_OF_A_KILL = {each.partition(":")[0] for each in OF_A_KILL}


class Crossed:
    """All pairs, and what became of their tensors."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.workers: list[Worker] = [self.new_worker(n) for n in range(2)]
        self.senders: list[Sender] = [self.new_sender() for _ in range(2)]
        self.kills = Counter[Process]()
        self.paths = Counter[str]()
        self.leases = Counter[tuple[Process, Process]]()
        self.excused = Counter[str]()
        self.problems: list[str] = []
        self.lock = threading.Lock()
        self.stopping = threading.Event()

    def new_worker(self, at: int) -> Worker:
        return self.host.worker(f"grpc://{at}", timeout_s=10.0)

    def new_sender(self) -> Sender:
        return self.host.sender(*self.workers, **SENDER_OPTIONS)

    def pump(self, at: int, to: int, first_seed: int) -> None:
        for seed in itertools.count(first_seed):
            if self.stopping.is_set():
                return
            sender, worker = self.senders[at], self.workers[to]
            if sender.has_ended or worker.has_ended:
                self.stopping.wait(0.01)  # until it is started again
                continue
            try:
                self.round(sender, worker, seed)
            except (Gone, Failed) as error:
                with self.lock:
                    was_killed = self.kills[sender] or self.kills[worker]
                    kind = error.kind if isinstance(error, Failed) else "Gone"
                    if was_killed and (kind == "Gone" or any(re.match(each, str(error)) for each in OF_A_KILL)):
                        self.excused[kind] += 1
                    else:
                        self.problems.append(f"{at} to {to}: {error!r}")

    def round(self, sender: Sender, worker: Worker, seed: int) -> None:
        """One request: some tensors of different sizes, some of the time many."""
        sizes = [1 + (seed * 7919 + n * 104_729) % 300_000 for n in range(1 + seed % 3)]
        tolds: list[Told] = sender.ask("send_many", sizes=sizes, seed=seed, workers=[worker.address])
        is_right = worker.receive(*tolds, seeds=[seed + n for n in range(len(sizes))])
        with self.lock:
            if not is_right:
                self.problems.append(f"wrong bytes in {sizes} of seed {seed}")
            for told in tolds:
                self.paths[told["path"]] += 1
            self.leases[sender, worker] += sum(told["path"] == "lease" for told in tolds)

    def has_lease(self, sender: Sender, worker: Worker) -> bool:
        with self.lock:
            return self.leases[sender, worker] > 0

    def restart_worker(self, at: int) -> None:
        old = self.workers[at]
        orphans = [self.senders[n].send(old, nbytes=1000, seed=n) for n in range(2)]
        with self.lock:
            self.kills[old] += 1
        old.kill()
        new = self.new_worker(at)
        self.workers[at] = new
        for sender in self.senders:
            assert settle(lambda sender=sender: self.has_lease(sender, new), limit_s=LIMIT_S)  # type: ignore[misc]
        for told in orphans:
            if told["path"] == "lease":
                with pytest.raises(Failed, match=r"LeaseError: .* is over|LeaseForgedError"):
                    new.receive(told, seeds=[1])
            elif told["path"] == "segment":
                new.ask("release", told=told)  # as its message did not arrive, and if it is there yet

    def restart_sender(self, at: int) -> None:
        old = self.senders[at]
        orphans = [(worker, old.send(worker, nbytes=1000, seed=n)) for n, worker in enumerate(self.workers)]
        with self.lock:
            self.kills[old] += 1
        old.kill()
        new = self.new_sender()
        self.senders[at] = new
        for worker, told in orphans:
            assert settle(lambda worker=worker: self.has_lease(new, worker), limit_s=LIMIT_S)  # type: ignore[misc]
            if told["path"] == "lease":
                with pytest.raises(Failed, match="LeaseUnknownArenaError"):
                    worker.receive(told, seeds=[1])


def test_each_side_is_restarted_in_turn_under_load(host: Host) -> None:
    crossed = Crossed(host)
    threads = [
        threading.Thread(target=crossed.pump, args=(at, to, 1_000_000 * n))
        for n, (at, to, _) in enumerate(itertools.product(range(2), range(2), range(THREADS_A_PAIR)))
    ]
    for thread in threads:
        thread.start()
    begun = time.monotonic()
    restarts = 0
    try:
        turns = itertools.cycle(
            [
                (crossed.restart_worker, 0),
                (crossed.restart_sender, 0),
                (crossed.restart_worker, 1),
                (crossed.restart_sender, 1),
            ]
        )
        while restarts < 4 or time.monotonic() - begun < LOAD_S:
            restart, at = next(turns)
            restart(at)
            restarts += 1
            assert crossed.problems == []
    finally:
        crossed.stopping.set()
        for thread in threads:
            thread.join(LIMIT_S)
    assert crossed.problems == []
    assert set(crossed.excused) <= {"Gone"} | KINDS_OF_A_KILL
    # The living have nothing out, and what each has counted is what happened.
    for sender in crossed.senders:
        sender.check_books()
        assert sender.ask("statistics")["consumers"] == 2
    for worker in crossed.workers:
        assert settle(lambda worker=worker: worker.ask("held") == [0, 0])  # type: ignore[misc]
        counted = worker.ask("metrics")
        assert counted["tensors_received"].get("lease", 0) == counted["leases_released"]["received"]
        assert set(counted.get("receive_failures", {})) <= KINDS_OF_A_KILL
    print(f"{restarts} restarts, delivered {dict(crossed.paths)}, lost to kills {dict(crossed.excused)}")
