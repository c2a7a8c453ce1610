"""One segment for several consumers: each has all of it, in its own time, and nothing is left behind the last."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mmcopy import Inline, Receiver, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec, _native
from mmcopy.errors import ConfigError, PayloadError, SegmentError, SegmentNotFoundError
from mmcopy.fanout import MAX_CONSUMERS, consumers_of, for_consumer, link_consumers, owner_id_for, unlink_consumers
from mmcopy.metrics import Counter
from mmcopy.send.routing import Reason
from tests.rigs.private_shm import in_private_shm

from .send.test_small_shm import PREAMBLE

SOURCE = np.random.default_rng(3).integers(0, 256, 200_003, np.uint8)


@pytest.fixture
def owner(shm_dir: pathlib.Path) -> Iterator[_native.SegmentOwner]:
    owner = _native.SegmentOwner(shm_dir)
    yield owner
    owner.close()


def publish(shm_dir: pathlib.Path, owner: _native.SegmentOwner, consumers: int) -> TensorData:
    """As a sender would."""
    name = owner.next_name()
    _native.write_segment(shm_dir, name, SOURCE)
    link_consumers(shm_dir, name, consumers)
    handle = ShmHandle(name, 0, len(SOURCE), owner_id_for(owner.instance_id, consumers))
    return TensorData("uint8", SOURCE.shape, handle)


def names_in(shm_dir: pathlib.Path) -> set[str]:
    return {path.name for path in shm_dir.iterdir() if path.suffix != ".lock"}


def name_of(data: TensorData) -> str:
    assert isinstance(data.payload, ShmHandle)
    return data.payload.name


@pytest.mark.parametrize("consumers", [1, 2, 3, 12])
def test_each_consumer_has_all_of_it_and_removes_its_own_name(
    shm_dir: pathlib.Path, owner: _native.SegmentOwner, consumers: int, nothing_left_open: None
) -> None:
    data = publish(shm_dir, owner, consumers)
    left = {name_of(for_consumer(data, n)) for n in range(consumers)}
    assert names_in(shm_dir) == left
    assert {(shm_dir / name).stat().st_nlink for name in left} == {consumers}
    assert len({(shm_dir / name).stat().st_ino for name in left}) == 1
    for n in reversed(range(consumers)):
        with Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver:
            own = for_consumer(data, n)
            assert (receiver.receive(own) == SOURCE).all()
            left.remove(name_of(own))
            assert names_in(shm_dir) == left
            with pytest.raises(SegmentNotFoundError):
                receiver.receive(own)


def test_a_slow_consumer_holds_nobody_up(shm_dir: pathlib.Path, owner: _native.SegmentOwner) -> None:
    """Three consumers, one of which waits until the others have had a hundred more."""
    first = publish(shm_dir, owner, 3)
    go = threading.Event()
    got: list[bool] = []

    def slow() -> None:
        assert go.wait(60)
        with Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver:
            got.append(bool((receiver.receive(for_consumer(first, 2)) == SOURCE).all()))

    thread = threading.Thread(target=slow)
    thread.start()
    with Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver:
        for n in range(2):
            assert (receiver.receive(for_consumer(first, n)) == SOURCE).all()
        for _ in range(100):
            data = publish(shm_dir, owner, 2)
            for n in range(2):
                receiver.receive(for_consumer(data, n))
        assert names_in(shm_dir) == {name_of(for_consumer(first, 2))}
        go.set()
        thread.join(60)
    assert got == [True]
    assert names_in(shm_dir) == set()


def test_no_two_names_are_the_same(owner: _native.SegmentOwner) -> None:
    names = []
    for _ in range(120):
        handle = ShmHandle(owner.next_name(), 0, 4, owner_id_for(owner.instance_id, 20))
        names += [name_of(for_consumer(TensorData("uint8", (4,), handle), n)) for n in range(20)]
    assert len(set(names)) == len(names)


def test_a_sweep_knows_all_the_names(shm_dir: pathlib.Path) -> None:
    """The sender has died, and consumer 1 has had its own: the rest goes."""
    owner = _native.SegmentOwner(shm_dir)
    data = publish(shm_dir, owner, 3)
    with Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver:
        receiver.receive(for_consumer(data, 1))
    assert _native.sweep(shm_dir)[0] == []
    owner.forget()
    assert sorted(_native.sweep(shm_dir)[0]) == sorted(name_of(for_consumer(data, n)) for n in (0, 2))


def test_taking_back_removes_what_is_left(shm_dir: pathlib.Path, owner: _native.SegmentOwner) -> None:
    data = publish(shm_dir, owner, 4)
    assert isinstance(data.payload, ShmHandle)
    with Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver:
        receiver.release(for_consumer(data, 2))
    assert unlink_consumers(shm_dir, data.payload, _native.Process.current()) == 3
    assert unlink_consumers(shm_dir, data.payload, _native.Process.current()) == 0
    assert names_in(shm_dir) == set()


def test_all_names_or_none(shm_dir: pathlib.Path, owner: _native.SegmentOwner) -> None:
    data = publish(shm_dir, owner, 1)
    blocked = TensorData("uint8", (4,), ShmHandle(name_of(data), 0, 4, owner_id_for(owner.instance_id, 4)))
    (shm_dir / name_of(for_consumer(blocked, 2))).touch()
    before = names_in(shm_dir)
    with pytest.raises(SegmentError, match="name 2 of 3 further ones"):
        link_consumers(shm_dir, name_of(data), 4)
    assert names_in(shm_dir) == before
    for name in before:
        (shm_dir / name).unlink()
    with pytest.raises(SegmentNotFoundError, match="name 1 of 3 further ones"):
        link_consumers(shm_dir, name_of(data), 4)


@pytest.mark.root
def test_no_room_for_another_name() -> None:
    result = in_private_shm(
        PREAMBLE
        + """
