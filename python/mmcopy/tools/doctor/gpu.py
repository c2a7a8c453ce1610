"""GPUs, their PCIe links, torch and cupy.

This process does not call CUDA. GPUs come from nvidia-smi or sysfs, and packages are imported in another process, so
that a broken one costs a line and not the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmcopy.tools.units import bytes_text

from .line import Line, Status

__all__ = [
    "Gpu",
    "GpusFound",
    "cuda",
    "cupy_package",
    "find_gpus",
    "lines",
    "link",
    "parse_nvidia_smi",
    "read_sysfs",
    "torch_package",
]

QUERY = (
    "index,name,pci.bus_id,driver_version,memory.total,pcie.link.gen.current,pcie.link.gen.max,"
    "pcie.link.width.current,pcie.link.width.max,pstate"
)
SMI_TIMEOUT_S = 20.0
IMPORT_TIMEOUT_S = 120.0
GBPS_A_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Bytes a second after line coding, 1e9 each, by PCIe generation."""
GENERATION = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
"""By sysfs's transfer rate in GT/s."""
INSTALL = "pip install 'mmcopy[cuda13]' (or cuda12, as the driver allows)"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. None where the driver does not say."""

    index: int
    name: str
    bus_id: str
    memory_bytes: int | None = None
    generation: int | None = None
    generation_max: int | None = None
    width: int | None = None
    width_max: int | None = None
    power_state: str | None = None
    """P0 is full speed; P8 and beyond are idle."""


@dataclass(frozen=True, slots=True)
class GpusFound:
    """The GPUs that the driver shows this process, or else those on the bus, and the source."""

    gpus: tuple[Gpu, ...]
    driver: str | None = None
    """The driver's version; None when there is no driver to ask."""
    trouble: str = ""
    """The output of an nvidia-smi that failed."""


def lines(found: GpusFound, *, start_cuda: bool) -> Iterator[Line]:
    yield gpus(found)
    for gpu in found.gpus:
        yield link(gpu)
    present = [name for name in ("torch", "cupy") if _is_importable(name)]
    packages = probe(present, start_cuda=start_cuda) if present else {}
    has_gpu = bool(found.gpus)
    yield torch_package(packages.get("torch"), has_gpu=has_gpu)
    yield cupy_package(packages.get("cupy"), torch=packages.get("torch"), has_gpu=has_gpu)
    if start_cuda:
        yield cuda(packages.get("cuda"))


def find_gpus() -> GpusFound:
    """The GPUs as nvidia-smi shows them; where there is no nvidia-smi, as the PCI bus lists them. Never raises."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
        if answer.returncode == 0:
            return parse_nvidia_smi(answer.stdout)
        trouble = " ".join((answer.stdout + " " + answer.stderr).split()) or f"exit code {answer.returncode}"
    except FileNotFoundError:
        trouble = ""
    except subprocess.TimeoutExpired:
        trouble = f"no answer within {SMI_TIMEOUT_S:.0f} s"
    except OSError as error:
        trouble = str(error)
    return GpusFound(read_sysfs(), None, trouble)


def parse_nvidia_smi(text: str) -> GpusFound:
    """GPUs of ``nvidia-smi --query-gpu=... --format=csv,noheader,nounits``."""
    found, driver = [], None
    for row in text.splitlines():
        fields = [field.strip() for field in row.split(",")]
        if len(fields) != len(QUERY.split(",")) or not fields[0].isdigit():
            continue
        numbers = [int(field) if field.isdigit() else None for field in fields]
        driver = fields[3]
        found.append(
            Gpu(
                index=int(fields[0]),
                name=fields[1],
                bus_id=fields[2],
                memory_bytes=numbers[4] * 2**20 if numbers[4] is not None else None,
                generation=numbers[5],
                generation_max=numbers[6],
                width=numbers[7],
                width_max=numbers[8],
                power_state=fields[9] if fields[9].startswith("P") else None,
            )
        )
    return GpusFound(tuple(found), driver)


def read_sysfs(devices: Path = Path("/sys/bus/pci/devices")) -> tuple[Gpu, ...]:
    """NVIDIA's display and 3D controllers on the PCI bus, driver or not."""
    found: list[Gpu] = []
    for device in sorted(devices.iterdir()) if devices.is_dir() else []:
        if _text(device / "vendor") != "0x10de" or not _text(device / "class").startswith("0x03"):
            continue
        found.append(
            Gpu(
                index=len(found),
                name=f"NVIDIA device {_text(device / 'device')}",
                bus_id=device.name,
                generation=GENERATION.get(_text(device / "current_link_speed").split(" ")[0]),
                generation_max=GENERATION.get(_text(device / "max_link_speed").split(" ")[0]),
                width=_lanes(_text(device / "current_link_width")),
                width_max=_lanes(_text(device / "max_link_width")),
            )
        )
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _lanes(text: str) -> int | None:
    return int(text) if text.isdigit() and 0 < int(text) <= 32 else None


