"""The arena and its leases through the native module, sender and worker in one process."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from mmcopy import ShmHandle, TensorData, _native
from mmcopy.endpoint import SenderLink, WorkerEndpoint
from mmcopy.errors import (
    ArenaError,
    ArenaFullError,
    ArenaMemoryError,
    ClosedError,
    ConfigError,
    DtypeError,
    EndpointRefusedError,
    LeaseError,
    LeaseForgedError,
    LeaseUnknownArenaError,
    MmcopyTimeoutError,
    PayloadError,
    SegmentNotFoundError,
)
from tests.rigs.arena_rig import LIMIT_S, Worker, connect, handle_of, send
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")


@pytest.fixture
def worker(tmp_path: pathlib.Path) -> Iterator[Worker]:
    with Worker(tmp_path / "run") as made:
        yield made
        gc.collect()  # maps and leases that a test's traceback holds


@pytest.fixture
def arena() -> Iterator[_native.Arena]:
    made = _native.Arena(4 * MIB, num_threads=2)
    yield made
    made.close(LIMIT_S)


@pytest.fixture
def slot(arena: _native.Arena, worker: Worker) -> Iterator[int]:
    number, link = connect(arena, worker.path)
    yield number
    link.close()


def is_empty(arena: _native.Arena) -> bool:
    found = arena.statistics()
    return (found["used_nbytes"], found["leases_out"]) == (0, 0)


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 4097, MIB + 1, 4 * MIB])
def test_bytes_arrive_and_the_block_comes_back(arena: _native.Arena, worker: Worker, slot: int, nbytes: int) -> None:
    data = random_bytes(nbytes, 3).tobytes()
    handle = send(arena, data, [slot])
    ShmHandle(*handle)  # it fits
    assert worker.receive(handle) == data
    assert settle(lambda: is_empty(arena))
    assert arena.statistics()["released"] == 1


def test_a_handle_is_no_segment(arena: _native.Arena, worker: Worker, slot: int) -> None:
    name, offset, nbytes, owner_id = send(arena, b"abc", [slot])
    assert re.fullmatch(r"mmcopyarena-[0-9a-f]{16}-\d+-\d+", name)
    assert owner_id == f"mmcopy:{arena.instance_id}"
    assert _native.is_lease_name(name)
    assert not _native.is_lease_name("mmcopy-0123456789abcdef-1")
    assert _native.lease_arena_id(name, offset, nbytes, owner_id) == arena.instance_id
    with pytest.raises(SegmentNotFoundError):
        _native.Segment.open("/dev/shm", name)
    from mmcopy import Receiver, TensorData

    with Receiver("cpu", framework="numpy") as receiver, pytest.raises(LeaseUnknownArenaError, match="no endpoint"):
        receiver.receive(TensorData("uint8", (3,), ShmHandle(name, offset, nbytes, owner_id)))


def test_a_stock_consumer_finds_nothing(arena: _native.Arena, worker: Worker, slot: int) -> None:
    mm_shm = pytest.importorskip("smg_grpc_servicer.mm_shm")
    name, *_ = send(arena, b"abc", [slot])
    assert hasattr(mm_shm, "__file__")
    assert not (pathlib.Path("/dev/shm") / name).exists()


def test_cast_on_the_way(arena: _native.Arena, worker: Worker, slot: int) -> None:
    floats = np.arange(300_000, dtype=np.float32) / 7
    (writer,) = arena.take([600_000], [slot], timeout_s=LIMIT_S)
    writer.write(floats, src_dtype="float32", dst_dtype="bfloat16", num_threads=2)
    writer.commit()
    wanted = bytearray(600_000)
    _native.cast_into(floats, "float32", wanted, "bfloat16")
    assert worker.receive(handle_of(writer)) == wanted


def test_what_write_refuses(arena: _native.Arena, slot: int) -> None:
    (writer,) = arena.take([6], [slot], timeout_s=LIMIT_S)
    with pytest.raises(PayloadError, match="source has 5 bytes, target has 6"):
        writer.write(b"12345")
    with pytest.raises(PayloadError, match="not a whole number"):
        writer.write(b"123456", src_dtype="float32", dst_dtype="float32")
    with pytest.raises(DtypeError):
        writer.write(b"123456", src_dtype="float32")
    with pytest.raises(ConfigError):
        writer.write(b"123456", num_threads=0)
    writer.write(b"123456")
    with pytest.raises(LeaseError, match="is being written, or was"):
        writer.write(b"123456")
    assert not writer.over
    writer.commit()
    assert writer.over
    with pytest.raises(ClosedError, match=writer.name):
        writer.commit()
    with pytest.raises(ClosedError):
        memoryview(writer)
    assert "over" in repr(writer)


def test_a_reservation_is_written_in_place(arena: _native.Arena, worker: Worker, slot: int) -> None:
    (writer,) = arena.take([24], [slot], timeout_s=LIMIT_S)
    array = np.frombuffer(writer, np.float32)  # type: ignore[call-overload]
    assert (array.shape, array.flags.writeable, writer.num_views) == ((6,), True, 1)
    array[:] = np.arange(6)
    writer.commit()
    lease = worker.claim(handle_of(writer))
    view = memoryview(lease)
    assert (view.readonly, view.nbytes) == (True, 24)
    got = np.frombuffer(lease, np.float32)  # type: ignore[call-overload]
    assert got.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1
    lease.release()
    time.sleep(0.03)
    assert not is_empty(arena)  # somebody can still write there
    del array
    assert settle(lambda: is_empty(arena))


def test_a_reservation_that_is_forgotten_comes_back(arena: _native.Arena, slot: int) -> None:
    for _ in range(3):
        (writer,) = arena.take([4 * MIB], [slot], timeout_s=LIMIT_S)
        array = np.frombuffer(writer, np.uint8)  # type: ignore[call-overload]
        del writer
        array[0] = 1  # the buffer keeps it
        with pytest.raises(ArenaFullError):
            arena.take([1], [slot], timeout_s=0)
        del array
        assert settle(lambda: is_empty(arena))
    assert arena.statistics()["aborted"] == 3


def test_a_view_that_releases_when_it_is_dropped(arena: _native.Arena, worker: Worker, slot: int) -> None:
    data = random_bytes(100, 1).tobytes()
    handle = send(arena, data, [slot])
    request = _native.RequestOpener("/dev/shm", [], worker.endpoint.native, timeout_s=LIMIT_S).request(
        [TensorData("uint8", (100,), ShmHandle(*handle))]
    )
    request.open_all()
    lease = request.take_lease(0)
    request.close(False)
    array = np.frombuffer(lease, np.uint8)  # type: ignore[call-overload]
    del lease
    part = array[10:20]
    del array
    time.sleep(0.03)
    assert not is_empty(arena)
    assert part.tobytes() == data[10:20]
    del part
    assert settle(lambda: is_empty(arena))
    plain = worker.claim(send(arena, b"x", [slot]))
    del plain  # of a claim by itself dropping releases nothing
    time.sleep(0.03)
    assert arena.statistics()["held"][slot] == 1


def test_a_request_that_is_dropped_releases_what_it_claimed(arena: _native.Arena, worker: Worker, slot: int) -> None:
    """As after an interrupt in the middle of a receive."""
    items = [TensorData("uint8", (3,), ShmHandle(*send(arena, b"abc", [slot]))) for _ in range(3)]
    request = _native.RequestOpener("/dev/shm", [], worker.endpoint.native, timeout_s=LIMIT_S).request(items)
    request.open_all()
    assert arena.statistics()["held"][slot] == 3
    del request
    assert settle(lambda: is_empty(arena))


def test_a_streamed_lease(arena: _native.Arena, worker: Worker, slot: int) -> None:
    data = random_bytes(3 * MIB + 5, 9).tobytes()
    (writer,) = arena.take([len(data)], [slot], timeout_s=LIMIT_S)
    lease = worker.claim(handle_of(writer))
    assert lease.written() == 0
    with pytest.raises(MmcopyTimeoutError, match=r"0 of 1 bytes were written within 0ns"):
        lease.wait_written(1, 0)

    def write() -> None:
        writer.write(data)
        writer.commit()

    thread = threading.Thread(target=write)
    thread.start()
    seen = 0
    view = memoryview(lease)
    while seen < len(data):
        there = lease.wait_written(seen + 1, LIMIT_S)
        assert view[seen:there] == data[seen:there]
        seen = there
    thread.join(timeout=LIMIT_S)
    assert lease.release()
    assert not lease.release()


def test_giving_up(arena: _native.Arena, worker: Worker, slot: int) -> None:
    (writer,) = arena.take([100], [slot], timeout_s=LIMIT_S)
    lease = worker.claim(handle_of(writer))
    writer.abort()
    with pytest.raises(LeaseError, match="after 0 of 100 bytes"):
        lease.wait_written(100, LIMIT_S)
    with pytest.raises(LeaseError, match="given up by its sender"):
        lease.written()
    lease.release()
    assert settle(lambda: is_empty(arena))


def test_groups_and_a_full_arena(arena: _native.Arena, worker: Worker, slot: int) -> None:
    writers = arena.take([100, 24, 8], [slot], timeout_s=LIMIT_S)
    assert [writer.offset for writer in writers] == [0, 256, 512]
    with pytest.raises(ArenaFullError, match=r"no room for 4194304 bytes in 1 leases after 10ms: \d+ of 4194304 bytes"):
        arena.take([4 * MIB], [slot], timeout_s=0.01)
    with pytest.raises(ArenaFullError):
        arena.take([5 * MIB], [slot], timeout_s=LIMIT_S)  # at once
    for writer in writers:
        writer.abort()
    assert len(arena.take([4 * MIB], [slot], timeout_s=LIMIT_S)) == 1
    assert arena.statistics()["full"] == 2


def test_hostile_handles(arena: _native.Arena, worker: Worker, slot: int) -> None:
    name, offset, nbytes, owner_id = send(arena, b"abcdef", [slot])
    found = worker.endpoint.native.find_arena(arena.instance_id)
    assert found is not None
    index, generation = map(int, name.split("-")[2:])
    head = f"mmcopyarena-{arena.instance_id}"
    for bad in (
        ("", offset, nbytes, owner_id),
        (name + "\0", offset, nbytes, owner_id),
        (name + "\ud800", offset, nbytes, owner_id),
        ("../" + name, offset, nbytes, owner_id),
        (name, -1, nbytes, owner_id),
        (name, 2**64, nbytes, owner_id),
        (name, 2**64 - 1, nbytes, owner_id),
        (name, offset, nbytes + 1, owner_id),
        (name, offset, 2**64 - 1, owner_id),
        (name, offset + 256, nbytes, owner_id),
        (name, offset, nbytes, "smg:1"),
        (name, offset, nbytes, ""),
        (f"{head}-99999-{generation}", offset, nbytes, owner_id),
        (f"{head}-{index}-0", offset, nbytes, owner_id),
    ):
        with pytest.raises(LeaseForgedError):
            found.claim(*bad)
    with pytest.raises(LeaseForgedError, match=r"x{88}"):
        found.claim("mmcopyarena-" + "x" * 10_000, 0, 1, owner_id)
    with pytest.raises(LeaseError, match="is over"):
        found.claim(f"{head}-{index}-{generation + 1}", offset, nbytes, owner_id)
    other = "0123456789abcdef"
    with pytest.raises(LeaseUnknownArenaError):
        found.claim(f"mmcopyarena-{other}-{index}-{generation}", offset, nbytes, f"mmcopy:{other}")
    assert worker.endpoint.native.find_arena(other) is None
    for text in ("", "x", "+1", "0" * 17):
        assert worker.endpoint.native.find_arena(text) is None
    lease = found.claim(name, offset, nbytes, owner_id)
    with pytest.raises(LeaseError, match="still held"):
        found.claim(name, offset, nbytes, owner_id)
    lease.release()
    with pytest.raises(LeaseError, match="released"):
        found.claim(name, offset, nbytes, owner_id)


def test_taking_back(arena: _native.Arena, worker: Worker, slot: int) -> None:
    handle = send(arena, b"abc", [slot])
    assert arena.cancel(*handle)
    assert is_empty(arena)
    assert not arena.cancel(*handle)
    with pytest.raises(LeaseError, match="is over"):
        worker.claim(handle)
    with pytest.raises(LeaseForgedError):
        arena.cancel("x", 0, 0, "")


def test_what_nobody_reads_expires(worker: Worker) -> None:
    arena = _native.Arena(MIB, unclaimed_timeout_s=0.02)
    slot, link = connect(arena, worker.path)
    handle = send(arena, b"abc", [slot])
    assert settle(lambda: is_empty(arena))
    assert arena.statistics()["expired"] == 1
    with pytest.raises(LeaseError, match="is over"):
        worker.claim(handle)
    link.close()
    arena.close(LIMIT_S)


def test_a_worker_learns_of_arenas(arena: _native.Arena, worker: Worker) -> None:
    native = worker.endpoint.native
    assert native.wait_arena(0, 0) == 0
    number, link = connect(arena, worker.path)
    assert native.wait_arena(0, LIMIT_S) == 1
    (found,) = native.arenas()
    assert (found.instance_id, found.slot, found.read_only, found.owner_gone) == (
        arena.instance_id,
        number,
        True,
        False,
    )
    assert found.data_nbytes == arena.data_nbytes
    assert found.data_address % 4096 == found.flags_address % 4096 == found.flags_nbytes % 4096 == 0
    again = native.find_arena(arena.instance_id)
    assert again is not None
    assert found.is_same(again)
    lease = worker.claim(send(arena, b"abc", [number]))
    address, value = lease.release_flag
    assert found.flags_address <= address < found.flags_address + found.flags_nbytes
    assert value == int(lease.name.rpartition("-")[2])
    assert found.num_held == 1
    assert lease.defer_release()
    assert not lease.release()
    assert found.num_held == 0
    link.close()
    assert settle(lambda: found.owner_gone)
    assert native.arenas() == []
    assert "sender gone" in repr(found)


def test_a_worker_that_takes_no_arenas(arena: _native.Arena, tmp_path: pathlib.Path) -> None:
    with WorkerEndpoint(tmp_path / "run", max_arenas=0) as endpoint:
        link = SenderLink.connect(endpoint.path, timeout_s=LIMIT_S)
        with pytest.raises(EndpointRefusedError, match="0 arenas are mapped already"):
            arena.hand_over(link.native, timeout_s=LIMIT_S)
        assert link.probe(timeout_s=LIMIT_S)  # a refusal is an answer: the link stays
        link.close()
    assert arena.statistics()["consumers"] == 0


def test_bytes_of_all_arenas_are_limited(tmp_path: pathlib.Path) -> None:
    first, second = _native.Arena(4 * MIB), _native.Arena(2 * MIB)
    with WorkerEndpoint(tmp_path / "run", max_arena_bytes=5 * MIB) as endpoint:
        _, link = connect(first, endpoint.path)
        _, again = connect(first, endpoint.path)  # the same memory, which counts once
        with pytest.raises(EndpointRefusedError, match="2097152 bytes more than the 4194304 that are mapped, at most"):
            connect(second, endpoint.path)
        for each in (link, again):
            each.close()
        assert settle(lambda: endpoint.native.arenas() == [])
        _, link = connect(second, endpoint.path)
        link.close()
    for arena in (first, second):
        arena.close(LIMIT_S)


def test_one_connection_brings_a_few_arenas(tmp_path: pathlib.Path) -> None:
    arenas = [_native.Arena(MIB) for _ in range(5)]
    with WorkerEndpoint(tmp_path / "run") as endpoint, SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) as link:
        for arena in arenas[:4]:
            arena.hand_over(link.native, timeout_s=LIMIT_S)
        with pytest.raises(EndpointRefusedError, match="4 arenas came over this connection already"):
            arenas[4].hand_over(link.native, timeout_s=LIMIT_S)
        assert len(endpoint.native.arenas()) == 4
    for arena in arenas:
        arena.close(LIMIT_S)


def test_an_arena_that_comes_twice_is_read_as_each_of_the_two_consumers(arena: _native.Arena, worker: Worker) -> None:
    """As for a worker that a gateway knows by two addresses."""
    (one, first), (two, second) = connect(arena, worker.path), connect(arena, worker.path)
    assert one != two
    handles = [send(arena, bytes([n]) * 100, [slot]) for n, slot in enumerate([one, two, two, one])]
    opener = _native.RequestOpener("/dev/shm", [], worker.endpoint.native, timeout_s=LIMIT_S)
    request = opener.request([TensorData("uint8", (100,), ShmHandle(*handle)) for handle in handles])
    request.open_all()
    read = bytearray(400)
    request.read(_native.Extents([(n, 0, 0, 0, 100 * n, 100) for n in range(4)]), [read], num_threads=1)
    request.close(False)
    assert read == b"".join(bytes([n]) * 100 for n in range(4))
    assert settle(lambda: is_empty(arena))
    second.close()  # the newer one
    assert settle(lambda: len(worker.endpoint.native.arenas()) == 1)
    left = opener.request([TensorData("uint8", (5,), ShmHandle(*send(arena, b"again", [one])))])
    left.open_all()
    left.close(False)
    first.close()


def test_options_and_report() -> None:
    with pytest.raises(ConfigError, match="data_nbytes is 0"):
        _native.Arena(0)
    with pytest.raises(ConfigError, match="num_leases is 0"):
        _native.Arena(MIB, num_leases=0)
    with pytest.raises(ConfigError, match='huge_pages is "some", want "off", "transparent" or "reserved"'):
        _native.Arena(MIB, huge_pages="some")
    with pytest.raises(ArenaMemoryError, match=r"214748364800 bytes|are available"):
        _native.Arena(200 << 30)
    arena = _native.Arena(MIB + 1, huge_pages="off", num_threads=2)
    assert arena.data_nbytes == MIB + 4096
    report = arena.report()
    assert report["read_only"] is True
    assert (report["huge_pages"], report["num_threads"]) == ("off", 2)
    assert "open" in repr(arena)
    arena.close(LIMIT_S)
    arena.close(0)
    assert arena.closed
    assert "closed" in repr(arena)
    with pytest.raises(ClosedError, match=arena.instance_id):
        arena.take([1], [0], timeout_s=0)
    free = pathlib.Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    if free.exists() and free.read_text().strip() == "0":
        with pytest.raises(ArenaError, match="for 2097152 bytes: Cannot allocate memory"):
            _native.Arena(MIB, huge_pages="reserved")


def test_consumers_that_there_are_not(arena: _native.Arena) -> None:
    for slot in (0, 16, 2**32 - 1):
        with pytest.raises(ArenaError, match=f"consumer {slot} is not connected"):
            arena.take([1], [slot], timeout_s=LIMIT_S)
    with pytest.raises(ConfigError, match="consumers is empty"):
        arena.take([1], [], timeout_s=LIMIT_S)
    with pytest.raises(OverflowError):
        arena.take([-1], [0], timeout_s=0)


def test_a_forked_child_owns_nothing(arena: _native.Arena, worker: Worker, slot: int) -> None:
    lease = worker.claim(send(arena, b"abc", [slot]))
    (writer,) = arena.take([10], [slot], timeout_s=LIMIT_S)
    found = worker.endpoint.native.find_arena(arena.instance_id)
    assert found is not None
    child = os.fork()
    if child == 0:
        try:
            refused = 0
            for call in (
                lambda: arena.take([1], [slot], timeout_s=1),
                arena.statistics,
                lambda: arena.cancel(*handle_of(writer)),
                writer.commit,
                lambda: writer.write(bytes(10)),
                lambda: memoryview(writer),
                lease.release,
                lambda: found.claim(*handle_of(writer)),
            ):
                try:
                    call()
                except ClosedError:
                    refused += 1
            writer.abort()
            arena.close(1)
            good = refused == 8 and arena.closed and writer.over and found.num_held == 0
            del writer, lease, found
            os._exit(7 if good else refused)
        finally:
            os._exit(99)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert arena.statistics()["leases_out"] == 2
    assert bytes(lease) == b"abc"
    assert lease.release()
    writer.abort()
    assert settle(lambda: is_empty(arena))
