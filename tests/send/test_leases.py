"""Leases between a Sender and a Receiver: equal bytes, and the arena empty afterwards."""

from __future__ import annotations

import itertools
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, Metrics, Receiver, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.errors import (
    ClosedError,
    DeviceError,
    DtypeError,
    LeaseError,
    LeaseForgedError,
    LeaseUnknownArenaError,
    PayloadError,
)
from mmcopy.metrics import Counter
from mmcopy.receive.request import RequestOpener
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.lease_side import Side, is_empty, sender, side, sockets, statistics
from tests.rigs.waiting import settle

__all__ = ["sender", "side", "sockets"]  # fixtures

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def test_every_kind_of_array_arrives_and_the_lease_comes_back(sender: Sender, side: Side) -> None:
    for array in (random_bytes(1), random_bytes(65537), random_bytes(5 * MIB).reshape(5, -1), np.arange(7.0)[::-2]):
        data = sender.send(array, worker=side.spec)
        assert data.path == "lease"
        got = side.receiver.receive(data)
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())
    assert side.receiver.metrics.get(Counter.LEASES_RELEASED, "received") == 4
    assert sender.metrics.get(Counter.TENSORS_SENT, "lease") == 4


def test_a_cast_happens_on_the_way(sender: Sender, side: Side) -> None:
    torch = pytest.importorskip("torch")
    values = torch.randn(3, 70_001)
    data = sender.send(values, dtype="bfloat16", worker=side.spec)
    assert (data.dtype, data.path, data.nbytes) == ("bfloat16", "lease", 3 * 70_001 * 2)
    bits = side.receiver.receive(data).view(np.uint16)
    assert np.array_equal(bits, values.to(torch.bfloat16).view(torch.uint16).numpy())


def test_empty_and_small_tensors_stay_in_the_message(sender: Sender, side: Side) -> None:
    assert sender.send(np.empty((0, 3)), worker=side.spec).path == "inline"
    with Sender(TransportConfig(mode="auto", shm_min_bytes=100), arena_bytes=MIB) as careful:
        careful.connect(side.spec, timeout_s=20)
        assert careful.send(np.zeros(99, np.uint8), worker=side.spec).path == "inline"
        data = careful.send(np.zeros(100, np.uint8), worker=side.spec)
        assert data.path == "lease"
        side.receiver.receive(data)


def test_one_request_lies_side_by_side_and_keeps_its_keys(sender: Sender, side: Side) -> None:
    arrays = {
        "pixels": np.arange(70_000, dtype=np.float32) % 1000,
        "grid": np.arange(6),
        "empty": np.empty(0),
        "b": random_bytes(1),
    }
    sent = sender.send_many(arrays, dtype={"pixels": "float16"}, worker=side.spec)
    assert list(sent) == list(arrays)
    offsets = [data.payload.offset for data in sent.values() if isinstance(data.payload, ShmHandle)]
    assert len(offsets) == 3
    assert [b - a for a, b in itertools.pairwise(offsets)] == [140_032, 256]  # 256-byte steps
    got = side.receiver.receive(sent)
    assert np.array_equal(got["pixels"], arrays["pixels"].astype(np.float16))
    assert all(np.array_equal(got[key], arrays[key]) for key in ("grid", "empty", "b"))
    listed = sender.send_many([random_bytes(3), random_bytes(4)], worker=side.spec)
    assert [a.tobytes() for a in side.receiver.receive(listed)] == [
        random_bytes(3).tobytes(),
        random_bytes(4).tobytes(),
    ]


def test_one_bad_array_takes_the_others_back(sender: Sender, side: Side) -> None:
    with pytest.raises(DtypeError):
        sender.send_many([random_bytes(10), np.arange(4)], dtype=[None, "bfloat16"], worker=side.spec)
    assert settle(lambda: is_empty(sender))
    with Sender(TransportConfig(mode="auto", shm_min_bytes=50), arena_bytes=MIB, inline_max_bytes=10) as strict:
        strict.connect(side.spec, timeout_s=20)
        with pytest.raises(ValueError, match="inline_max_bytes"):
            strict.send_many([random_bytes(100), random_bytes(20)], worker=side.spec)
        assert settle(lambda: is_empty(strict))


