"""Workers that are slow, and an arena with no room: who is held up, and where tensors go instead."""

from __future__ import annotations

import pytest

from tests.rigs.arrays import MIB
from tests.rigs.fault_rig import LIMIT_S, Host, Told, host
from tests.rigs.waiting import settle

__all__ = ["host"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")

SLOWER = 100


def test_a_worker_100_times_slower_holds_its_own_leases_only(host: Host) -> None:
    slow, fast, other = (host.worker(f"grpc://{name}") for name in ("slow", "fast", "other"))
    sender = host.sender(slow, fast, other, arena_bytes=16 * MIB)
    backlog: list[tuple[Told, int]] = []
    for seed in range(2 * SLOWER):
        backlog.append((sender.send(slow, nbytes=20_000, seed=seed), seed))
        if seed % SLOWER == 0:
            told, first = backlog.pop(0)
            assert slow.receive(told, seeds=[first])
        for worker in (fast, other):
            assert sender.uses_leases(worker)
    found = sender.ask("statistics")
    assert (found["leases_out"], found["held"][:3]) == (len(backlog), [len(backlog), 0, 0])
    assert found["full"] == 0
    # One tensor that all three read is held by the slow one alone.
    shared = sender.send(slow, fast, other, nbytes=20_000, seed=7)
    assert shared["path"] == "lease"
    for worker in (fast, other):
        assert worker.receive(shared, seeds=[7])
    assert settle(lambda: sender.ask("statistics")["held"][:3] == [len(backlog) + 1, 0, 0])
    backlog.append((shared, 7))
    assert slow.receive(*[told for told, _ in backlog], seeds=[seed for _, seed in backlog])
    sender.check_books()


def test_a_worker_that_lets_go_of_nothing_leaves_room_for_its_peers(host: Host) -> None:
    """It gets segments when it holds its share; the others go on by leases, and wait for nothing."""
    slow, fast = host.worker("grpc://slow"), host.worker("grpc://fast")
    sender = host.sender(slow, fast, arena_bytes=2 * MIB, arena_wait_s=0.02)
    backlog = []
    for seed in range(10):
        backlog.append(sender.send(slow, nbytes=200_000, seed=seed))
    paths = [told["path"] for told in backlog]
    assert paths == sorted(paths)  # leases, then segments
    assert paths.count("lease") == 7  # of the ten that there is room for
    for seed in range(20):
        assert sender.uses_leases(fast)
        told = sender.send(fast, nbytes=200_000, seed=seed)
        assert told["path"] == "lease"
        assert fast.receive(told, seeds=[seed])
    assert sender.ask("metrics")["lease_fallbacks"] == {"full": paths.count("segment")}
    assert slow.receive(*backlog, seeds=list(range(10)))
    assert settle(sender.is_empty)
    assert sender.uses_leases(slow)
    slow.kill()
    # Alone it may have all.
    assert settle(lambda: sender.ask("statistics")["consumers"] == 1)
    whole = sender.send(fast, nbytes=MIB, seed=1), sender.send(fast, nbytes=MIB, seed=2)
    assert [told["path"] for told in whole] == ["lease", "lease"]
    assert fast.receive(*whole, seeds=[1, 2])
    sender.check_books()


def test_full_for_longer_than_the_wait_and_no_shared_memory_either(host: Host) -> None:
    """Lease, then segment, then inside the message; and back, one by one, when there is room again."""
    worker = host.worker("grpc://w")
    sender = host.sender(worker, arena_bytes=2 * MIB, arena_wait_s=0.05, probe_max_age_s=3600.0)
    tolds = [sender.send(worker, nbytes=MIB, seed=seed) for seed in range(2)]
    tolds.append(sender.send(worker, nbytes=MIB, seed=2))
    away = host.shm_dir.with_name("away")
    host.shm_dir.rename(away)
    try:
        tolds.append(sender.send(worker, nbytes=MIB, seed=3))
        tolds += sender.ask("send_many", sizes=[MIB, 1000], seed=4, workers=[worker.address])
    finally:
        away.rename(host.shm_dir)
    assert [told["path"] for told in tolds] == ["lease", "lease", "segment", "inline", "inline", "inline"]
    counted = sender.ask("metrics")
    # The group waits once, together.
    assert counted["lease_fallbacks"] == {"full": 3}
    assert counted["shm_write_failures"] == counted["inline_fallbacks"] == {"not_found": 3}
    assert worker.receive(*tolds, seeds=[0, 1, 2, 3, 4, 5])
    assert sender.uses_leases(worker)
    sender.check_books()


def test_room_that_comes_within_the_wait_is_used(host: Host) -> None:
    """Reclaim does not depend on a new request: the one that waits wakes up by itself."""
    worker = host.worker("grpc://w")
    sender = host.sender(worker, arena_bytes=2 * MIB, arena_wait_s=30.0)
    held = sender.send(worker, nbytes=2 * MIB, seed=1)
    waiting = [sender.begin("send", nbytes=MIB, seed=seed, workers=[worker.address]) for seed in (2, 3)]
    assert settle(lambda: sender.ask("waiting") == 2)
    assert not any(each.done() for each in waiting)
    assert worker.receive(held, seeds=[1])
    tolds = [each.result(LIMIT_S) for each in waiting]
    assert [told["path"] for told in tolds] == ["lease", "lease"]
    assert worker.receive(*tolds, seeds=[2, 3])
    assert sender.check_books()["full"] == 0
