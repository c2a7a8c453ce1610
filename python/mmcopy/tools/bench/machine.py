"""What the figures were measured on, in one line."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

from mmcopy._native import DEBUG_BUILD, __version__
from mmcopy.tools.doctor.gpu import find_gpus
from mmcopy.tools.doctor.versions import installed

__all__ = ["cores", "describe"]

PACKAGES = ("numpy", "torch", "cupy-cuda13x", "cupy-cuda12x")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def describe(device: str) -> str:
    """Device, driver, cores, versions and date, for a device that a Receiver has accepted."""
    parts = [f"{cores()} cores of {processor()}", f"Linux {platform.release()}"]
    if device != "cpu":
        import torch

        name = torch.cuda.get_device_name(int(device.removeprefix("cuda:")))
        parts = [f"{name} ({device})", f"driver {find_gpus().driver or 'unknown'}", *parts]
    else:
        parts = ["host memory (cpu)", *parts]
    versions = [f"mmcopy {__version__}", f"Python {platform.python_version()}"]
    versions += [f"{package} {version}" for package in PACKAGES if (version := installed(package))]
    load = os.getloadavg()[0]
    if load > cores() / 2:
        parts.append(f"BUSY: a load of {load:.1f} on {cores()} cores before this began")
    if DEBUG_BUILD:
        parts.append("DEBUG BUILD of mmcopy: its figures mean nothing")
    parts += [", ".join(versions), f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"]
    return "; ".join(parts)


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or the architecture where the kernel gives no name."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