def test_an_error_behind_the_writing_takes_committed_leases_back(
    sender: Sender, side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> TensorData:
        raise MemoryError

    monkeypatch.setattr(sender, "_segment_or_inline", fail)
    arrays = [*(random_bytes(100, n) for n in range(5)), random_bytes(0)]  # an empty one goes inline
    with pytest.raises(MemoryError):
        sender.send_many(arrays, worker=side.spec)
    assert settle(lambda: is_empty(sender))
    assert (statistics(sender)["committed"], statistics(sender)["cancelled"]) == (5, 5)


def test_a_tensor_that_is_larger_than_the_arena_takes_only_itself_off_it(
    side: Side, segments: Callable[[], list[str]]
) -> None:
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=2 * MIB) as sender:
        sender.connect(side.spec, timeout_s=20)
        arrays = {"small": random_bytes(1000), "large": random_bytes(2 * MIB + 1), "middle": random_bytes(MIB)}
        sent = sender.send_many(arrays, worker=side.spec)
        assert {key: data.path for key, data in sent.items()} == {
            "small": "lease",
            "large": "segment",
            "middle": "lease",
        }
        assert sender.metrics.get(Counter.LEASE_FALLBACKS, "full") == 1
        got = side.receiver.receive(sent)
        assert all(got[key].tobytes() == array.tobytes() for key, array in arrays.items())
        assert settle(lambda: is_empty(sender))


def test_a_full_arena_waits_then_uses_a_segment(side: Side, segments: Callable[[], list[str]]) -> None:
    options: dict[str, Any] = {"arena_bytes": 2 * MIB, "arena_wait_s": 0.05, "num_threads": 1}
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), **options) as sender:
        sender.connect(side.spec, timeout_s=20)
        held = [sender.send(random_bytes(MIB, n), worker=side.spec) for n in range(2)]
        late = sender.send(random_bytes(MIB, 2), worker=side.spec)
        assert [data.path for data in (*held, late)] == ["lease", "lease", "segment"]
        assert sender.send(random_bytes(3 * MIB), worker=side.spec).path == "segment"  # can never fit
        assert sender.metrics.get(Counter.LEASE_FALLBACKS, "full") == 2
        received = side.receiver.receive([*held, late])
        assert [a.tobytes() for a in received] == [random_bytes(MIB, n).tobytes() for n in range(3)]
        assert settle(lambda: is_empty(sender))
        timer = threading.Timer(0.3, lambda: side.receiver.receive(again))
        again = [sender.send(random_bytes(MIB, n), worker=side.spec) for n in range(2)]
    # What was handed over is still there after close, for as long as it lingers; nobody received it.
    timer.cancel()
    with pytest.raises(LeaseUnknownArenaError):
        side.receiver.receive(again)
    for name in segments():
        os.unlink(f"/dev/shm/{name}")  # noqa: PTH108


def test_a_view_is_the_memory_itself_and_holds_the_lease(sender: Sender, side: Side) -> None:
    array = np.arange(70_000, dtype=np.float32).reshape(7, -1)
    view = side.receiver.view(sender.send(array, worker=side.spec))
    assert (view.dtype, view.shape, view.flags.writeable) == (array.dtype, array.shape, False)
    part = view[3:]
    del view
    time.sleep(0.05)
    assert statistics(sender)["leases_out"] == 1
    assert np.array_equal(part, array[3:])
    del part
    assert settle(lambda: is_empty(sender))
    assert side.receiver.metrics.get(Counter.TENSORS_RECEIVED, "lease") == 1
    with pytest.raises(PayloadError, match="is inline, a view needs a lease"):
        side.receiver.view(TensorData("uint8", (1,), Inline(b"x")))
    cancelled = sender.send(array, worker=side.spec)
    sender.cancel(cancelled)
    with pytest.raises(LeaseError, match="is over"):
        side.receiver.view(cancelled)