def gpus(found: GpusFound) -> Line:
    """Judge whether GPUs can be used."""
    count = f"{len(found.gpus)} GPU{'s' if len(found.gpus) != 1 else ''}"
    if found.trouble:
        return Line(
            "GPUs",
            Status.WARNING,
            f"nvidia-smi fails: {found.trouble}",
            "on a worker: load or reinstall the driver, and give the container its GPUs (docker run --gpus all)",
        )
    if found.gpus and found.driver is None:
        return Line(
            "GPUs",
            Status.WARNING,
            f"{count} on the PCI bus, no nvidia-smi",
            "on a worker: install NVIDIA's driver, and give the container its GPUs (docker run --gpus all)",
        )
    if not found.gpus:
        return Line("GPUs", Status.GOOD, "none found; a gateway needs none")
    return Line("GPUs", Status.GOOD, f"{count}, driver {found.driver}")


def link(gpu: Gpu) -> Line:
    """Judge one GPU's PCIe link: its width is fixed at boot, its generation falls while the GPU is idle."""
    name = f"GPU {gpu.index}"
    text = f"{gpu.name} at {gpu.bus_id}"
    if gpu.memory_bytes is not None:
        text += f", {bytes_text(gpu.memory_bytes)}"
    if gpu.generation is None or gpu.width is None:
        return Line(name, Status.GOOD, f"{text}, PCIe link unknown")
    generation_max, width_max = gpu.generation_max or gpu.generation, gpu.width_max or gpu.width
    text += f", PCIe gen {gpu.generation} of {generation_max}, {gpu.width} of {width_max} lanes"
    if gpu.width < width_max:
        return Line(
            name,
            Status.WARNING,
            text,
            f"{gpu.width / width_max:.0%} of the bandwidth: reseat the card, check the riser and the bifurcation",
        )
    speed = GBPS_A_LANE.get(generation_max)
    at_most = f", at most {speed * gpu.width:.0f} GB/s" if speed else ""
    if gpu.generation < generation_max:
        if gpu.power_state == "P0":
            return Line(
                name,
                Status.WARNING,
                text,
                "the link is slower than it could be though the GPU runs at full power: check the slot and the BIOS's "
                "PCIe speed setting",
            )
        state = f" ({gpu.power_state})" if gpu.power_state else ""
        text += f"; an idle GPU lowers its link{state}, look again under load"
    return Line(name, Status.GOOD, text + at_most)


_PROBE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
names, start_cuda, found = sys.argv[1].split(","), sys.argv[2] == "1", {}
for name in names:
    try:
        module = importlib.import_module(name)
        found[name] = {"version": str(module.__version__)}
        if name == "torch":
            found[name]["cuda"] = module.version.cuda
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
if start_cuda and "version" in found.get("torch", {}):
    torch = importlib.import_module("torch")
    try:
        torch.cuda.init()
        host = torch.arange(4096, dtype=torch.int32).pin_memory()
        equal = all(bool((host.to(f"cuda:{i}").cpu() == host).all()) for i in range(torch.cuda.device_count()))
        found["cuda"] = {"devices": torch.cuda.device_count(), "equal": equal}
    except Exception as error:
        found["cuda"] = {"error": f"{type(error).__name__}: {error}"}
