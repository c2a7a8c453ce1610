"""Receiver on the CPU: equal bytes, right shapes, nothing left, one clear error for bad input."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy import Inline, MmcopyError, Receiver, Sender, ShmHandle, TensorData, TransportConfig
from mmcopy.errors import (
    ClosedError,
    ConfigError,
    DeviceError,
    PayloadError,
    SegmentError,
    SegmentNotFoundError,
    SegmentSizeError,
)
from mmcopy.receive.staging import StagingOptions
from mmcopy.tensors import DTYPES
from tests.rigs.arrays import random_bytes

EDGES = [0, 1, 4095, 4096, 4097, 65535, 65536, 65537, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (4 << 20) + 3]
ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)


def raw(tensor: Any) -> bytes:
    """The bytes of what came back, torch or numpy."""
    if isinstance(tensor, torch.Tensor):
        assert tensor.is_contiguous()
        return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    assert tensor.flags.c_contiguous
    return bytes(tensor.tobytes())


@pytest.fixture(params=["torch", "numpy"])
def receiver(request: pytest.FixtureRequest, shm_dir: pathlib.Path) -> Iterator[Receiver]:
    with Receiver("cpu", framework=request.param, shm_dir=shm_dir) as receiver:
        yield receiver


@pytest.fixture
def sender(shm_dir: pathlib.Path) -> Iterator[Sender]:
    with Sender(ALWAYS, shm_dir=shm_dir, num_threads=3) as sender:
        yield sender


@pytest.mark.parametrize("nbytes", EDGES)
def test_edge_sizes(sender: Sender, receiver: Receiver, nbytes: int) -> None:
    source = random_bytes(nbytes, nbytes)
    segment = sender.send(source)
    assert segment.path == ("segment" if nbytes else "inline")
    for data in (segment, TensorData("uint8", (nbytes,), Inline(source.tobytes()))):
        assert raw(receiver.receive(data)) == source.tobytes()


def test_more_than_two_gib(segments: Callable[[], list[str]]) -> None:
    """One read or write moves at most 0x7ffff000 bytes; sizes are 64 bits wide everywhere."""
    nbytes = 2**31 + 4097
    source = np.zeros(nbytes, np.uint8)
    marks = [0, 0x7FFFEFFF, 0x7FFFF000, 2**31 - 1, 2**31, nbytes - 1]
    source[marks] = [1, 2, 3, 4, 5, 6]
    with Sender(ALWAYS) as sender, Receiver("cpu", framework="numpy") as receiver:
        data = sender.send(source)
        assert data.path == "segment"
        got = receiver.receive(data)
    assert got.nbytes == nbytes
    assert got[marks].tolist() == [1, 2, 3, 4, 5, 6]
    assert np.count_nonzero(got) == 6


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (0, 3, 4), (5, 1, 7)])
def test_every_dtype_keeps_its_bits_and_shape(
    sender: Sender, receiver: Receiver, shm_dir: pathlib.Path, dtype: str, shape: tuple[int, ...]
) -> None:
    nbytes = DTYPES[dtype] * math.prod(shape)
    bits = random_bytes(nbytes, 7) & (1 if dtype == "bool" else 255)
    handle = sender.send(bits).payload
    for payload in (Inline(bits.tobytes()), handle):
        got = receiver.receive(TensorData(dtype, shape, payload))
        assert (tuple(got.shape), str(got.dtype).removeprefix("torch.")) == (shape, dtype)
        assert raw(got) == bits.tobytes()


def test_small_floats_without_ml_dtypes_are_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Receiver("cpu", framework="numpy") as receiver:
        got = receiver.receive(TensorData("bfloat16", (1,), Inline(b"\x80\x3f")))
        assert (got.dtype, got[0]) == (np.dtype("uint16"), 0x3F80)
        assert receiver.receive(TensorData("float8_e5m2", (1,), Inline(b"\x3c"))).dtype == np.uint8


def test_bf16_one_is_one(sender: Sender, receiver: Receiver) -> None:
    got = receiver.receive(sender.send(np.array([0x3F80], np.uint16).view(ml_dtypes.bfloat16)))
    assert float(got[0]) == 1.0


def test_the_form_of_the_items_is_kept(sender: Sender, receiver: Receiver) -> None:
    arrays = {"pixel_values": random_bytes(100_000), "grid": np.array([[1, 2, 3]])}
    items = {key: sender.send(value) for key, value in arrays.items()}
    got = receiver.receive(items)
    assert {key: raw(value) for key, value in got.items()} == {key: v.tobytes() for key, v in arrays.items()}
    got_list = receiver.receive([sender.send(value) for value in arrays.values()])
    assert [raw(value) for value in got_list] == [value.tobytes() for value in arrays.values()]
    assert receiver.receive([]) == []
    assert receiver.metrics.snapshot() == {
        "tensors_received": {"segment": 4},
        "bytes_received": {"segment": 2 * (100_000 + 24)},
        "segments_removed": {"received": 4},
    }


@given(st.lists(st.tuples(st.integers(0, 300_000), st.booleans()), max_size=6), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_random_batches(batch: list[tuple[int, bool]], num_threads: int) -> None:
    sources = [random_bytes(n, i) for i, (n, _) in enumerate(batch)]
    with (
        Sender(ALWAYS, num_threads=num_threads) as sender,
        Receiver("cpu", num_threads=num_threads) as receiver,
    ):
        items = [
            sender.send(source) if shared else TensorData("uint8", source.shape, Inline(source.tobytes()))
            for source, (_, shared) in zip(sources, batch, strict=True)
        ]
        assert [raw(t) for t in receiver.receive(items)] == [s.tobytes() for s in sources]
        assert receiver.release(items) == 0  # all gone


def test_what_arrives_is_writable_and_owns_its_memory(sender: Sender, receiver: Receiver) -> None:
    first = receiver.receive(sender.send(random_bytes(70_000, 1)))
    kept = raw(first)
    second = receiver.receive(sender.send(random_bytes(70_000, 2)))
    second[...] = 0
    assert raw(first) == kept


def handle_to(shm_dir: pathlib.Path, name: str, nbytes: int = 8, offset: int = 0) -> TensorData:
    return TensorData("uint8", (nbytes,), ShmHandle(name, offset, nbytes))


def make_short(path: pathlib.Path) -> None:
    path.write_bytes(b"1234567")


def make_symlink(path: pathlib.Path) -> None:
    path.with_name("smg-tokenspeed-target").write_bytes(b"12345678")
    path.symlink_to("smg-tokenspeed-target")


BAD_FILES = [
    ("missing", lambda path: None, SegmentNotFoundError, "smg-tokenspeed-bad", True),
    ("short", make_short, SegmentSizeError, "7", True),
    ("symlink", make_symlink, SegmentError, "smg-tokenspeed-bad", False),
    ("fifo", os.mkfifo, SegmentError, "smg-tokenspeed-bad", False),
    ("directory", os.mkdir, SegmentError, "smg-tokenspeed-bad", False),
]


@pytest.mark.parametrize(("kind", "make", "error", "why", "removed"), BAD_FILES, ids=[b[0] for b in BAD_FILES])
def test_a_bad_segment_fails_its_request_and_leaves_nothing(
    sender: Sender,
    receiver: Receiver,
    shm_dir: pathlib.Path,
    kind: str,
    make: Any,
    error: type[MmcopyError],
    why: str,
    removed: bool,
) -> None:
    bad = shm_dir / "smg-tokenspeed-bad"
    make(bad)
    before, after = sender.send(random_bytes(9)), sender.send(random_bytes(70_000))
    with pytest.raises(error, match=why):
        receiver.receive([before, handle_to(shm_dir, "smg-tokenspeed-bad"), after])
    assert os.path.lexists(bad) is not removed
    if kind == "symlink":
        assert (shm_dir / "smg-tokenspeed-target").read_bytes() == b"12345678"
        (shm_dir / "smg-tokenspeed-target").unlink()
    if not removed:
        bad.rmdir() if kind == "directory" else bad.unlink()
    assert [p.name for p in shm_dir.iterdir() if p.suffix != ".lock"] == []
    assert receiver.metrics.snapshot()["receive_failures"] == {error.__name__: 1}
    assert "tensors_received" not in receiver.metrics.snapshot()
    assert raw(receiver.receive(sender.send(random_bytes(5)))) == random_bytes(5).tobytes()  # the next one is served


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "mmcopy-a/../b", "mmcopy-\0", "/", "mmcopy-" + "x" * 300])
def test_names_that_are_none(receiver: Receiver, shm_dir: pathlib.Path, name: str) -> None:
    with pytest.raises(PayloadError):
        receiver.receive(handle_to(shm_dir, name))


def test_a_leading_slash_is_stripped_as_the_stock_consumer_does(sender: Sender, receiver: Receiver) -> None:
    data = sender.send(random_bytes(9))
    assert isinstance(data.payload, ShmHandle)
    slashed = TensorData("uint8", (9,), ShmHandle("/" + data.payload.name, 0, 9))
    assert raw(receiver.receive(slashed)) == random_bytes(9).tobytes()


def test_files_of_other_programs_are_neither_read_nor_removed(receiver: Receiver, shm_dir: pathlib.Path) -> None:
    foreign = shm_dir / "psm_1234"
    foreign.write_bytes(b"12345678")
    with pytest.raises(
        PayloadError, match=r'"psm_1234" is refused: accepted names begin with smg-tokenspeed-, mmcopy-'
    ):
        receiver.receive(handle_to(shm_dir, "psm_1234"))
    assert receiver.release(handle_to(shm_dir, "psm_1234")) == 0
    assert foreign.read_bytes() == b"12345678"
    foreign.unlink()


def test_a_message_that_names_a_senders_lock_file_does_not_reach_it(
    sender: Sender, receiver: Receiver, shm_dir: pathlib.Path
) -> None:
    data = sender.send(random_bytes(9))
    (lock,) = (path for path in shm_dir.iterdir() if path.suffix == ".lock")
    named = TensorData("uint8", (0,), ShmHandle(lock.name, 0, 0))
    with pytest.raises(PayloadError, match=r'begins with "mmcopy-" and is not a segment'):
        receiver.receive(named)
    assert receiver.release([named, TensorData("uint8", (0,), ShmHandle("/" + lock.name, 0, 0))]) == 0
    with Receiver("cpu", framework="numpy", shm_dir=shm_dir, accept_prefixes=[lock.name]) as careless:
        assert careless.release(named) == 0
    with pytest.raises(PayloadError):
        sender.cancel(named)
    assert lock.exists()
    assert raw(receiver.receive(data)) == random_bytes(9).tobytes()


@pytest.mark.parametrize(("offset", "nbytes"), [(1, 8), (8, 1), (2**64 - 1, 8), (2**63, 2**63), (0, 2**64 - 1)])
def test_ranges_beyond_the_file(receiver: Receiver, shm_dir: pathlib.Path, offset: int, nbytes: int) -> None:
    (shm_dir / "smg-tokenspeed-small").write_bytes(b"12345678")
    with pytest.raises(SegmentSizeError, match=rf"{nbytes}"):
        receiver.receive(handle_to(shm_dir, "smg-tokenspeed-small", nbytes, offset))


def test_an_offset_within_a_larger_file(receiver: Receiver, shm_dir: pathlib.Path) -> None:
    (shm_dir / "smg-tokenspeed-large").write_bytes(b"0123456789")
    assert raw(receiver.receive(handle_to(shm_dir, "smg-tokenspeed-large", 4, 3))) == b"3456"


def test_a_repeated_handle(sender: Sender, receiver: Receiver) -> None:
    data = sender.send(random_bytes(9))
    with pytest.raises(PayloadError, match="named twice in one request"):
        receiver.receive([data, data])
    with pytest.raises(SegmentNotFoundError):
        receiver.receive(data)


def test_a_peer_that_truncates_cannot_raise_sigbus(
    sender: Sender, receiver: Receiver, shm_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = sender.send(random_bytes(1 << 20))
    assert isinstance(data.payload, ShmHandle)
    path = shm_dir / data.payload.name
    destination = receiver.destination
    receive = destination.receive

    def truncate_first(*args: Any) -> Any:
        os.truncate(path, 4096)
        return receive(*args)

    monkeypatch.setattr(destination, "receive", truncate_first)
    with pytest.raises(SegmentSizeError, match="1048576"):
        receiver.receive(data)


def test_release_removes_unread_and_never_raises(sender: Sender, receiver: Receiver, shm_dir: pathlib.Path) -> None:
    items = {"a": sender.send(random_bytes(9)), "b": sender.send(np.zeros(0)), "c": sender.send(random_bytes(70_000))}
    assert receiver.release(items) == 2
    assert receiver.release(items) == 0
    assert receiver.release([ShmHandle("../x", 0, 1), ShmHandle("smg-tokenspeed-gone", 0, 1)]) == 0
    one = sender.send(random_bytes(9))
    assert receiver.release(one) == 1
    assert receiver.metrics.snapshot()["segments_removed"] == {"released": 3}


def test_a_closed_receiver_still_removes_what_it_is_handed(sender: Sender, shm_dir: pathlib.Path) -> None:
    receiver = Receiver("cpu", shm_dir=shm_dir)
    receiver.close()
    receiver.close()
    with pytest.raises(ClosedError, match="closed"):
        receiver.receive(sender.send(random_bytes(9)))


def test_a_tensor_larger_than_memory_is_one_error(receiver: Receiver, shm_dir: pathlib.Path) -> None:
    sparse = shm_dir / "smg-tokenspeed-sparse"
    sparse.touch()
    try:
        os.truncate(sparse, 2**43)
    except OSError:
        sparse.unlink()
        pytest.skip("this file system has no sparse files of 8 TiB")
    with pytest.raises(MemoryError, match=f"wanted {2**43} bytes"):
        receiver.receive(handle_to(shm_dir, "smg-tokenspeed-sparse", 2**43))


@pytest.mark.parametrize(
    ("device", "options", "error", "why"),
    [
        ("cuda", {}, DeviceError, "give the index, for example 'cuda:0'"),
        ("cuda:-1", {}, DeviceError, "want 'cpu' or 'cuda:N'"),
        ("tpu", {}, DeviceError, "device is 'tpu'"),
        ("cpu", {"framework": "jax"}, ConfigError, "framework is 'jax'"),
        ("cuda:0", {"framework": "numpy"}, ConfigError, "gives torch tensors"),
        ("cuda:99", {}, DeviceError, "cuda:99"),
        ("cpu", {"num_threads": 0}, ConfigError, "Receiver.num_threads is 0, want a whole number, 1 or more"),
        ("cpu", {"num_threads": 1.5}, ConfigError, "Receiver.num_threads is 1.5"),
        ("cpu", {"accept_prefixes": "mmcopy-"}, ConfigError, "Receiver.accept_prefixes is 'mmcopy-', want a sequence"),
        ("cpu", {"timeout_s": 0}, ConfigError, "Receiver.timeout_s is 0, want seconds, more than 0"),
        ("cpu", {"timeout_s": float("nan")}, ConfigError, "Receiver.timeout_s is nan"),
    ],
)
def test_devices_that_are_none(device: str, options: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        Receiver(device, **options)
    assert Receiver(torch.device("cpu")).device == "cpu"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"staging_bytes": 0}, "StagingOptions.staging_bytes is 0"),
        ({"slot_bytes": 4095}, "StagingOptions.slot_bytes is 4095, want a whole number, 4096 or more"),
    ],
)
def test_staging_options_are_checked(options: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        StagingOptions(**options)


@pytest.mark.parametrize("items", [None, 3, "ab", b"ab"])
def test_what_is_no_request_is_one_error(receiver: Receiver, items: Any) -> None:
    for call in (receiver.receive, receiver.receive_async, receiver.release):
        with pytest.raises(PayloadError, match=f"items is {type(items).__name__}, want a TensorData"):
            call(items)


def test_an_item_that_is_none_takes_the_others_with_it(receiver: Receiver, shm_dir: pathlib.Path) -> None:
    with Sender(ALWAYS, shm_dir=shm_dir) as sender:
        for call in (receiver.receive, receiver.receive_async):
            with pytest.raises(PayloadError, match="item 1 of 2 is int, want a TensorData"):
                call([sender.send(random_bytes(9)), 1])  # type: ignore[list-item]
            with pytest.raises(PayloadError, match="item 0 of 1 is ShmHandle"):
                call({"a": sender.send(random_bytes(9)).payload})  # type: ignore[dict-item]
        with pytest.raises(PayloadError, match="item is int"):
            Receiver("cpu", framework="numpy", shm_dir=shm_dir).view(1)  # type: ignore[arg-type]
        assert [path.suffix for path in shm_dir.iterdir()] == [".lock"]
