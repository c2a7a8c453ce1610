"""A worker that writes garbage over its release flags: only that worker can get wrong pixels."""

from __future__ import annotations

import re

import pytest

from tests.rigs.arrays import MIB
from tests.rigs.fault_rig import Failed, Host, host
from tests.rigs.waiting import settle

__all__ = ["host"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def test_garbage_over_its_marks_harms_the_one_that_writes_it(host: Host) -> None:
    mad, sound = host.worker("grpc://mad"), host.worker("grpc://sound")
    sender = host.sender(mad, sound, arena_bytes=2 * MIB, arena_wait_s=0.02)
    kept = [sender.send(mad, sound, nbytes=10_000, seed=seed) for seed in range(20)]
    assert {told["path"] for told in kept} == {"lease"}
    mad.ask("scribble", seed=1)
    for seed in range(100):
        own, theirs = sender.send(mad, nbytes=30_000, seed=seed), sender.send(sound, nbytes=30_000, seed=seed)
        assert theirs["path"] == "lease"
        assert sound.receive(theirs, seeds=[seed])
        try:  # what it is told, or gets, when it let go too early is its own affair
            mad.receive(own, seeds=[seed])
        except Failed as error:
            assert re.match(r"LeaseError: .* (is over|was received already)", str(error))  # noqa: PT017
    # It overwrote marks of its own that said it is done, and so holds what it does not read.
    assert sender.ask("statistics")["held"][0] > len(kept)
    # What was sent to both before is still the sound one's.
    assert sound.receive(*kept, seeds=list(range(20)))
    assert settle(lambda: sender.ask("statistics")["held"][1] == 0)
    mad.ask("stop_scribbling")
    mad.kill()
    assert sender.check_books()["consumers"] == 1
    heir = host.worker("grpc://mad")
    sender.ask("connect", worker=heir.address)
    assert sender.uses_leases(heir)
    sender.check_books()


def test_a_worker_that_lets_go_of_what_it_reads_lets_go_for_itself_alone(host: Host) -> None:
    """The exact marks of a lease that it shares, written too early."""
    mad, sound = host.worker("grpc://mad"), host.worker("grpc://sound")
    sender = host.sender(mad, sound, arena_bytes=2 * MIB, arena_wait_s=0.02)
    shared = sender.send(mad, sound, nbytes=50_000, seed=1)
    own = sender.send(mad, nbytes=50_000, seed=2)
    for told in (shared, own):
        mad.ask("watch", told=told)
        mad.ask("forge_release", name=told["handle"][0])
    assert settle(lambda: sender.ask("statistics")["leases_out"] == 1)
    # The block of its own is given out again; the shared one's is not, as long as the sound one has not read it.
    for seed in range(100):
        told = sender.send(sound, nbytes=50_000, seed=seed)
        assert sound.receive(told, seeds=[seed])
    assert sound.receive(shared, seeds=[1])
    assert not mad.ask("let_go", name=own["handle"][0], seed=2)  # wrong pixels, and they are its own
    sender.check_books()
