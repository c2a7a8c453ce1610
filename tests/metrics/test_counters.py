"""Counters, and histograms that cost nothing unless they are asked for."""

from __future__ import annotations

import contextlib
import pathlib
import threading

import pytest

from mmcopy import Inline, Receiver, ShmHandle, TensorData
from mmcopy.errors import SegmentNotFoundError
from mmcopy.metrics import Counter, Histogram, Metrics, Stage


def test_counts_by_label() -> None:
    metrics = Metrics()
    metrics.count(Counter.TENSORS_SENT, "inline")
    metrics.count(Counter.TENSORS_SENT, "segment", 4)
    assert (metrics.get(Counter.TENSORS_SENT), metrics.get(Counter.TENSORS_SENT, "segment")) == (5, 4)
    assert metrics.get(Counter.BYTES_SENT) == 0
    assert metrics.snapshot() == {"tensors_sent": {"inline": 1, "segment": 4}}


def test_threads_lose_no_count() -> None:
    metrics = Metrics(timings=True)

    def work() -> None:
        for _ in range(2000):
            metrics.count(Counter.BYTES_SENT, "inline", 3)
            with metrics.timer(Stage.OPEN):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert metrics.get(Counter.BYTES_SENT) == 24_000
    assert metrics.timings()["open"].count == 8000


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (1e-6, 0), (2e-6, 1), (3e-6, 2), (4e-6, 2), (5e-6, 3), (1e-3, 10), (1.0, 20), (1e6, 25)],
)
def test_buckets_double(seconds: float, bucket: int) -> None:
    histogram = Histogram()
    histogram.add(seconds)
    assert histogram.buckets.index(1) == bucket
    assert (histogram.count, histogram.sum_s, sum(histogram.buckets)) == (1, seconds, 1)


def test_without_timings_nothing_is_made() -> None:
    metrics = Metrics()
    assert metrics.timer(Stage.OPEN) is metrics.timer(Stage.RECEIVE)
    with metrics.timer(Stage.OPEN):
        pass
    assert metrics.timings() == {}


def test_the_stages_of_a_receive(shm_dir: pathlib.Path) -> None:
    metrics = Metrics(timings=True)
    with Receiver("cpu", framework="numpy", shm_dir=shm_dir, metrics=metrics) as receiver:
        receiver.receive(TensorData("uint8", (3,), Inline(b"abc")))
        with contextlib.suppress(SegmentNotFoundError):
            receiver.receive(TensorData("uint8", (3,), ShmHandle("smg-tokenspeed-missing", 0, 3)))
    assert {stage: histogram.count for stage, histogram in metrics.timings().items()} == {
        "receive": 2,
        "open": 2,
        "move": 1,
        "close": 2,
    }
    taken = metrics.timings()
    assert taken["receive"].sum_s >= taken["open"].sum_s + taken["move"].sum_s
