"""Which layer a transport setting comes from."""

from __future__ import annotations

import itertools

import pytest

from mmcopy import TransportConfig, TransportMode, WorkerSpec
from mmcopy.errors import ConfigError

LAYERS = [("worker", "auto", 1), ("config", "shm", 2), ("default", "inline", 65536)]


@pytest.mark.parametrize(("worker_set", "config_set"), list(itertools.product([True, False], repeat=2)))
def test_every_pair_of_layers_by_key(worker_set: bool, config_set: bool) -> None:
    worker = WorkerSpec("grpc://w", multimodal_tensor_transport="auto" if worker_set else None)
    config = TransportConfig(mode="shm" if config_set else None, shm_min_bytes=2)
    resolved = config.resolve(worker)
    source, mode, _ = next(x for x in LAYERS if {"worker": worker_set, "config": config_set, "default": True}[x[0]])
    assert (resolved.mode, resolved.mode_source) == (TransportMode(mode), source)
    assert (resolved.shm_min_bytes, resolved.shm_min_bytes_source) == (2, "config")


def test_zero_is_a_threshold_and_not_an_absent_one() -> None:
    resolved = TransportConfig(shm_min_bytes=5).resolve(WorkerSpec("w", multimodal_shm_min_bytes=0))
    assert (resolved.shm_min_bytes, resolved.shm_min_bytes_source) == (0, "worker")
    assert TransportConfig().resolve().shm_min_bytes == 65536


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TransportConfig(mode="shmm"), r"TransportConfig.mode is 'shmm', want .*did you mean 'shm'"),
        (lambda: TransportConfig(mode=""), "mode is ''"),
        (lambda: TransportConfig(shm_min_bytes=-1), "shm_min_bytes is -1"),
        (lambda: TransportConfig(shm_min_bytes=True), "shm_min_bytes is True"),
        (lambda: WorkerSpec("grpc://w", multimodal_tensor_transport="Auto"), "worker grpc://w: .*did you mean 'auto'"),
        (
            lambda: WorkerSpec("grpc://w", multimodal_shm_min_bytes=1.5),
            "worker grpc://w: multimodal_shm_min_bytes is 1.5",
        ),
    ],
)
def test_a_bad_value_is_an_error_that_names_the_place(make, why: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=why):
        make()