print("\\n" + json.dumps(found))
"""


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def probe(names: list[str], *, start_cuda: bool) -> dict[str, Any]:
    """Import ``names`` in another process; their versions, or the error. Never raises."""
    command = [sys.executable, "-c", _PROBE, ",".join(names), "1" if start_cuda else "0"]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
        if answer.returncode == 0:
            found = json.loads(answer.stdout.rstrip().rsplit("\n", 1)[-1])
            return found if isinstance(found, dict) else {}
        last_words = " ".join(answer.stderr.split())[-200:]
        error = f"the process that imported {' and '.join(names)} ended with {answer.returncode}: {last_words}"
    except subprocess.TimeoutExpired:
        error = f"importing {' and '.join(names)} took more than {IMPORT_TIMEOUT_S:.0f} s"
    except (OSError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {name: {"error": error} for name in names}


def torch_package(found: Mapping[str, Any] | None, *, has_gpu: bool) -> Line:
    """Judge torch; ``found`` is None where it is not installed."""
    if found is None:
        if has_gpu:
            return Line("torch", Status.WARNING, "not installed", f"a worker on this machine needs it: {INSTALL}")
        return Line("torch", Status.GOOD, "not installed; only a worker needs it")
    if "error" in found:
        return Line(
            "torch",
            Status.PROBLEM,
            f"cannot be imported: {found['error']}",
            f"reinstall it, or uninstall it: {INSTALL}",
        )
    if found["cuda"] is None:
        text = f"{found['version']}, without CUDA"
        if has_gpu:
            return Line("torch", Status.WARNING, text, f"it cannot use this machine's GPU: {INSTALL}")
        return Line("torch", Status.GOOD, text)
    return Line("torch", Status.GOOD, f"{found['version']}, CUDA {found['cuda']}")


def cupy_package(found: Mapping[str, Any] | None, *, torch: Mapping[str, Any] | None, has_gpu: bool) -> Line:
    """Judge cupy, which has to be of torch's CUDA major version."""
    if found is None:
        if has_gpu:
            return Line("cupy", Status.WARNING, "not installed", f"receiving onto a GPU needs it: {INSTALL}")
        return Line("cupy", Status.GOOD, "not installed; only a worker with a GPU needs it")
    if "error" in found:
        # Without a GPU cupy may not find CUDA's libraries, and it is not needed.
        status = Status.PROBLEM if has_gpu else Status.WARNING
        return Line(
            "cupy", status, f"cannot be imported: {found['error']}", f"reinstall it, or uninstall it: {INSTALL}"
        )
    majors = _cupy_majors()
    text = f"{found['version']}" + (f", CUDA {' and '.join(sorted(majors))}" if majors else "")
    if len(majors) > 1:
        return Line("cupy", Status.PROBLEM, text, "two cupy packages overwrite each other: pip uninstall one of them")
    torch_cuda = (torch or {}).get("cuda")
    if majors and torch_cuda and torch_cuda.split(".")[0] not in majors:
        return Line(
            "cupy", Status.WARNING, f"{text}, but torch has CUDA {torch_cuda}", f"install the matching: {INSTALL}"
        )
    return Line("cupy", Status.GOOD, text)


def _cupy_majors() -> set[str]:
    majors = set()
    for major in ("11", "12", "13", "14"):
        try:
            importlib.metadata.version(f"cupy-cuda{major}x")
        except importlib.metadata.PackageNotFoundError:
            continue
        majors.add(major)
    return majors


def cuda(found: Mapping[str, Any] | None) -> Line:
    """Judge the trial of CUDA: 16 KiB of pinned memory to every device and back."""
    if found is None:
        return Line("CUDA", Status.WARNING, "not tried: torch cannot be imported", INSTALL)
    if "error" in found:
        return Line("CUDA", Status.PROBLEM, found["error"], "compare the driver (nvidia-smi) with torch's CUDA version")
    if not found["equal"]:
        return Line("CUDA", Status.PROBLEM, "bytes came back changed", "do not use this GPU")
    return Line("CUDA", Status.GOOD, f"started; pinned memory reached {found['devices']} devices and came back equal")