def test_a_request_that_finds_no_room_waits_once_and_goes_by_segments(
    side: Side, segments: Callable[[], list[str]]
) -> None:
    with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=2 * MIB, arena_wait_s=0.05) as sender:
        sender.connect(side.spec, timeout_s=20)
        held = sender.send(random_bytes(2 * MIB - 4096), worker=side.spec)
        sent = sender.send_many([random_bytes(MIB, n) for n in range(8)], worker=side.spec)
        assert held.path == "lease"
        assert {data.path for data in sent} == {"segment"}
        assert sender.metrics.get(Counter.LEASE_FALLBACKS, "full") == 1
        side.receiver.receive([held, *sent])


def test_bad_handles_are_typed_errors_and_harm_no_other_lease(sender: Sender, side: Side) -> None:
    data = sender.send(random_bytes(1000), worker=side.spec)
    handle = data.payload
    assert isinstance(handle, ShmHandle)

    def receive(**changes: Any) -> Any:
        fields = {"name": handle.name, "offset": handle.offset, "nbytes": handle.nbytes, "owner_id": handle.owner_id}
        forged = ShmHandle(**{**fields, **changes})
        return side.receiver.receive(TensorData("uint8", (forged.nbytes,), forged))

    prefix, index, generation = handle.name.rsplit("-", 2)
    with pytest.raises(LeaseForgedError, match="1000"):
        receive(nbytes=999)
    with pytest.raises(LeaseForgedError):
        receive(offset=handle.offset + 256)
    with pytest.raises(LeaseForgedError):
        receive(owner_id="smg:1")
    with pytest.raises(LeaseError, match="is over"):
        receive(name=f"{prefix}-{index}-{int(generation) + 1}")
    with pytest.raises(LeaseForgedError):
        receive(name=f"{prefix}-999999-{generation}")
    other = "0" * 16
    with pytest.raises(LeaseUnknownArenaError):
        receive(name=f"mmcopyarena-{other}-0-1", owner_id=f"mmcopy:{other}")
    assert receive().tobytes() == random_bytes(1000).tobytes()
    with pytest.raises(LeaseError, match="was received already"):
        receive()
    assert side.receiver.release(data) == 0


def test_an_error_in_a_request_gives_every_lease_back(sender: Sender, side: Side) -> None:
    good = [sender.send(random_bytes(1000, n), worker=side.spec) for n in range(3)]
    bad = TensorData("uint8", (10,), ShmHandle("mmcopyarena-0000000000000000-0-1", 0, 10, "mmcopy:0000000000000000"))
    with pytest.raises(LeaseUnknownArenaError):
        side.receiver.receive([*good[:2], bad, good[2]])
    assert settle(lambda: is_empty(sender))
    data = sender.send(random_bytes(10), worker=side.spec)
    with pytest.raises(DeviceError):
        side.receiver.receive(data, out=np.empty(11, np.uint8))
    assert settle(lambda: is_empty(sender))


def test_cancel_release_and_guard(sender: Sender, side: Side) -> None:
    first, second, third = (sender.send(random_bytes(1000), worker=side.spec) for _ in range(3))
    assert sender.cancel(first)
    assert not sender.cancel(first)
    with pytest.raises(LeaseError, match="is over"):
        side.receiver.receive(first)
    assert side.receiver.release(second) == 1
    with pytest.raises(KeyError), sender.guard(third):
        raise KeyError
    assert settle(lambda: is_empty(sender))


