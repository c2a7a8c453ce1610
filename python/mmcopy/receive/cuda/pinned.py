"""Pinned memory for staging, allocated once."""

from __future__ import annotations

import logging
import pathlib

import numpy as np

from mmcopy.errors import DeviceError
from mmcopy.receive.request import ByteArray

from .stream import CudaInterfaces

__all__ = ["allocate_slots", "available_bytes"]

_log = logging.getLogger(__name__)


def allocate_slots(cuda: CudaInterfaces, num_slots: int, slot_bytes: int) -> list[ByteArray]:
    """Page-locked slots from one cudaHostAlloc; freed with the last array that refers to it.

    Where the system refuses, or has too little memory, half as many are tried, down to two, with one warning.
    """
    wanted = num_slots
    # Pinning more than there is would not fail: it would have the system kill a process, perhaps this one.
    num_slots = max(2, min(num_slots, available_bytes() // 2 // slot_bytes))
    while True:
        try:
            memory = cuda.pin(num_slots * slot_bytes)
            break
        except cuda.runtime.CUDARuntimeError as error:
            if num_slots <= 2:
                raise DeviceError(f"cannot pin {num_slots} slots of {slot_bytes} bytes: {error}") from error
            num_slots = max(2, num_slots // 2)
    if num_slots < wanted:
        _log.warning(
            "pinned %d bytes of staging memory, %d were asked for: the system refuses more (see `mmcopy doctor`)",
            num_slots * slot_bytes,
            wanted * slot_bytes,
        )
    whole: ByteArray = np.frombuffer(memory, np.uint8, num_slots * slot_bytes)
    return [whole[start : start + slot_bytes] for start in range(0, len(whole), slot_bytes)]


def available_bytes() -> int:
    """Memory that could be used without swapping, as the kernel estimates it."""
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62
