"""Sender and its policy: routes, reasons, and what is taken back from a worker that has gone."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import numpy as np
import pytest

from mmcopy import (
    Inline,
    Metrics,
    Sender,
    ShmHandle,
    TensorData,
    TransportConfig,
    WorkerSpec,
    shm_namespace_id,
)
from mmcopy.errors import ConfigError
from mmcopy.metrics import Counter
from mmcopy.send.routing import Reason
from mmcopy.send.segments import SegmentWriter
from mmcopy.send.workers import Workers

BIG = np.ones(1 << 16, np.uint8)
SHM = TransportConfig(mode="shm")
AUTO = TransportConfig(mode="auto")


def fallbacks(sender: Sender) -> dict[str, int]:
    return sender.metrics.snapshot().get("inline_fallbacks", {})


def segments(shm_dir: pathlib.Path) -> list[str]:
    return sorted(path.name for path in shm_dir.iterdir() if path.suffix != ".lock")


def name_of(data: TensorData) -> str:
    assert isinstance(data.payload, ShmHandle)
    return data.payload.name


def epd(shm_dir: pathlib.Path, **overrides: str) -> dict[str, WorkerSpec]:
    ours = shm_namespace_id(str(shm_dir))
    return {
        name: WorkerSpec(
            f"grpc://{name}",
            role=name.rstrip("12"),
            labels={"shm_namespace_id": ours},
            multimodal_tensor_transport=overrides.get(name),
            engine="tokenspeed",
        )
        for name in ("encode1", "encode2", "prefill", "decode")
    }


def test_a_route_says_how_to_send(shm_dir: pathlib.Path) -> None:
    workers = epd(shm_dir)
    with Sender(AUTO, shm_dir=shm_dir) as sender:
        route = sender.route(list(workers.values()))
        pixels = sender.send(BIG, worker=route.pixels.to(workers["encode2"]))
        assert pixels.path == "segment"
        # Both read it: a segment would be removed by the first.
        assert sender.send(BIG, worker=route.side_tensors).path == "inline"
        assert sender.send(BIG, worker=[workers["prefill"], workers["decode"]]).path == "inline"
        assert sender.send(np.arange(3), worker=route.side_tensors).path == "inline"
        assert fallbacks(sender) == {"several_readers": 2}
        assert sender.metrics.get(Counter.TENSORS_SENT, "segment", runtime="tokenspeed") == 1
        sender.cancel(pixels)


def test_encode_workers_that_disagree_get_pixels_inline(shm_dir: pathlib.Path) -> None:
    workers = epd(shm_dir, encode1="shm")
    with Sender(AUTO, shm_dir=shm_dir) as sender:
        route = sender.route(list(workers.values()))
        assert sender.send(BIG, worker=route.pixels).path == "inline"
        assert fallbacks(sender) == {"receivers_disagree": 1}
        assert segments(shm_dir) == []


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (None, "no_worker"),
        ({}, "namespace_unknown"),
        ({"shm_namespace_id": "x:1"}, "namespace_differs"),
        ({"shm_namespace_id": "ours", "shm_uid": str(os.geteuid() + 7)}, "uid_differs"),
    ],
)
def test_every_fallback_under_auto_has_its_reason(
    shm_dir: pathlib.Path, labels: dict[str, str] | None, reason: str
) -> None:
    worker = None
    if labels is not None:
        ours = shm_namespace_id(str(shm_dir))
        labels = {name: ours if text == "ours" else text for name, text in labels.items()}
        worker = WorkerSpec("grpc://w", labels=labels, engine="vllm")
    with Sender(AUTO, shm_dir=shm_dir) as sender:
        assert sender.send(BIG, worker=worker).path == "inline"
        assert sender.send(BIG[1:], worker=worker).path == "inline"  # too small: no fallback
        assert fallbacks(sender) == {reason: 1}
        runtime = "vllm" if worker else "unknown"
        assert sender.metrics.get(Counter.INLINE_FALLBACKS, reason, runtime=runtime) == 1


def test_what_was_not_wanted_in_shared_memory_is_no_fallback(shm_dir: pathlib.Path) -> None:
    with Sender(shm_dir=shm_dir) as sender:
        sender.send(BIG)
        sender.send(BIG[:0], worker=WorkerSpec("w", multimodal_tensor_transport="shm"))
        assert fallbacks(sender) == {}


def test_a_failed_write_is_one_fallback(tmp_path: pathlib.Path) -> None:
    with Sender(SHM, shm_dir=tmp_path / "missing") as sender:
        assert sender.send(BIG).path == "inline"
        assert fallbacks(sender) == {"not_found": 1}


@pytest.mark.parametrize("worker", ["grpc://w", 7, ["grpc://w"], [], ()])
def test_what_is_no_worker_is_refused(worker: object) -> None:
    with (
        Sender(SHM) as sender,
        pytest.raises(ConfigError, match=r"worker is .*, want a WorkerSpec, several, or a Deliv"),
    ):
        sender.send(BIG, worker=worker)  # type: ignore[arg-type]


# ---- a worker that has gone -------------------------------------------------


def test_nothing_more_is_published_for_a_worker_that_has_gone_and_the_rest_comes_back(shm_dir: pathlib.Path) -> None:
    gone, alive = WorkerSpec("grpc://gone"), WorkerSpec("grpc://alive")
    with Sender(SHM, shm_dir=shm_dir) as sender:
        published = [name_of(sender.send(BIG, worker=gone)) for _ in range(4)]
        kept = name_of(sender.send(BIG, worker=alive))
        nobodys = name_of(sender.send(BIG))
        (shm_dir / published[0]).unlink()  # consumed
        sender.cancel(TensorData("uint8", BIG.shape, ShmHandle(published[1], 0, BIG.nbytes)))
        assert sender.mark_down(gone) == 2
        assert segments(shm_dir) == sorted([kept, nobodys])
        assert sender.metrics.snapshot()["segments_removed"] == {"cancelled": 1, "worker_gone": 2}

        for target in (gone, [gone], sender.route([gone]).pixels):
            assert sender.send(BIG, worker=target).path == "inline"
        assert fallbacks(sender) == {"worker_gone": 3}
        assert sender.mark_down("grpc://gone") == 0
        assert segments(shm_dir) == sorted([kept, nobodys])

        assert sender.mark_up("grpc://gone")
        assert not sender.mark_up(gone)
        again = sender.send(BIG, worker=gone)
        assert again.path == "segment"
        for name in (kept, nobodys, name_of(again)):
            (shm_dir / name).unlink()


def test_an_encode_worker_that_has_gone_makes_its_requests_inline(shm_dir: pathlib.Path) -> None:
    workers = epd(shm_dir)
    with Sender(SHM, shm_dir=shm_dir) as sender:
        pixels = sender.route(list(workers.values())).pixels
        first = sender.send(BIG, worker=pixels.to(workers["encode1"]))
        second = sender.send(BIG, worker=pixels.to(workers["encode2"]))
        assert sender.mark_down(workers["encode1"]) == 1
        assert segments(shm_dir) == [name_of(second)]
        assert not (shm_dir / name_of(first)).exists()
        assert sender.send(BIG, worker=pixels).path == "inline"  # who gets it is open
        other = sender.send(BIG, worker=pixels.to(workers["encode2"]))
        assert other.path == "segment"
        assert sender.mark_down(workers["encode2"]) == 2


def test_a_segment_that_was_being_written_while_its_worker_went_is_taken_back(
    shm_dir: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerSpec("grpc://w")
    real = SegmentWriter.write
    with Sender(SHM, shm_dir=shm_dir) as sender:

        def write_and_lose(*args: Any, **options: Any) -> ShmHandle | Reason:
            written = real(*args, **options)
            assert len(segments(shm_dir)) == 1
            assert sender.mark_down(worker) == 0  # it is not noted yet
            return written

        monkeypatch.setattr(SegmentWriter, "write", write_and_lose)
        data = sender.send(BIG, worker=worker)
        assert isinstance(data.payload, Inline)
        assert bytes(data.payload.data) == BIG.tobytes()
        assert segments(shm_dir) == []
        assert sender.metrics.snapshot() == {
            "tensors_sent": {"inline": 1},
            "bytes_sent": {"inline": BIG.nbytes},
            "inline_fallbacks": {"worker_gone": 1},
            "segments_removed": {"worker_gone": 1},
        }


def test_what_is_remembered_is_bounded(shm_dir: pathlib.Path) -> None:
    workers = Workers(
        str(shm_dir), probe_max_age_s=30, metrics=Metrics(), unlink=lambda _: None, max_names=100, max_down=3
    )
    both = [WorkerSpec("w0"), WorkerSpec("w1")]
    for n in range(1000):
        (shm_dir / f"s{n}").touch()
        if n > 1:
            (shm_dir / f"s{n - 2}").unlink()  # consumed
        assert workers.note(both[n % 2], [f"s{n}"])
        assert workers.num_in_flight <= 101
    found = workers.mark_down("w0") + workers.mark_down("w1")
    assert set(found) >= {"s998", "s999"}
    assert len(found) <= 101
    for url in ("w0", "w1"):
        workers.mark_up(url)
    for n in range(1000):
        (shm_dir / f"t{n}").touch()  # never consumed
        workers.note(WorkerSpec("w"), [f"t{n}"])
        assert workers.num_in_flight <= 101
    newest = [f"t{n}" for n in range(1000 - workers.num_in_flight, 1000)]
    assert workers.mark_down("w") == newest
    assert len(newest) >= 50
    for n in range(5):
        workers.mark_down(f"down{n}")
    assert [workers.note(WorkerSpec(f"down{n}"), ["x"]) for n in range(5)] == [True, True, False, False, False]
    for path in shm_dir.iterdir():
        path.unlink()
