"""The fastest plain way through shared memory, which an engine's own arena takes: a slot for each tensor, in a mapping
that the consumer has registered with CUDA.

torch copies each tensor into its slot. The consumer queues a copy straight out of it and gives the slot back behind an
event; without CUDA it copies. Nothing is allocated, mapped or registered once every slot was used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmcopy.errors import DeviceError, MmcopyTimeoutError, NoSpaceError

from .place import ByteArray
from .plan import PAGE_BYTES

__all__ = ["SlotReader", "SlotWriter", "Slots"]

FREE, WRITTEN = 0, 1
FREE_LIMIT_S = 10.0
POLL_S = 0.00005


@dataclass(frozen=True, slots=True)
class Slots:
    """A message: tensor n has ``nbytes[n]`` bytes in slot n, which is ``slot_bytes`` long."""

    path: str
    """The shared file, as another process of this user opens it."""
    flags_at: int
    """One byte a slot, behind the slots: who may use it."""
    slot_bytes: int
    nbytes: tuple[int, ...]


class SlotWriter:
    """The sender's end, in memory that it reserves. Raises :class:`NoSpaceError`."""

    def __init__(self, room_bytes: int) -> None:
        import torch

        self._torch = torch
        self._flags_at = -(-room_bytes // PAGE_BYTES) * PAGE_BYTES
        total = self._flags_at + self._flags_at // PAGE_BYTES
        self._file = os.memfd_create("mmcopy-bench-slots", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self._file, 0, total)
            self._memory = mmap.mmap(self._file, total)
        except OSError as error:
            os.close(self._file)
            raise NoSpaceError(f"{total} bytes of shared memory for slots: {error.strerror}") from error
        self._flags = np.frombuffer(self._memory, np.uint8, offset=self._flags_at)

    def write(self, parts: Sequence[ByteArray]) -> Slots:
        """Copy each tensor into its slot. Blocks; waits for slots that are not free yet, up to a limit."""
        torch = self._torch
        slot_bytes = -(-max(len(part) for part in parts) // PAGE_BYTES) * PAGE_BYTES
        for slot, part in enumerate(parts):
            self._wait_until_free(slot)
            target = torch.frombuffer(self._memory, dtype=torch.uint8, count=len(part), offset=slot * slot_bytes)
            target.copy_(torch.from_numpy(part))
            self._flags[slot] = WRITTEN  # seen with the bytes: the message itself goes through the kernel
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        return Slots(path, self._flags_at, slot_bytes, tuple(len(part) for part in parts))

    def settle(self, message: Slots) -> None:
        """Wait until the consumer has given every slot back."""
        for slot in range(len(message.nbytes)):
            self._wait_until_free(slot)

    def cancel(self, message: Slots) -> None:
        """Take the slots back: the consumer will not read them."""
        self._flags[: len(message.nbytes)] = FREE

    def close(self) -> None:
        """Drop the mapping and the file."""
        del self._flags
        with contextlib.suppress(BufferError):  # a tensor still looks at it: it goes with the process
            self._memory.close()
        os.close(self._file)

    def _wait_until_free(self, slot: int) -> None:
        if self._flags[slot] == FREE:
            return
        deadline = time.monotonic() + FREE_LIMIT_S
        while self._flags[slot] != FREE:
            if time.monotonic() > deadline:
                raise MmcopyTimeoutError("send", f"slot {slot} was not given back within {FREE_LIMIT_S:g} s")
            time.sleep(POLL_S)


class SlotReader:
    """The consumer's end: maps the file of the first message, and registers it with CUDA, once."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch: Any = torch
        self._device = torch.device(device)
        self._path = ""
        self._memory: Any = None
        self._base = 0
        self._behind: list[tuple[Any, Slots]] = []

    def receive(self, message: Slots) -> list[Any]:
        """New tensors; on a GPU their copies are queued. :meth:`settle` gives the slots back."""
        torch = self._torch
        if message.path != self._path:
            self._map(message)
        arrays = []
        for slot, nbytes in enumerate(message.nbytes):
            offset = slot * message.slot_bytes
            source = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
            arrays.append(source.to(self._device, non_blocking=True, copy=True))
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._behind.append((event, message))
        return arrays

    def settle(self) -> None:
        """Give back the slots whose copies have happened; never blocks."""
        while self._behind and (self._behind[0][0] is None or self._behind[0][0].query()):
            _, message = self._behind.pop(0)
            flags = np.frombuffer(self._memory, np.uint8, len(message.nbytes), message.flags_at)
            flags[:] = FREE

    def close(self) -> None:
        """Undo the registration and the mapping."""
        if self._base:
            self._torch.cuda.synchronize(self._device)
            self._torch.cuda.cudart().cudaHostUnregister(self._base)
            self._base = 0
        self._behind.clear()
        if self._memory is not None:
            with contextlib.suppress(BufferError):
                self._memory.close()

    def _map(self, message: Slots) -> None:
        self.close()
        file = os.open(message.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(file, 0)
        finally:
            os.close(file)
        if self._device.type == "cuda":
            self._torch.cuda.set_device(self._device)
            base = np.frombuffer(self._memory, np.uint8).ctypes.data
            result = int(self._torch.cuda.cudart().cudaHostRegister(base, len(self._memory), 0))
            if result != 0:
                raise DeviceError(f"cudaHostRegister of {len(self._memory)} bytes returned {result}")
            self._base = base
        self._path = message.path