from mmcopy.fanout import link_consumers
mmcopy._native.write_segment("/dev/shm", "mmcopy-0123456789abcdef-7", numpy.ones(70000, numpy.uint8))
try:
    link_consumers("/dev/shm", "mmcopy-0123456789abcdef-7", 9)
    kind = "none"
except mmcopy.errors.NoSpaceError as error:
    kind = error.errno
print(json.dumps({"kind": kind, "left": left()}))
""",
        mount_options="size=8m,nr_inodes=5",
    )
    assert result == {"kind": 28, "left": ["mmcopy-0123456789abcdef-7"]}


def test_handles_that_have_no_such_consumer() -> None:
    inline = TensorData("uint8", (1,), Inline(b"x"))
    assert for_consumer(inline, 5) is inline
    stock = TensorData("uint8", (4,), ShmHandle("smg-tokenspeed-1-2-3", 0, 4, "smg:1"))
    assert consumers_of(ShmHandle("smg-tokenspeed-1-2-3", 0, 4, "smg:1")) == 1
    assert for_consumer(stock, 0) == stock
    for consumer in (1, -1):
        with pytest.raises(PayloadError, match=f"has 1 consumers, numbered from 0: there is no {consumer}"):
            for_consumer(stock, consumer)
    for none in ("0", None, 1.0):
        with pytest.raises(ConfigError, match="want a whole number, from 0 on"):
            for_consumer(stock, none)  # type: ignore[arg-type]
    # More than a sender gives is no number of consumers: taking back would try as many names.
    for digits in ("0", "03", "100000", "9" * 5000):
        assert consumers_of(ShmHandle("mmcopy-0123456789abcdef-7", 0, 4, f"mmcopy:0123456789abcdef*{digits}")) == 1
    assert consumers_of(ShmHandle("x", 0, 4, owner_id_for("0123456789abcdef", MAX_CONSUMERS))) == MAX_CONSUMERS
    odd = TensorData("uint8", (4,), ShmHandle("mmcopy-other", 0, 4, owner_id_for("0123456789abcdef", 2)))
    with pytest.raises(PayloadError, match="has one consumer"):
        for_consumer(odd, 1)
    for consumers in (0, -1, True, 1.0, 100_000):
        with pytest.raises(ConfigError, match="want a whole number, 1 to 99999"):
            link_consumers("/dev/shm", "mmcopy-0123456789abcdef-7", consumers)  # type: ignore[arg-type]


def test_a_sender_gives_each_consumer_a_name(shm_dir: pathlib.Path) -> None:
    with (
        Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir) as sender,
        Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver,
    ):
        data = sender.send(SOURCE, consumers=3)
        assert consumers_of(data.payload) == 3  # type: ignore[arg-type]
        assert len(names_in(shm_dir)) == 3
        for consumer in (2, 0, 1):
            assert np.array_equal(receiver.receive(for_consumer(data, consumer)), SOURCE)
        assert names_in(shm_dir) == set()
        again = sender.send(SOURCE, consumers=2)
        receiver.receive(for_consumer(again, 1))
        assert sender.cancel(again)
        assert not sender.cancel(again)
        inline = sender.send(np.empty(0), consumers=2)
        assert for_consumer(inline, 1) is inline
        with pytest.raises(ConfigError, match="consumers is 0"):
            sender.send(SOURCE, consumers=0)


def test_workers_that_all_read_it_get_a_segment_when_they_are_counted(shm_dir: pathlib.Path) -> None:
    both = [WorkerSpec("grpc://127.0.0.1:1"), WorkerSpec("grpc://127.0.0.1:2")]
    with Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir) as sender:
        assert sender.send(SOURCE, worker=both).path == "inline"
        data = sender.send(SOURCE, worker=both, consumers=2)
        assert data.path == "segment"
        assert sender.cancel(data)


def test_workers_that_are_counted_must_all_share_the_memory(shm_dir: pathlib.Path) -> None:
    """Under auto as for each of them alone; and whatever the mode none may have gone."""
    ours = {"shm_namespace_id": _native.shm_namespace_id(shm_dir)}
    here, there = (WorkerSpec(f"grpc://127.0.0.1:{n}", labels=ours) for n in (1, 2))
    strange = WorkerSpec("grpc://10.0.0.1:1", labels={"shm_namespace_id": "another:1"})
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), shm_dir=shm_dir) as sender:
        for both in ([here, strange], [strange, here], [here, WorkerSpec("grpc://10.0.0.1:2")]):
            assert sender.send(SOURCE, worker=both, consumers=2).path == "inline"
        assert sender.metrics.get(Counter.INLINE_FALLBACKS, Reason.NAMESPACE_DIFFERS) == 2
        assert sender.metrics.get(Counter.INLINE_FALLBACKS, Reason.NAMESPACE_UNKNOWN) == 1
        data = sender.send(SOURCE, worker=[here, there], consumers=2)
        assert data.path == "segment"
        assert sender.cancel(data)
    with Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir) as sender:
        sender.mark_down(there)
        assert sender.send(SOURCE, worker=[here, there], consumers=2).path == "inline"
        assert sender.metrics.get(Counter.INLINE_FALLBACKS, Reason.WORKER_DOWN) == 1


def test_what_was_decided_for_both_holds_for_one_of_them(shm_dir: pathlib.Path) -> None:
    ends = [WorkerSpec("grpc://10.0.0.1:1", role="prefill"), WorkerSpec("grpc://10.0.0.1:2", role="decode")]
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), shm_dir=shm_dir) as sender:
        one = sender.route(ends).side_tensors.to(ends[0])
        assert sender.send(SOURCE, worker=one).path == "inline"


def test_all_the_names_of_a_worker_that_has_gone_are_taken_back(shm_dir: pathlib.Path) -> None:
    worker = WorkerSpec("grpc://127.0.0.1:1")
    with (
        Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir) as sender,
        Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver,
    ):
        data, cancelled = (sender.send(SOURCE, worker=worker, consumers=3) for _ in range(2))
        receiver.receive(for_consumer(data, 1))
        assert sender.cancel(cancelled)
        assert sender.mark_down(worker) == 2
        assert names_in(shm_dir) == set()
        assert sender.send(SOURCE, worker=worker, consumers=3).path == "inline"
