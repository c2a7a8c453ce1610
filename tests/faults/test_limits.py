"""Descriptors at their limit on either side, and directories for sockets that cannot be used or go away."""

from __future__ import annotations

import pathlib
import shutil

import pytest

from tests.rigs.arrays import MIB
from tests.rigs.fault_rig import Host, Sender, Worker, host
from tests.rigs.waiting import settle

__all__ = ["host"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def leases_again(sender: Sender, worker: Worker) -> bool:
    """Within the limit, by nothing but sending; every tensor on the way there arrives."""
    return settle(lambda: sender.uses_leases(worker), limit_s=20.0)


@pytest.mark.parametrize("free", [0, 3, 6])
def test_a_sender_short_of_descriptors(host: Host, free: int) -> None:
    """From the start: it cannot connect, or not prove, or not make the arena. All arrives, and later by leases."""
    worker = host.worker("grpc://w")
    sender = host.sender(arena_bytes=MIB)
    lift = sender.limit_descriptors(free)
    for seed in range(3):
        told = sender.send(worker, nbytes=5000, seed=seed)
        assert worker.receive(told, seeds=[seed])
    found = sender.ask("connect", worker=worker.address)
    assert found in (None, "proof_failed")
    assert (found is None) == (sender.ask("metrics").get("arena_hand_overs") is not None) or free < 6
    lift()
    assert leases_again(sender, worker)
    sender.check_books()


@pytest.mark.parametrize("free", [0, 3])
def test_a_sender_that_has_no_descriptor_for_one_more_worker(host: Host, free: int) -> None:
    known, late = host.worker("grpc://known"), host.worker("grpc://late")
    sender = host.sender(known, arena_bytes=MIB)
    lift = sender.limit_descriptors(free)
    told = sender.send(late, nbytes=5000, seed=1)
    assert told["path"] != "lease"
    assert late.receive(told, seeds=[1])
    assert sender.uses_leases(known)  # a lease needs none
    lift()
    assert leases_again(sender, late)
    assert sender.uses_leases(known)
    assert sender.check_books()["consumers"] == 2


@pytest.mark.parametrize("free", [0, 4, 5])
def test_a_worker_short_of_descriptors(host: Host, free: int) -> None:
    """One for the connection, one to look at a probe or a segment, four for the arena."""
    worker = host.worker("grpc://w")
    lift = worker.limit_descriptors(free)
    sender = host.sender(arena_bytes=MIB)
    sent = [sender.send(worker, nbytes=5000, seed=seed) for seed in range(2)]
    sender.ask("connect", worker=worker.address)
    sent += [sender.send(worker, nbytes=5000, seed=seed) for seed in range(2, 4)]
    expected = {0: "inline", 4: "segment", 5: "lease"}
    assert sent[-1]["path"] == expected[free]
    # It has not died for its sender: nothing is taken back that was handed over.
    assert all(worker.receive(told, seeds=[seed]) for seed, told in enumerate(sent))
    assert "segments_removed" not in sender.ask("metrics")
    lift()
    assert leases_again(sender, worker)
    sender.check_books()


def test_descriptors_stay_flat_over_workers_that_come_and_go(host: Host) -> None:
    sender = host.sender(arena_bytes=MIB)
    counts = []
    for _ in range(4):
        worker = host.worker("grpc://w")
        sender.ask("connect", worker=worker.address)
        assert sender.uses_leases(worker)
        worker.kill()
        assert settle(lambda: sender.ask("statistics")["consumers"] == 0)
        counts.append(sender.num_descriptors())
    assert settle(lambda: sender.num_descriptors() <= counts[0]), counts


def test_a_directory_that_is_removed_under_a_worker(host: Host, tmp_path: pathlib.Path) -> None:
    """As a cleaner of /tmp does: who is connected goes on, who comes later has no way in, and closing is clean."""
    directory = tmp_path / "d"
    worker = host.worker("grpc://w", directory=str(directory))
    sender = host.sender(worker, arena_bytes=MIB)
    shutil.rmtree(directory)
    assert sender.uses_leases(worker)
    late = host.sender(arena_bytes=MIB)
    assert late.ask("connect", worker=worker.address) == "proof_failed"
    told = late.send(worker, nbytes=5000, seed=1)
    assert told["path"] == "inline"
    assert worker.receive(told, seeds=[1])
    worker.end()
    assert settle(lambda: sender.ask("statistics")["consumers"] == 0)
