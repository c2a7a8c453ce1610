"""Sender: which path, which bytes, what is counted, and what is taken back."""

from __future__ import annotations

import logging
import os
import pathlib

import numpy as np
import pytest
import torch

from mmcopy import Inline, Sender, ShmHandle, TensorData, TransportConfig, WorkerSpec, shm_namespace_id
from mmcopy.errors import ArrayTypeError, ClosedError, ConfigError, DtypeError, InlineTooLargeError, PayloadError
from mmcopy.metrics import Counter

SHM = TransportConfig(mode="shm")


def payload_bytes(data: TensorData, shm_dir: pathlib.Path) -> bytes:
    """The payload as a plain reader sees it; a segment is consumed."""
    if isinstance(data.payload, Inline):
        return bytes(data.payload.data)
    path = shm_dir / data.payload.name
    content = path.read_bytes()
    path.unlink()
    assert len(content) == data.payload.nbytes
    return content


def test_default_is_inline(shm_dir: pathlib.Path) -> None:
    with Sender(shm_dir=shm_dir) as sender:
        data = sender.send(np.zeros(1 << 20, np.uint8))
        assert isinstance(data.payload, Inline)
        assert list(shm_dir.iterdir()) == []  # not even a lock file


@pytest.mark.parametrize(("nbytes", "path"), [(65535, "inline"), (65536, "segment"), (65537, "segment")])
def test_the_threshold_is_inclusive(shm_dir: pathlib.Path, nbytes: int, path: str) -> None:
    source = np.arange(nbytes, dtype=np.uint64).astype(np.uint8)
    with Sender(SHM, shm_dir=shm_dir) as sender:
        data = sender.send(source)
        assert data.path == path
        assert payload_bytes(data, shm_dir) == source.tobytes()
        assert sender.metrics.snapshot() == {"tensors_sent": {path: 1}, "bytes_sent": {path: nbytes}}


def test_the_threshold_counts_bytes_after_the_cast(shm_dir: pathlib.Path) -> None:
    source = np.ones(32767, np.float32)
    with Sender(SHM, shm_dir=shm_dir) as sender:
        assert sender.send(source, dtype="bfloat16").path == "inline"
        data = sender.send(np.ones(32768, np.float32), dtype="bfloat16")
        assert (data.path, data.dtype, data.nbytes) == ("segment", "bfloat16", 65536)
        assert payload_bytes(data, shm_dir) == b"\x80\x3f" * 32768


def test_a_segment_is_what_a_stock_consumer_wants(shm_dir: pathlib.Path) -> None:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=shm_dir) as sender:
        data = sender.send(np.arange(6, dtype=np.int64).reshape(2, 3))
        assert isinstance(data.payload, ShmHandle)
        status = (shm_dir / data.payload.name).lstat()
        assert (oct(status.st_mode), status.st_size, status.st_uid, status.st_nlink) == (
            "0o100600",
            48,
            os.geteuid(),
            1,
        )
        assert (data.payload.offset, data.payload.nbytes, "/" in data.payload.name) == (0, 48, False)
        assert not data.payload.name.startswith("smg-tokenspeed-")  # the gateway's sweep deletes those by pid
        assert sender.cancel(data)


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_casts_are_torchs_on_both_paths(shm_dir: pathlib.Path, target: str) -> None:
    source = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(1))
    oracle = source.to(getattr(torch, target)).view(torch.int16).numpy().tobytes()
    for mode in ("inline", "shm"):
        with Sender(TransportConfig(mode=mode), shm_dir=shm_dir, num_threads=3) as sender:
            data = sender.send(source, dtype=target)
            assert (data.path, data.shape) == ({"inline": "inline", "shm": "segment"}[mode], (3, 70_001))
            assert payload_bytes(data, shm_dir) == oracle


def test_a_cast_that_does_not_exist_is_refused_before_anything_is_written(shm_dir: pathlib.Path) -> None:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=shm_dir) as sender:
        with pytest.raises(DtypeError, match=r"no cast from int64 to bfloat16; there is .*float32 to bfloat16"):
            sender.send(np.arange(3), dtype="bfloat16")
        assert sender.send(np.float32([1]), dtype="float32").dtype == "float32"
        assert list(shm_dir.glob("mmcopy-*-*[0-9]")) == [p for p in shm_dir.iterdir() if p.suffix != ".lock"]
        for path in shm_dir.iterdir():
            if path.suffix != ".lock":
                path.unlink()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3, 4), (2, 0)])
def test_0d_and_empty_keep_their_shape_and_make_no_file_when_empty(
    shm_dir: pathlib.Path, shape: tuple[int, ...]
) -> None:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=0), shm_dir=shm_dir) as sender:
        data = sender.send(np.full(shape, 7, np.int64))
        assert (data.shape, data.path) == (shape, "segment" if shape == () else "inline")
        assert payload_bytes(data, shm_dir) == np.full(shape, 7, np.int64).tobytes()


def test_auto_needs_the_same_namespace(shm_dir: pathlib.Path) -> None:
    ours = shm_namespace_id(str(shm_dir))
    assert ours
    source = np.ones(65536, np.uint8)
    with Sender(TransportConfig(mode="auto"), shm_dir=shm_dir) as sender:
        for labels, path in [
            ({"shm_namespace_id": ours}, "segment"),
            ({"shm_namespace_id": "x:1"}, "inline"),
            ({}, "inline"),
        ]:
            data = sender.send(source, worker=WorkerSpec("grpc://w", labels=labels))
            assert data.path == path
            sender.cancel(data)
        assert sender.send(source).path == "inline"
        assert sender.metrics.get(Counter.SHM_WRITE_FAILURES) == 0


