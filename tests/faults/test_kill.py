"""kill -9 of either side at every stage: others are not harmed, the arena comes back, and a restarted side is used."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from tests.rigs.arrays import MIB
from tests.rigs.fault_rig import LIMIT_S, Failed, Gone, Host, Sender, Told, Worker, host
from tests.rigs.waiting import settle

__all__ = ["host"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")

STREAM_BYTES = 64 * MIB
ARENA_BYTES = 80 * MIB


def half_written(sender: Sender, witness: Worker, *others: Worker, seed: int) -> Told:
    """A stream of which some bytes are written and some are not, for ``witness``, who holds it, and for ``others``. The
    sender stands still."""
    addresses = [worker.address for worker in (*others, witness)]
    for _ in range(20):
        told: Told = sender.ask("stream", nbytes=STREAM_BYTES, seed=seed, workers=addresses)
        name = told["handle"][0]
        witness.ask("watch", told=told)
        sender.await_stop()
        while not (written := witness.ask("written", name=name)):
            sender.go_on()
            sender.stop()
        if written < STREAM_BYTES:
            return told
        sender.go_on()  # it was too fast: once more
        sender.ask("wait", name=name)
        assert all(worker.receive(told, seeds=[seed]) for worker in others)
        assert witness.ask("let_go", name=name, seed=seed)
    pytest.fail(f"{STREAM_BYTES} bytes are written too fast to be half written: make it more")


def outcome(answer: Future[Any]) -> str:
    try:
        return "right" if answer.result(LIMIT_S) else "wrong bytes"
    except Gone:
        return "gone"
    except Failed as error:
        return error.kind


STAGES = ["before send", "half written", "between send and receive", "during a receive", "before release"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_worker(host: Host, stage: str) -> None:
    victim, witness = host.worker("grpc://victim"), host.worker("grpc://witness")
    sender = host.sender(victim, witness, arena_bytes=ARENA_BYTES)
    told: Told | None = None
    receiving: Future[Any] | None = None
    if stage == "between send and receive":
        told = sender.send(victim, witness, nbytes=70_001, seed=1)
        assert told["path"] == "lease"
    if stage in ("half written", "during a receive", "before release"):
        whole = sender.send(victim, nbytes=50_000, seed=2)
        told = half_written(sender, witness, victim, seed=1)
        if stage != "half written":
            # All of a request is claimed at once and released at once: the first is read whole before the stream.
            items, seeds = ([told], [1]) if stage == "during a receive" else ([whole, told], [2, 1])
            receiving = victim.begin("receive", items=items, seeds=seeds)
            assert settle(lambda: victim.ask("held") == [len(items)])
    victim.kill()
    if receiving is not None:
        assert outcome(receiving) == "gone"
    if stage in ("half written", "during a receive", "before release"):
        assert told is not None
        sender.go_on()
        sender.ask("wait", name=told["handle"][0])
        assert witness.ask("let_go", name=told["handle"][0], seed=1)
    elif told is not None:
        assert witness.receive(told, seeds=[1])
    # The others go on by leases; the victim's tensors are in their message at once.
    assert sender.uses_leases(witness)
    assert sender.send(victim, nbytes=10, seed=1)["path"] == "inline"
    assert sender.ask("metrics")["inline_fallbacks"] == {"worker_gone": 1}
    # A worker in its place is used; what was meant for the dead one is a clean error there.
    heir = host.worker("grpc://victim")
    sender.ask("connect", worker=heir.address)
    if told is not None:
        assert outcome(heir.begin("receive", items=[told], seeds=[1])) in ("LeaseError", "LeaseForgedError")
    assert sender.uses_leases(heir)
    found = sender.check_books()
    assert (found["consumers"], found["consumers_connected"], found["consumers_gone"]) == (2, 3, 1)
    assert found["aborted"] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_sender(host: Host, stage: str) -> None:
    worker, witness = host.worker("grpc://w"), host.worker("grpc://witness")
    sender = host.sender(worker, witness, arena_bytes=ARENA_BYTES)
    bystander = host.sender(worker, arena_bytes=MIB)
    waiting = bystander.send(worker, nbytes=12_345, seed=9)
    told: Told | None = None
    receiving: Future[Any] | None = None
    if stage == "between send and receive":
        told = sender.send(worker, nbytes=70_001, seed=1)
    elif stage != "before send":
        whole = sender.send(worker, nbytes=50_000, seed=2)
        told = half_written(sender, witness, worker, seed=1)
        if stage != "half written":
            items, seeds = ([told], [1]) if stage == "during a receive" else ([whole, told], [2, 1])
            receiving = worker.begin("receive", items=items, seeds=seeds)
            assert settle(lambda: sorted(worker.ask("held")) == [0, len(items)])
    sender.kill()
    if receiving is not None:
        with pytest.raises(Failed, match=rf"LeaseError: .* of {STREAM_BYTES} bytes, .* wanted"):
            receiving.result(LIMIT_S)
        with pytest.raises(Failed, match=r"LeaseError: .* has gone after"):
            witness.ask("let_go", name=told["handle"][0], seed=1)  # type: ignore[index]
    assert settle(lambda: worker.ask("held") == [0])  # the bystander's arena is the only one
    if told is not None:
        with pytest.raises(Failed, match=r"LeaseUnknownArenaError: .* no sender that is connected has it"):
            worker.receive(told, seeds=[1])
        assert worker.ask("release", told=told) == 0
    # The others go on, and so does a sender in its place.
    assert worker.receive(waiting, seeds=[9])
    assert bystander.uses_leases(worker)
    heir = host.sender(worker, witness, arena_bytes=MIB)
    assert heir.uses_leases(worker)
    assert heir.uses_leases(witness)
    for each in (bystander, heir):
        assert each.check_books()["consumers_gone"] == 0


def test_what_is_being_copied_when_its_sender_dies_arrives_whole(host: Host) -> None:
    """The mapping outlives the sender: a receive of finished leases that has begun ends well."""
    worker = host.worker("grpc://w")
    sender = host.sender(worker, arena_bytes=ARENA_BYTES)
    items = sender.ask("send_many", sizes=[30 * MIB, 30 * MIB, 1], seed=5, workers=[worker.address])
    answer = worker.begin("receive", items=items, seeds=[5, 6, 7])
    settle(lambda: worker.ask("held") == [3] or answer.done())
    sender.kill()
    assert outcome(answer) == "right"
    assert worker.ask("metrics")["leases_released"] == {"received": 3}


def test_a_worker_that_dies_while_its_sender_waits_for_room(host: Host) -> None:
    """The wait for a full arena ends in the message, not in an error."""
    worker = host.worker("grpc://w")
    sender = host.sender(worker, arena_bytes=2 * MIB, arena_wait_s=30.0)
    assert sender.send(worker, nbytes=2 * MIB, seed=1)["path"] == "lease"
    sends = [
        sender.begin("send", nbytes=1000, seed=2, workers=[worker.address]),
        sender.begin("send_many", sizes=[1000, 2000], seed=2, workers=[worker.address]),
        sender.begin("send", nbytes=1000, seed=2, workers=[worker.address, worker.address]),
    ]
    assert settle(lambda: sender.ask("waiting") == 3)
    worker.kill()
    assert sends[0].result(LIMIT_S)["path"] == "inline"
    assert [told["path"] for told in sends[1].result(LIMIT_S)] == ["inline", "inline"]
    assert sends[2].result(LIMIT_S)["path"] == "inline"
    assert sender.ask("metrics")["lease_fallbacks"] == {"worker_gone": 3}
    sender.check_books()


def test_one_of_three_readers_dies(host: Host) -> None:
    workers = [host.worker(f"grpc://{n}") for n in range(3)]
    sender = host.sender(*workers, arena_bytes=MIB)
    unread, half_read = (sender.send(*workers, nbytes=100_000, seed=seed) for seed in (1, 2))
    for worker in workers[:2]:
        assert worker.receive(half_read, seeds=[2])
    assert sender.ask("statistics")["leases_out"] == 2
    workers[2].kill()
    assert settle(lambda: sender.ask("statistics")["leases_out"] == 1)  # the two others have not read it yet
    for worker in workers[:2]:
        assert worker.receive(unread, seeds=[1])
    found = sender.check_books()
    assert (found["released"], found["consumers_gone"]) == (4, 1)
    # Without the dead one it is a lease still, with it none: nobody but these two could have it.
    two = sender.send(*workers[:2], nbytes=10, seed=3)
    three = sender.send(*workers, nbytes=10, seed=3)
    assert (two["path"], three["path"]) == ("lease", "inline")
    for worker in workers[:2]:
        assert worker.receive(two, three, seeds=[3, 3])
    sender.check_books()


def test_what_the_heir_was_sent_is_not_taken_back_with_what_the_dead_was_sent(host: Host) -> None:
    """The same url, another socket; the sender learns of the death when the heir is in use already."""
    victim, heir = host.worker("grpc://w"), host.worker("grpc://w")
    sender = host.sender(victim, heir, arena_bytes=0)
    lost, kept = sender.send(victim, nbytes=5000, seed=1), sender.send(heir, nbytes=5000, seed=2)
    assert (lost["path"], kept["path"]) == ("segment", "segment")
    victim.kill()
    assert settle(lambda: "segments_removed" in sender.ask("metrics"))
    assert sender.ask("metrics")["segments_removed"] == {"worker_gone": 1}
    assert heir.receive(kept, seeds=[2])
    assert sender.send(heir, nbytes=10, seed=1)["path"] == "segment"
    assert sender.ask("worker_gone", url="grpc://w") == 1
