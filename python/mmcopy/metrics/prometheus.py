"""The counters for Prometheus. Needs ``pip install 'mmcopy[metrics]'``.

    from mmcopy.metrics.prometheus import expose
    expose(sender.metrics)                 # once; prometheus_client's own registry serves it from then on

What SMG's gateway counts too has SMG's names and labels, so one dashboard shows both: ``smg_mm_tensors_total`` and
``smg_mm_tensor_bytes_total`` by runtime and path (``inline``, ``shm``, and mmcopy's own ``lease``),
``smg_mm_shm_write_failures_total`` by runtime. All else begins with ``mmcopy_``; ``mmcopy_inline_fallbacks_total`` by
runtime and reason says why shared memory was not used where it was wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mmcopy.errors import MissingDependencyError

from . import Counter, Histogram, Metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector, CollectorRegistry

__all__ = ["expose", "families"]

_SMG = {
    Counter.TENSORS_SENT: ("smg_mm_tensors", "Tensors sent"),
    Counter.BYTES_SENT: ("smg_mm_tensor_bytes", "Bytes of the tensors sent"),
}
_SMG_PATHS = {"segment": "shm"}
_LABELS = {
    Counter.INLINE_FALLBACKS: "reason",
    Counter.SHM_WRITE_FAILURES: "reason",
    Counter.TENSORS_RECEIVED: "path",
    Counter.BYTES_RECEIVED: "path",
    Counter.RECEIVE_FAILURES: "error",
    Counter.REMOVE_FAILURES: "error",
    Counter.SEGMENTS_REMOVED: "why",
    Counter.PROBES: "outcome",
    Counter.ARENA_HAND_OVERS: "outcome",
    Counter.LEASE_FALLBACKS: "reason",
    Counter.LEASES_RELEASED: "why",
    Counter.SLOT_WAITS: "device",
    Counter.GROUP_RECEIVES: "strategy",
}
_BY_RUNTIME = (Counter.INLINE_FALLBACKS, Counter.SHM_WRITE_FAILURES)


def expose(*metrics: Metrics, registry: CollectorRegistry | None = None) -> Collector:
    """Register the sum of ``metrics`` with ``registry`` (None: prometheus_client's own), which reads it when scraped.

    Returns the collector, for ``registry.unregister``. Counting costs no more than before. Raises
    :class:`MissingDependencyError` without prometheus_client, and ValueError when the registry has these names
    already: pass all metrics in one call.
    """
    try:
        from prometheus_client import REGISTRY
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise MissingDependencyError("expose needs prometheus_client: pip install 'mmcopy[metrics]'") from error

    class MetricsCollector(Collector):
        def collect(self) -> Iterable[Metric]:
            return families(*metrics)

        def describe(self) -> Iterable[Metric]:
            return families()  # the names, so that the registry notices a second one

    collector = MetricsCollector()
    (REGISTRY if registry is None else registry).register(collector)
    return collector


def families(*metrics: Metrics) -> Iterator[Metric]:
    """The sum of ``metrics`` as prometheus_client's values; every name is there, with no sample while it is 0."""
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    sums: defaultdict[tuple[Counter, str, str], int] = defaultdict(int)
    for one in metrics:
        for counter, label, runtime, value in one.rows():
            sums[counter, label, runtime or "unknown"] += value
    for counter in Counter:
        rows = {(label, runtime): value for (which, label, runtime), value in sums.items() if which is counter}
        if counter in _SMG:
            name, text = _SMG[counter]
            by_path = {(runtime, _SMG_PATHS.get(path, path)): value for (path, runtime), value in rows.items()}
            yield _family(CounterMetricFamily(name, text, labels=["runtime", "path"]), by_path)
            continue
        if counter is Counter.SHM_WRITE_FAILURES:
            text = "Tensors whose segment could not be written"
            family = CounterMetricFamily("smg_mm_shm_write_failures", text, labels=["runtime"])
            yield _family(family, _summed(rows, by=1))
        label_name = _LABELS.get(counter, "label")
        text = counter.value.replace("_", " ").capitalize()
        if counter in _BY_RUNTIME:
            family = CounterMetricFamily(f"mmcopy_{counter.value}", text, labels=["runtime", label_name])
            yield _family(family, {(runtime, label): value for (label, runtime), value in rows.items()})
        else:
            family = CounterMetricFamily(f"mmcopy_{counter.value}", text, labels=[label_name])
            yield _family(family, _summed(rows, by=0))
    stages = HistogramMetricFamily("mmcopy_stage_seconds", "Seconds a stage of a receive takes", labels=["stage"])
    for stage, histogram in _stages(metrics).items():
        stages.add_metric([stage], buckets=_buckets(histogram), sum_value=histogram.sum_s)
    yield stages


def _family(family: Metric, rows: Mapping[Any, int]) -> Metric:
    """``family`` with a sample a row; the rows' keys are tuples of labels."""
    for labels, value in sorted(rows.items()):
        family.add_metric(list(labels), value)  # type: ignore[attr-defined]
    return family


def _summed(rows: Mapping[tuple[str, str], int], *, by: int) -> dict[tuple[str], int]:
    """The values summed by one of their two labels."""
    result: defaultdict[tuple[str], int] = defaultdict(int)
    for labels, value in rows.items():
        result[(labels[by],)] += value
    return result


def _stages(metrics: Iterable[Metrics]) -> dict[str, Histogram]:
    result: defaultdict[str, Histogram] = defaultdict(Histogram)
    for one in metrics:
        for stage, histogram in one.timings().items():
            mine = result[stage]
            mine.count += histogram.count
            mine.sum_s += histogram.sum_s
            mine.buckets = [a + b for a, b in zip(mine.buckets, histogram.buckets, strict=True)]
    return dict(result)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative, by upper bound in seconds; the last has no bound."""
    total, result = 0, []
    for n, count in enumerate(histogram.buckets):
        total += count
        bound = "+Inf" if n == len(histogram.buckets) - 1 else f"{2**n / 1e6:g}"
        result.append((bound, float(total)))
    return result
