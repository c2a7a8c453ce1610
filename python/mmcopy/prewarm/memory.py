"""What encodes take from the device, and what is left of it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

from .inputs import Shape

if TYPE_CHECKING:
    import torch

__all__ = ["Meter", "is_out_of_memory", "largest_that_fits"]

HEADROOM = 0.9
"""The part of the free memory that the largest warm-up may take: estimates are off, and other processes breathe."""


class Meter:
    """Allocated and free bytes of one device; on the CPU it measures nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._allocated_before, self._reserved_before = self._now()

    def _now(self) -> tuple[int, int]:
        if not self._cuda:
            return 0, 0
        import torch

        return torch.cuda.memory_allocated(self._device), torch.cuda.memory_reserved(self._device)

    def begin(self) -> int:
        """Start measuring a peak; the bytes that are allocated now."""
        if self._cuda:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
        return self._now()[0]

    def peak(self, begun: int) -> int | None:
        """The most that was allocated since, over ``begun``."""
        if not self._cuda:
            return None
        import torch

        return max(0, torch.cuda.max_memory_allocated(self._device) - begun)

    def available(self) -> int | None:
        """Bytes that an encode could get: free on the device, or kept by torch's allocator and unused."""
        if not self._cuda:
            return None
        import torch

        allocated, reserved = self._now()
        return torch.cuda.mem_get_info(self._device)[0] + reserved - allocated

    def kept(self) -> tuple[int | None, int | None]:
        """Allocated and reserved bytes more than at the start."""
        if not self._cuda:
            return None, None
        allocated, reserved = self._now()
        return allocated - self._allocated_before, reserved - self._reserved_before

    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""
        if self._cuda:
            import torch

            torch.cuda.synchronize(self._device)

    def give_back(self) -> None:
        """After an out-of-memory: collect what the failed encode left, and empty the allocator's cache."""
        gc.collect()
        if self._cuda:
            import torch

            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory did not suffice: by torch's class for it and Python's, never by the text."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError))


def largest_that_fits(
    shape: Shape, bytes_per_pixel: float, available: int, shrink: Callable[[Shape], Shape | None]
) -> Shape:
    """``shape``, halved until its estimated peak fits into the memory left, or the smallest. A pure function."""
    while shape.volume * bytes_per_pixel > available * HEADROOM:
        smaller = shrink(shape)
        if smaller is None:
            break
        shape = smaller
    return shape