def test_out_is_filled_and_several_receives_share_an_arena(sender: Sender, side: Side) -> None:
    out = np.zeros(3 * MIB, np.uint8)
    data = sender.send(random_bytes(3 * MIB), worker=side.spec)
    assert side.receiver.receive(data, out=out) is out
    assert out.tobytes() == random_bytes(3 * MIB).tobytes()
    wrong: list[int] = []

    def work(seed: int) -> None:
        for n in range(30):
            array = random_bytes(70_000 + n, seed)
            if side.receiver.receive(sender.send(array, worker=side.spec)).tobytes() != array.tobytes():
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_one_lease_for_two_workers(sockets: pathlib.Path, side: Side) -> None:
    other = Side(sockets, "grpc://127.0.0.1:2")
    try:
        with Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=MIB) as sender:
            for each in (side, other):
                sender.connect(each.spec, timeout_s=20)
            data = sender.send(random_bytes(5000), worker=[side.spec, other.spec])
            assert data.path == "lease"
            assert side.receiver.receive(data).tobytes() == random_bytes(5000).tobytes()
            time.sleep(0.05)
            assert statistics(sender)["leases_out"] == 1  # the other has not received it yet
            assert other.receiver.receive(data).tobytes() == random_bytes(5000).tobytes()
            assert settle(lambda: is_empty(sender))
            unread = sender.send(random_bytes(5000), worker=[side.spec, other.spec])
            side.receiver.receive(unread)
            other.close()
            assert settle(lambda: is_empty(sender))  # its marks are cleared for it
    finally:
        other.close()


def test_a_worker_without_an_endpoint_refuses_leases(sender: Sender, side: Side) -> None:
    data = sender.send(random_bytes(1000), worker=side.spec)
    with Receiver("cpu", framework="numpy") as plain, pytest.raises(LeaseUnknownArenaError, match="no endpoint"):
        plain.receive(data)
    side.receiver.receive(data)


def test_a_rank_without_the_arena_is_one_that_cannot_reach_the_lease(sender: Sender, side: Side) -> None:
    """On a group another rank, which has it, brings the bytes."""
    data = sender.send(random_bytes(1000), worker=side.spec)
    inline = TensorData("uint8", (1,), Inline(b"x"))
    request = RequestOpener("/dev/shm", ["mmcopy-"], Metrics()).request([inline, data])
    request.open_reachable()
    assert [type(error) for error in request.missing.values()] == [LeaseUnknownArenaError]
    assert list(request.missing) == [1]
    assert request.sizes == (1,)
    request.close("received")
    assert side.receiver.receive(data).tobytes() == random_bytes(1000).tobytes()


def test_a_worker_that_takes_no_arena_gets_segments(sockets: pathlib.Path, segments: Callable[[], list[str]]) -> None:
    with (
        WorkerEndpoint(sockets, max_arenas=0) as endpoint,
        Receiver("cpu", framework="numpy") as receiver,
        Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=MIB) as sender,
    ):
        spec = WorkerSpec("grpc://127.0.0.1:1", labels={"mmcopy_endpoint": endpoint.path})
        assert sender.connect(spec, timeout_s=20).reason is None
        data = sender.send(random_bytes(1000), worker=spec)
        assert data.path == "segment"
        assert receiver.receive(data).tobytes() == random_bytes(1000).tobytes()
        assert sender.metrics.get(Counter.ARENA_HAND_OVERS, "EndpointRefusedError") == 1
        assert sender.connect(spec, timeout_s=20).reason is None  # it has not gone
    assert segments() == []


def test_close_waits_for_what_is_out_and_no_longer(side: Side) -> None:
    metrics = Metrics()
    sender = Sender(TransportConfig(mode="auto", shm_min_bytes=1), arena_bytes=MIB, metrics=metrics)
    sender.connect(side.spec, timeout_s=20)
    data = sender.send(random_bytes(1000), worker=side.spec)
    timer = threading.Timer(0.2, side.receiver.receive, args=(data,))
    timer.start()
    sender.close(linger_s=30)
    timer.join(10)
    assert side.receiver.metrics.get(Counter.LEASES_RELEASED, "received") == 1
    with pytest.raises(ClosedError):
        sender.send(random_bytes(10), worker=side.spec)


def test_after_fork_the_child_has_no_arena(sender: Sender, side: Side) -> None:
    data = sender.send(random_bytes(1000), worker=side.spec)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                sender.send(random_bytes(10), worker=side.spec)
            except ClosedError:
                status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert side.receiver.receive(data).tobytes() == random_bytes(1000).tobytes()
    assert isinstance(sender.send(np.empty(0), worker=side.spec).payload, Inline)
