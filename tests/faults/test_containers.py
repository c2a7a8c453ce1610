"""Containers that share the sockets' directory and nothing else: leases work, and segments are not tried."""

from __future__ import annotations

import pytest

from tests.rigs.arrays import MIB
from tests.rigs.fault_rig import Host, host
from tests.rigs.waiting import settle

__all__ = ["host"]

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("nothing_left_open")]

OWN_SHM = 'mount -t tmpfs -o mode=1777,size=32m tmpfs /dev/shm; mount -t proc proc /proc; exec "$@"'
CONTAINER = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "sh", "-ec", OWN_SHM, "sh")


def test_containers_with_a_dev_shm_each(host: Host) -> None:
    options = {"prefix": CONTAINER, "shm_dir": "/dev/shm"}
    workers = [host.worker(f"grpc://{n}", **options) for n in range(2)]
    sender = host.sender(arena_bytes=2 * MIB, arena_wait_s=0.02, **options)
    for worker in workers:
        assert sender.ask("connect", worker=worker.address) == "proof_failed"
        assert sender.uses_leases(worker)
    tolds = sender.ask("send_many", sizes=[100_000, 1, 300_000], seed=1, workers=[workers[0].address])
    assert [told["path"] for told in tolds] == ["lease"] * 3
    assert workers[0].receive(*tolds, seeds=[1, 2, 3])
    shared = sender.send(*workers, nbytes=500_000, seed=4)
    assert all(worker.receive(shared, seeds=[4]) for worker in workers)
    # With no room it goes inside the message: a segment could not be read.
    assert settle(sender.is_empty)
    full = [sender.send(workers[0], nbytes=MIB + 1, seed=seed) for seed in range(3)]
    assert [told["path"] for told in full] == ["lease", "inline", "inline"]
    assert sender.ask("metrics")["inline_fallbacks"] == {"proof_failed": 2}
    assert workers[0].receive(*full, seeds=[0, 1, 2])
    # Each end is seen from outside the pid namespace of the other.
    workers[0].kill()
    assert settle(lambda: sender.ask("statistics")["consumers"] == 1)
    assert sender.uses_leases(workers[1])
    assert sender.check_books()["consumers_gone"] == 1
    assert sender.ask("shared_files") == workers[1].ask("shared_files") == []
    sender.kill()
    assert settle(lambda: workers[1].ask("held") == [])
    heir = host.sender(arena_bytes=MIB, **options)
    assert settle(lambda: heir.uses_leases(workers[1]))
    heir.check_books()
