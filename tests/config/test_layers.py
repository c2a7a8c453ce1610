"""Which layer each transport key comes from: worker, config, SMG's variable, its legacy name, default."""

from __future__ import annotations

import itertools
import logging

import pytest

from mmcopy import Sender, TransportConfig, TransportMode, WorkerSpec
from mmcopy.config import ResolvedTransport, environment

MODE, LEGACY_MODE = "SMG_MM_TENSOR_TRANSPORT", "SMG_TOKENSPEED_MM_TENSOR_TRANSPORT"
SIZE, LEGACY_SIZE = "SMG_MM_SHM_MIN_BYTES", "SMG_TOKENSPEED_MM_SHM_MIN_BYTES"

# Each layer's own value of either key: no two layers of neighbouring ranks have the same mode.
LAYERS = {
    "worker": ("auto", 1),
    "config": ("shm", 2),
    MODE: ("auto", 3),
    LEGACY_MODE: ("shm", 4),
    "default": ("inline", 65536),
}
SIZE_SOURCES = {MODE: SIZE, LEGACY_MODE: LEGACY_SIZE}


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not warned of anything yet."""
    monkeypatch.setattr(environment, "_warned", set())


def settings(modes: set[str], sizes: set[str]) -> tuple[TransportConfig, WorkerSpec, dict[str, str]]:
    """Config, worker and environment in which these layers are set, each key by itself."""
    mode = {name: LAYERS[name][0] for name in modes}
    size = {name: LAYERS[name][1] for name in sizes}
    environ = {name: text for name, text in mode.items() if name.startswith("SMG")}
    environ |= {SIZE_SOURCES[name]: str(number) for name, number in size.items() if name.startswith("SMG")}
    return (
        TransportConfig(mode=mode.get("config"), shm_min_bytes=size.get("config")),
        WorkerSpec(
            "grpc://w",
            multimodal_tensor_transport=mode.get("worker"),
            multimodal_shm_min_bytes=size.get("worker"),
        ),
        environ,
    )


def subsets() -> list[set[str]]:
    settable = [name for name in LAYERS if name != "default"]
    return [set(chosen) for n in range(5) for chosen in itertools.combinations(settable, n)]


@pytest.mark.parametrize("modes", subsets(), ids=lambda names: "+".join(sorted(names)) or "none")
def test_every_set_of_layers_for_each_key(modes: set[str]) -> None:
    for sizes in subsets():
        config, worker, environ = settings(modes, sizes)
        resolved = config.resolve(worker, environ)
        mode_source = next(name for name in LAYERS if name in modes | {"default"})
        size_source = next(name for name in LAYERS if name in sizes | {"default"})
        assert (resolved.mode, resolved.mode_source) == (TransportMode(LAYERS[mode_source][0]), mode_source)
        assert (resolved.shm_min_bytes, resolved.shm_min_bytes_source) == (
            LAYERS[size_source][1],
            SIZE_SOURCES.get(size_source, size_source),
        )


@pytest.mark.parametrize(
    ("environ", "mode", "source", "warned"),
    [
        ({MODE: "shm"}, "shm", MODE, []),
        ({MODE: " SHM "}, "shm", MODE, []),
        ({MODE: "Auto", LEGACY_MODE: "shm"}, "auto", MODE, []),
        ({MODE: "", LEGACY_MODE: "shm"}, "shm", LEGACY_MODE, ["old name: use SMG_MM_TENSOR_TRANSPORT"]),
        ({MODE: " \t", LEGACY_MODE: "AUTO"}, "auto", LEGACY_MODE, ["old name"]),
        ({MODE: "bogus", LEGACY_MODE: "shm"}, "inline", "default", ["SMG_MM_TENSOR_TRANSPORT is 'bogus'"]),
        ({LEGACY_MODE: "bogus"}, "inline", "default", ["old name", "SMG_TOKENSPEED_MM_TENSOR_TRANSPORT is 'bogus'"]),
        ({MODE: "rdma", LEGACY_MODE: "shm"}, "inline", MODE, ["'rdma', which mmcopy does not have"]),
        ({MODE: "", LEGACY_MODE: " "}, "inline", "default", []),
    ],
)
def test_smgs_mode_variables(
    environ: dict[str, str], mode: str, source: str, warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mmcopy.config"):
        resolved = TransportConfig().resolve(environ=environ)
        assert (resolved.mode, resolved.mode_source) == (mode, source)
        TransportConfig().resolve(environ=environ)
    assert len(resolved.warnings) == len(caplog.messages) == len(warned)  # once, although it was resolved twice
    for text, told, logged in zip(warned, resolved.warnings, caplog.messages, strict=True):
        assert text in told == logged


@pytest.mark.parametrize(
    ("environ", "size", "source", "warned"),
    [
        ({SIZE: "0"}, 0, SIZE, 0),
        ({SIZE: " +24 "}, 24, SIZE, 0),
        ({SIZE: "0" * 50 + "7"}, 7, SIZE, 0),
        ({SIZE: str(2**64 - 1)}, 2**64 - 1, SIZE, 0),
        ({SIZE: str(2**64)}, 65536, "default", 1),
        ({SIZE: "9" * 5000}, 65536, "default", 1),
        ({SIZE: "64k", LEGACY_SIZE: "0"}, 65536, "default", 1),
        ({SIZE: "-1"}, 65536, "default", 1),
        ({SIZE: "0x10"}, 65536, "default", 1),
        ({SIZE: "1_0"}, 65536, "default", 1),
        ({SIZE: "1.0"}, 65536, "default", 1),
        ({SIZE: "\u0661"}, 65536, "default", 1),
        ({SIZE: "", LEGACY_SIZE: "24"}, 24, LEGACY_SIZE, 1),
        ({LEGACY_SIZE: "x"}, 65536, "default", 2),
    ],
)
def test_smgs_size_variables(environ: dict[str, str], size: int, source: str, warned: int) -> None:
    resolved = TransportConfig().resolve(environ=environ)
    assert (resolved.shm_min_bytes, resolved.shm_min_bytes_source) == (size, source)
    assert len(resolved.warnings) == warned


def test_without_an_environment_that_of_the_process_is_read_when_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TransportConfig()
    monkeypatch.setenv(MODE, "shm")
    assert config.resolve().mode_source == MODE
    monkeypatch.delenv(MODE)
    assert config.resolve().mode_source == "default"


def test_a_sender_reads_it_at_its_start_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE, "shm")
    with Sender() as sender:
        monkeypatch.setenv(MODE, "inline")
        assert sender.route([WorkerSpec("w")]).pixels.mode_source == MODE
        assert sender.route([WorkerSpec("w")]).pixels.mode == "shm"
    with Sender(environ={}) as sender:
        assert sender.route([WorkerSpec("w")]).pixels.mode_source == "default"


def test_a_config_that_knows_its_place_tells_it() -> None:
    file = TransportConfig(mode="shm", shm_min_bytes="1MiB", origins={"mode": "r.yaml:3", "shm_min_bytes": "r.yaml:4"})
    line = TransportConfig(mode="auto", origins={"mode": "--multimodal-tensor-transport"})
    resolved = line.over(file).resolve(environ={})
    assert resolved == ResolvedTransport(
        TransportMode.AUTO, "config (--multimodal-tensor-transport)", 1 << 20, "config (r.yaml:4)"
    )
    assert TransportConfig(mode="inline").over(file).resolve(environ={}).mode_source == "config"
    assert line.over(file) == TransportConfig(mode="auto", shm_min_bytes=1 << 20)  # places are no setting
