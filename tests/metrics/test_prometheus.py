"""What a scrape shows: SMG's names where SMG counts the same, and the sum of several metrics."""

from __future__ import annotations

import builtins
import pathlib
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from mmcopy import Inline, Metrics, Receiver, Sender, TensorData, TransportConfig, WorkerSpec
from mmcopy.errors import MissingDependencyError
from mmcopy.metrics import Counter, Stage
from mmcopy.metrics.prometheus import expose

BIG = np.ones(1 << 16, np.uint8)


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    """Samples as a server gets them, ``name{label=value,...}``."""
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{{{','.join(f'{k}={v}' for k, v in sorted(sample.labels.items()))}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_senders_counters_have_smgs_names(shm_dir: pathlib.Path) -> None:
    registry = CollectorRegistry()
    worker = WorkerSpec("grpc://w", engine="vllm")
    with Sender(TransportConfig(mode="shm"), shm_dir=shm_dir) as sender:
        expose(sender.metrics, registry=registry)
        sender.cancel(sender.send(BIG, worker=worker))
        sender.send(BIG[:9], worker=worker)
        sender.send(BIG[:7])
        seen = scraped(registry)
    assert {name: value for name, value in seen.items() if name.startswith("smg_")} == {
        "smg_mm_tensors_total{path=shm,runtime=vllm}": 1,
        "smg_mm_tensors_total{path=inline,runtime=vllm}": 1,
        "smg_mm_tensors_total{path=inline,runtime=unknown}": 1,
        "smg_mm_tensor_bytes_total{path=shm,runtime=vllm}": 65536,
        "smg_mm_tensor_bytes_total{path=inline,runtime=vllm}": 9,
        "smg_mm_tensor_bytes_total{path=inline,runtime=unknown}": 7,
    }
    assert seen["mmcopy_segments_removed_total{why=cancelled}"] == 1


def test_every_counter_says_what_its_label_is() -> None:
    metrics = Metrics()
    for counter in Counter:
        metrics.count(counter, "x")
    registry = CollectorRegistry()
    expose(metrics, registry=registry)
    seen = scraped(registry)
    assert [name for name in seen if "label=" in name] == []
    for name in (
        "arena_hand_overs_total{outcome=x}",
        "lease_fallbacks_total{reason=x}",
        "leases_released_total{why=x}",
    ):
        assert seen[f"mmcopy_{name}"] == 1
    assert seen["smg_mm_tensors_total{path=x,runtime=unknown}"] == 1


def test_failed_writes_and_fallbacks_by_reason(tmp_path: pathlib.Path) -> None:
    registry = CollectorRegistry()
    metrics = Metrics()
    with Sender(TransportConfig(mode="shm"), shm_dir=tmp_path / "missing", metrics=metrics) as sender:
        expose(metrics, registry=registry)
        sender.send(BIG, worker=WorkerSpec("w", engine="tokenspeed"))
        sender.send(BIG, worker=WorkerSpec("w", engine="tokenspeed", multimodal_tensor_transport="auto"))
    seen = scraped(registry)
    assert seen["smg_mm_shm_write_failures_total{runtime=tokenspeed}"] == 1
    assert seen["mmcopy_shm_write_failures_total{reason=not_found,runtime=tokenspeed}"] == 1
    assert seen["mmcopy_inline_fallbacks_total{reason=not_found,runtime=tokenspeed}"] == 1
    assert seen["mmcopy_inline_fallbacks_total{reason=namespace_unknown,runtime=tokenspeed}"] == 1


def test_several_metrics_are_summed_and_histograms_are_cumulative(shm_dir: pathlib.Path) -> None:
    registry = CollectorRegistry()
    both = Metrics(timings=True), Metrics(timings=True)
    expose(*both, registry=registry)
    for metrics in both:
        with Receiver("cpu", framework="numpy", shm_dir=shm_dir, metrics=metrics) as receiver:
            receiver.receive(TensorData("uint8", (3,), Inline(b"abc")))
    seen = scraped(registry)
    assert seen["mmcopy_tensors_received_total{path=inline}"] == 2
    assert seen["mmcopy_bytes_received_total{path=inline}"] == 6
    stages = {stage.value for stage in Stage if f"mmcopy_stage_seconds_count{{stage={stage.value}}}" in seen}
    assert stages == {"receive", "open", "move", "close"}
    buckets = [
        value for name, value in seen.items() if name.startswith("mmcopy_stage_seconds_bucket") and "=open" in name
    ]
    assert buckets == sorted(buckets)
    assert (buckets[-1], len(buckets)) == (2, 26)
    assert seen["mmcopy_stage_seconds_count{stage=open}"] == 2


def test_every_counter_is_shown_also_one_that_came_later() -> None:
    metrics = Metrics()
    for counter in Counter:
        metrics.count(counter, "x", 5)
    registry = CollectorRegistry()
    collector = expose(metrics, registry=registry)
    seen = scraped(registry)
    assert len(seen) == len(Counter) + 1  # failed writes have two names
    assert set(seen.values()) == {5}
    with pytest.raises(ValueError, match="Duplicated"):
        expose(metrics, registry=registry)
    registry.unregister(collector)
    assert scraped(registry) == {}


def test_without_prometheus_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependencyError, match=r"mmcopy\[metrics\]"):
        expose(Metrics())
