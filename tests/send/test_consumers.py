"""A request for several consumers, by every way of sending: each has all of it, in its own time."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mmcopy import Receiver, Sender, ShmHandle, TensorData, TransportConfig
from mmcopy.errors import ConfigError
from mmcopy.fanout import consumers_of, for_consumer, link_consumers, names_of
from mmcopy.metrics import Counter
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.lease_side import Side, is_empty, statistics
from tests.rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")

ARRAYS = {"pixels": random_bytes(100_001), "grid": np.arange(6), "empty": np.empty((0, 3), np.uint8)}


@pytest.fixture
def sides(tmp_path: pathlib.Path, segments: Callable[[], list[str]]) -> Iterator[list[Side]]:
    """Two workers."""
    directory = tmp_path / "s"
    directory.mkdir(mode=0o700)
    sides = [Side(directory, f"grpc://127.0.0.1:{n}") for n in (1, 2)]
    yield sides
    for side in sides:
        side.close()
    assert segments() == []


@pytest.fixture
def sender(sides: list[Side]) -> Iterator[Sender]:
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=16 * MIB, num_threads=2) as sender:
        for side in sides:
            sender.connect(side.spec, timeout_s=20)
        yield sender
        assert settle(lambda: is_empty(sender)), statistics(sender)


def paths(sent: dict[str, TensorData]) -> list[str]:
    return [data.path for data in sent.values()]


def receive(receiver: Receiver, sent: dict[str, TensorData], consumer: int) -> None:
    got = receiver.receive({key: for_consumer(data, consumer) for key, data in sent.items()})
    assert all(np.array_equal(got[key], ARRAYS[key]) and got[key].shape == ARRAYS[key].shape for key in ARRAYS)


def test_leases_of_a_request_have_a_mark_for_each(sender: Sender, sides: list[Side]) -> None:
    workers = [side.spec for side in sides]
    for order in (sides, sides[::-1]):
        sent = sender.send_many(ARRAYS, worker=workers, consumers=2)
        assert paths(sent) == ["lease", "lease", "inline"]
        offsets = [data.payload.offset for data in sent.values() if isinstance(data.payload, ShmHandle)]
        assert [b - a for a, b in itertools.pairwise(offsets)] == [100_096]
        for n, side in enumerate(order):
            assert statistics(sender)["leases_out"] == 2
            receive(side.receiver, sent, n)
        assert settle(lambda: is_empty(sender))


def test_more_consumers_than_have_the_arena_get_segments(sender: Sender, sides: list[Side]) -> None:
    """A lease would be gone before the third has come."""
    for worker, consumers in [(sides[0].spec, 2), (sides[0].spec, 3)]:
        sent = sender.send_many(ARRAYS, worker=worker, consumers=consumers)
        assert paths(sent) == ["segment", "segment", "inline"]
        for n in reversed(range(consumers)):
            receive(sides[n % 2].receiver, sent, n)
        sending = sender.send_streaming(ARRAYS["pixels"], worker=worker, consumers=consumers)
        assert sending.data.path == "segment"
        assert sender.cancel(sending.data)
    # Each of two workers reads it, and somebody else: no way is right for all three.
    sent = sender.send_many(ARRAYS, worker=[side.spec for side in sides], consumers=3)
    assert paths(sent) == ["inline", "inline", "inline"]


def test_segments_of_a_request_have_a_name_for_each(shm_dir: pathlib.Path) -> None:
    with (
        Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir) as sender,
        Receiver("cpu", framework="numpy", shm_dir=shm_dir) as receiver,
    ):
        sent = sender.send_many(ARRAYS, consumers=3)
        assert paths(sent) == ["segment", "segment", "inline"]
        assert [consumers_of(sent[key].payload) for key in ("pixels", "grid")] == [3, 3]  # type: ignore[arg-type]
        for left, n in [(4, 1), (2, 2), (0, 0)]:
            receive(receiver, sent, n)
            assert len([path for path in shm_dir.iterdir() if path.suffix != ".lock"]) == left
        guarded = sender.send_many(ARRAYS, consumers=2).values()
        with pytest.raises(ConfigError, match=r"Sender.send_many consumers is 0"), sender.guard(*guarded):
            sender.send_many(ARRAYS, consumers=0)


def test_a_request_that_fails_takes_every_name_back(shm_dir: pathlib.Path) -> None:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=50), shm_dir=shm_dir, inline_max_bytes=10) as sender:
        with pytest.raises(ValueError, match="inline_max_bytes"):
            sender.send_many([random_bytes(100), random_bytes(70), random_bytes(20)], consumers=3)
        assert [path for path in shm_dir.iterdir() if path.suffix != ".lock"] == []


def test_a_stream_and_a_reservation_for_two(sender: Sender, sides: list[Side]) -> None:
    workers = [side.spec for side in sides]
    array = random_bytes(3 * MIB)
    sending = sender.send_streaming(array, worker=workers, consumers=2)
    with sender.reserve((3,), "int32", worker=workers, consumers=2) as reserved:
        assert reserved.array is not None
        reserved.array[:] = [1, 2, 3]
    assert reserved.data is not None
    assert (sending.data.path, reserved.data.path) == ("lease", "lease")
    for n, side in enumerate(sides):
        assert side.receiver.receive(for_consumer(sending.data, n)).tobytes() == array.tobytes()
        assert side.receiver.receive(for_consumer(reserved.data, n)).tolist() == [1, 2, 3]
    sending.wait(20)
    with pytest.raises(ConfigError, match=r"Sender.reserve consumers is 0"):
        sender.reserve((3,), "int32", consumers=0)


def test_a_stream_that_finds_no_room_waits_once(sides: list[Side]) -> None:
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=2 * MIB, arena_wait_s=0.05) as sender:
        sender.connect(sides[0].spec, timeout_s=20)
        held = sender.send(random_bytes(2 * MIB - 4096), worker=sides[0].spec)
        late = sender.send_streaming(random_bytes(MIB), worker=sides[0].spec).data
        assert (held.path, late.path) == ("lease", "segment")
        assert sender.metrics.get(Counter.LEASE_FALLBACKS, "full") == 1
        sides[0].receiver.receive([held, late])


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_further_name_that_another_takes_first_is_not_used(
    shm_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch, is_persistent: bool
) -> None:
    """As another user can who watches the directory: the further names follow from the first."""
    taken: list[pathlib.Path] = []

    def link_late(directory: str, name: str, consumers: int) -> None:
        if is_persistent or not taken:
            handle = ShmHandle(name, 0, 3, f"mmcopy:0123456789abcdef*{consumers}")
            taken.append(shm_dir / names_of(handle)[1])
            taken[-1].touch()
        link_consumers(directory, name, consumers)

    monkeypatch.setattr("mmcopy.send.segments.link_consumers", link_late)
    with Sender(TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=shm_dir) as sender:
        data = sender.send(b"abc", consumers=3)
        assert data.path == ("inline" if is_persistent else "segment")
        if isinstance(data.payload, ShmHandle):
            assert all((shm_dir / name).read_bytes() == b"abc" for name in names_of(data.payload))
        assert sender.metrics.get(Counter.SHM_WRITE_FAILURES, "exists") == is_persistent
        sender.cancel(data)
        assert {path for path in shm_dir.iterdir() if path.suffix != ".lock"} == set(taken)
    for path in taken:
        path.unlink()
