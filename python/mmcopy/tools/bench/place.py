"""Where a benchmark's bytes go, host memory or one GPU, and the copies that plain code makes there.

Arrays are flat uint8. Nothing here uses mmcopy.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

__all__ = ["ByteArray", "CudaPlace", "HostPlace", "Place", "framework_for", "place_for"]

ByteArray: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Place(Protocol):
    """A device, and the primitives that baselines are written in."""

    limit_name: str
    """The name of the fastest possible path here."""
    is_gpu: bool

    def host(self, nbytes: int) -> Any:
        """New host memory from which copies to the device are fastest: page-locked for a GPU."""

    def view(self, buffer: Any, nbytes: int) -> Any:
        """The first bytes of ``buffer`` as an array that shares its memory."""

    def fill(self, dst: Any, src: Any) -> None:
        """Copy from host memory to host memory. Blocks."""

    def upload(self, src: Any) -> Any:
        """A new array on the device with the bytes of any host memory. ``src`` may be reused at once."""

    def upload_async(self, src: Any) -> Any:
        """The same from page-locked memory, queued. In host memory it is ``src`` itself."""

    def empty(self, nbytes: int) -> Any:
        """An array of zeros on the device, every page of it touched."""

    def overwrite(self, dst: Any, src: Any) -> None:
        """Copy ``src`` of :meth:`host` into ``dst`` of :meth:`empty`; on a GPU only queued."""

    def synchronize(self) -> None:
        """Block until the device has finished everything queued."""

    def to_numpy(self, array: Any) -> ByteArray:
        """The bytes of an array of this place; host memory is shared, not copied."""


class HostPlace:
    """Host memory, numpy arrays. Each copy is one memcpy on the calling thread."""

    limit_name = "memcpy"
    is_gpu = False

    def host(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    def view(self, buffer: Any, nbytes: int) -> Any:
        return np.frombuffer(buffer, np.uint8, nbytes)

    def fill(self, dst: Any, src: Any) -> None:
        np.copyto(dst, src)

    def upload(self, src: Any) -> Any:
        return src.copy()

    def upload_async(self, src: Any) -> Any:
        return src

    def empty(self, nbytes: int) -> Any:
        return np.full(nbytes, 0, np.uint8)

    def overwrite(self, dst: Any, src: Any) -> None:
        np.copyto(dst, src)

    def synchronize(self) -> None:
        pass

    def to_numpy(self, array: Any) -> ByteArray:
        return np.asarray(array)


class CudaPlace:
    """One GPU, torch tensors. The device is one that a Receiver has accepted, so torch is there and finds it.

    It becomes the process's current device; otherwise torch would pin memory through the first GPU.
    """

    limit_name = "pinned_h2d"
    is_gpu = True

    def __init__(self, device_index: int) -> None:
        import torch

        self._torch = torch
        self._index = device_index
        self._device = torch.device(f"cuda:{device_index}")
        torch.cuda.set_device(device_index)
        with warnings.catch_warnings():
            # torch says once a process that bytes are read-only; nothing here writes to them.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            torch.frombuffer(b"\0", dtype=torch.uint8)

    def host(self, nbytes: int) -> Any:
        return self._torch.empty(nbytes, dtype=self._torch.uint8, pin_memory=True)

    def view(self, buffer: Any, nbytes: int) -> Any:
        return self._torch.frombuffer(buffer, dtype=self._torch.uint8, count=nbytes)

    def fill(self, dst: Any, src: Any) -> None:
        dst.copy_(src)

    def upload(self, src: Any) -> Any:
        return src.to(self._device)

    def upload_async(self, src: Any) -> Any:
        return src.to(self._device, non_blocking=True)

    def empty(self, nbytes: int) -> Any:
        return self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)

    def overwrite(self, dst: Any, src: Any) -> None:
        dst.copy_(src, non_blocking=True)

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._index)

    def to_numpy(self, array: Any) -> ByteArray:
        array_of_bytes: ByteArray = array.cpu().numpy()
        return array_of_bytes


def place_for(device: str) -> Place:
    """The place of a device that a Receiver has accepted: ``"cpu"`` or ``"cuda:N"``."""
    return HostPlace() if device == "cpu" else CudaPlace(int(device.removeprefix("cuda:")))


def framework_for(device: str) -> Literal["numpy", "torch"]:
    """What a Receiver for :func:`place_for` delivers. torch is not needed in host memory."""
    return "numpy" if device == "cpu" else "torch"