def test_a_failed_segment_goes_inline_and_is_counted(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    source = np.arange(70_000, dtype=np.uint8)
    with (
        caplog.at_level(logging.WARNING),
        Sender(SHM, shm_dir=tmp_path / "missing") as sender,
    ):
        data = sender.send(source)
        assert isinstance(data.payload, Inline)
        assert bytes(data.payload.data) == source.tobytes()
        assert sender.metrics.snapshot()["shm_write_failures"] == {"not_found": 1}
    assert "goes inline" in caplog.text
    assert "missing" in caplog.text


def test_an_inline_tensor_may_be_bounded() -> None:
    with Sender(inline_max_bytes=4 << 20) as sender:
        assert sender.send(np.zeros(4 << 20, np.uint8)).nbytes == 4194304
        with pytest.raises(InlineTooLargeError, match=r"takes 4194305 bytes .* inline_max_bytes allows 4194304"):
            sender.send(np.zeros((4 << 20) + 1, np.uint8))
        assert sender.metrics.get(Counter.TENSORS_SENT) == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_threads": 0}, "Sender.num_threads is 0"),
        ({"num_threads": True}, "Sender.num_threads is True"),
        ({"arena_wait_s": "soon"}, "Sender.arena_wait_s is 'soon'"),
        ({"arena_wait_s": float("nan")}, "Sender.arena_wait_s is nan"),
        ({"arena_wait_s": None}, "Sender.arena_wait_s is None"),
        ({"inline_max_bytes": -1}, "Sender.inline_max_bytes is -1, want a whole number, 0 or more"),
    ],
)
def test_options_that_are_none(options: dict[str, int], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Sender(**options)  # type: ignore[arg-type]


def test_the_source_may_be_reused_at_once(shm_dir: pathlib.Path) -> None:
    for mode in ("inline", "shm"):
        source = np.ones(1 << 17, np.uint8)
        with Sender(TransportConfig(mode=mode), shm_dir=shm_dir) as sender:
            data = sender.send(source)
            source[:] = 2
            assert payload_bytes(data, shm_dir) == b"\1" * (1 << 17)


def test_guard_takes_back_what_was_not_handed_over(shm_dir: pathlib.Path) -> None:
    with Sender(SHM, shm_dir=shm_dir) as sender:
        first, second = (sender.send(np.ones(1 << 16, np.uint8)) for _ in range(2))
        assert isinstance(first.payload, ShmHandle)
        assert isinstance(second.payload, ShmHandle)
        (shm_dir / first.payload.name).unlink()  # consumed before the request failed
        with pytest.raises(ConnectionError, match="the request failed"), sender.guard(first, second):
            raise ConnectionError("the request failed")
        assert not (shm_dir / second.payload.name).exists()
        assert sender.metrics.snapshot()["segments_removed"] == {"cancelled": 1}
        third = sender.send(np.ones(1 << 16, np.uint8))
        with sender.guard(third):
            pass
        assert payload_bytes(third, shm_dir) == b"\1" * (1 << 16)  # handed over: the worker's


def test_after_close(shm_dir: pathlib.Path) -> None:
    sender = Sender(SHM, shm_dir=shm_dir)
    data = sender.send(np.ones(1 << 16, np.uint8))
    sender.close()
    sender.close()
    with pytest.raises(ClosedError, match="closed"):
        sender.send(b"a")
    assert payload_bytes(data, shm_dir) == b"\1" * (1 << 16)  # a segment that was handed over stays


def test_arguments_that_are_none_are_named(shm_dir: pathlib.Path) -> None:
    arrays = [np.ones(3, np.float32)] * 2
    with Sender(SHM, shm_dir=shm_dir, arena_bytes="4096", inline_max_bytes="100", arena_wait_s=0) as sender:  # type: ignore[arg-type]
        for dtype in (["bfloat16"], 3):
            with pytest.raises(ConfigError, match=r"which has none for tensor [01]: want one for all"):
                sender.send_many(arrays, dtype=dtype)  # type: ignore[call-overload]
        with pytest.raises(ConfigError, match="which has none for tensor 'a'"):
            sender.send_many({"a": arrays[0]}, dtype=["bfloat16"])  # type: ignore[call-overload]
        for none in (3, (array for array in arrays), {1, 2}):
            with pytest.raises(ArrayTypeError, match="want a mapping or a sequence of arrays"):
                sender.send_many(none)  # type: ignore[call-overload]
        for shape in (5, None, (2.0,), ("a",), (-1,), (-1, -4)):
            with pytest.raises(PayloadError, match=r"not a sequence of integers|negative dimension"):
                sender.reserve(shape, "float32")  # type: ignore[arg-type]
        assert sender.send(arrays[0], consumers="2").path == "inline"  # type: ignore[arg-type]
        with pytest.raises(InlineTooLargeError):
            sender.send(np.ones(101, np.uint8))
    for seconds in (-1, float("nan"), "soon"):
        with pytest.raises(ConfigError, match=r"Sender.arena_wait_s is .*, want seconds"):
            Sender(arena_wait_s=seconds)  # type: ignore[arg-type]
