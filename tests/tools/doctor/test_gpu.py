"""Judgements of GPUs, drivers and libraries that are not at hand."""

from __future__ import annotations

import pathlib
import subprocess

import pytest

from mmcopy.tools.doctor import Status, gpu
from mmcopy.tools.units import GIB, MIB

GOOD, WARNING, PROBLEM = Status.GOOD, Status.WARNING, Status.PROBLEM


def a_gpu(**changed: object) -> gpu.Gpu:
    fields = {"generation": 5, "generation_max": 5, "width": 16, "width_max": 16, "power_state": "P0"} | changed
    return gpu.Gpu(0, "NVIDIA H200", "00000000:0F:00.0", 141 * GIB, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        (a_gpu(), GOOD, "gen 5 of 5, 16 of 16 lanes, at most 63 GB/s"),
        (a_gpu(width=8), WARNING, "8 of 16 lanes"),
        (a_gpu(generation=1, power_state="P8"), GOOD, "an idle GPU lowers its link (P8)"),
        (a_gpu(generation=3), WARNING, "gen 3 of 5"),
        (a_gpu(generation=3, power_state=None), GOOD, "look again under load"),
        (a_gpu(generation=None), GOOD, "unknown"),
        (a_gpu(width=None), GOOD, "unknown"),
        (a_gpu(generation_max=None, width_max=None), GOOD, "gen 5 of 5, 16 of 16"),
    ],
)
def test_a_link_is_judged_by_width_always_and_by_generation_under_load(
    found: gpu.Gpu, status: Status, text: str
) -> None:
    line = gpu.link(found)
    assert line.status is status
    assert text in line.found


def test_rows_of_nvidia_smi() -> None:
    found = gpu.parse_nvidia_smi(
        "0, NVIDIA H200, 00000000:0F:00.0, 580.95.05, 143771, 5, 5, 16, 16, P0\n"
        "1, Tesla T4, 00000000:10:00.0, 580.95.05, [N/A], [N/A], 3, [N/A], 16, [N/A]\n"
        "some warning\n"
    )
    assert found.driver == "580.95.05"
    assert found.gpus[0] == gpu.Gpu(0, "NVIDIA H200", "00000000:0F:00.0", 143771 * MIB, 5, 5, 16, 16, "P0")
    assert found.gpus[1] == gpu.Gpu(1, "Tesla T4", "00000000:10:00.0", None, None, 3, None, 16, None)
    assert gpu.parse_nvidia_smi("") == gpu.GpusFound(())


def test_gpus_on_the_bus_without_a_driver(tmp_path: pathlib.Path) -> None:
    def device(name: str, **files: str) -> None:
        (tmp_path / name).mkdir()
        for file_name, text in files.items():
            (tmp_path / name / file_name).write_text(f"{text}\n")

    device("0000:00:01.0", vendor="0x8086", **{"class": "0x030000"}, device="0x1")
    device("0000:00:02.0", vendor="0x10de", **{"class": "0x040300"}, device="0x2")
    device(
        "0000:0f:00.0",
        vendor="0x10de",
        **{"class": "0x030200"},
        device="0x2335",
        current_link_speed="32.0 GT/s PCIe",
        max_link_speed="32.0 GT/s PCIe",
        current_link_width="16",
        max_link_width="16",
    )
    device(
        "0000:10:00.0",
        vendor="0x10de",
        **{"class": "0x030000"},
        device="0x1",
        current_link_speed="Unknown",
        current_link_width="255",
    )
    gpus = gpu.read_sysfs(tmp_path)
    assert gpus == (
        gpu.Gpu(0, "NVIDIA device 0x2335", "0000:0f:00.0", None, 5, 5, 16, 16),
        gpu.Gpu(1, "NVIDIA device 0x1", "0000:10:00.0"),
    )
    assert gpu.gpus(gpu.GpusFound(gpus)).status is WARNING
    assert gpu.read_sysfs(tmp_path / "missing") == ()


def test_an_nvidia_smi_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu, "SMI_TIMEOUT_S", 0.2)
    line = gpu.gpus(gpu.find_gpus())
    assert line.status is WARNING
    assert "no answer within" in line.found


def test_an_import_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "slow_package.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "IMPORT_TIMEOUT_S", 0.5)
    told = gpu.probe(["slow_package"], start_cuda=False)
    assert told == {"slow_package": {"error": "importing slow_package took more than 0 s"}}


@pytest.mark.parametrize(
    ("told", "has_gpu", "status"),
    [
        (None, False, GOOD),
        (None, True, WARNING),
        ({"version": "2.11.0", "cuda": "13.0"}, True, GOOD),
        ({"version": "2.11.0", "cuda": None}, True, WARNING),
        ({"version": "2.11.0", "cuda": None}, False, GOOD),
        ({"error": "ImportError: libcudart"}, False, PROBLEM),
    ],
)
def test_torch(told: dict[str, str | None] | None, has_gpu: bool, status: Status) -> None:
    assert gpu.torch_package(told, has_gpu=has_gpu).status is status


@pytest.mark.parametrize(
    ("majors", "told", "has_gpu", "status"),
    [
        (set(), None, False, GOOD),
        (set(), None, True, WARNING),
        ({"13"}, {"version": "14.2.0"}, True, GOOD),
        ({"12"}, {"version": "14.2.0"}, True, WARNING),
        ({"12", "13"}, {"version": "14.2.0"}, True, PROBLEM),
        ({"13"}, {"error": "ImportError: libcudart"}, True, PROBLEM),
        ({"13"}, {"error": "ImportError: libcudart"}, False, WARNING),
    ],
)
def test_cupy_has_to_match_torch(
    monkeypatch: pytest.MonkeyPatch, majors: set[str], told: dict[str, str] | None, has_gpu: bool, status: Status
) -> None:
    monkeypatch.setattr(gpu, "_cupy_majors", lambda: majors)
    torch = {"version": "2.11.0", "cuda": "13.0"}
    assert gpu.cupy_package(told, torch=torch, has_gpu=has_gpu).status is status


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (None, WARNING),
        ({"error": "RuntimeError: no NVIDIA driver"}, PROBLEM),
        ({"devices": 2, "equal": False}, PROBLEM),
        ({"devices": 2, "equal": True}, GOOD),
    ],
)
def test_the_trial_of_cuda(told: dict[str, object] | None, status: Status) -> None:
    assert gpu.cuda(told).status is status


def test_find_gpus_falls_back_to_the_bus_without_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "read_sysfs", lambda: (a_gpu(),))
    assert gpu.find_gpus() == gpu.GpusFound((a_gpu(),), driver=None, trouble="")


def test_find_gpus_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(subprocess, "run", refused)
    monkeypatch.setattr(gpu, "read_sysfs", lambda: ())
    assert "Permission denied" in gpu.find_gpus().trouble
