"""A tensor in shared memory, as TokenSpeed's requests carry it from process to process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar, Self

from mmcopy._native import Process, Segment, SegmentOwner, Sweeper, validate_segment_name
from mmcopy.arrays import flatten
from mmcopy.config import ACCEPT_PREFIXES, check_accepted, default_num_threads
from mmcopy.errors import ClosedError, MmcopyError, SegmentNotFoundError
from mmcopy.tensors import ShmHandle, TensorData

if TYPE_CHECKING:
    import torch

__all__ = ["SHM_DIR", "ShmTensorHandle"]

SHM_DIR = "/dev/shm"


class ShmTensorHandle:
    """A tensor of ``shape`` and ``dtype`` in the segment ``shm_name``, from its first byte on.

    The order of calls is :meth:`publish` (producer), :meth:`attach` or :meth:`try_attach` on every rank, a barrier, and
    then on each rank one of :meth:`consume`, :meth:`copy_into` and :meth:`release`, or :meth:`copy_to_pinned` and then
    :meth:`release`. The first to remove the name wins; the others do not notice. Pickling takes the three arguments
    alone. Only names that begin with one of ``accept_prefixes`` are opened, and so removed. An object that a forked
    child inherits is its parent's: :meth:`attach` raises there, and :meth:`release` does nothing.

    Not for use by several threads at once.
    """

    accept_prefixes: ClassVar[tuple[str, ...]] = ACCEPT_PREFIXES

    def __init__(self, shm_name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shm_name = shm_name
        self.shape = tuple(shape)
        self.dtype = dtype
        self._segment: Segment | None = None
        self._remote: torch.Tensor | None = None
        self._reachable_ranks: tuple[int, ...] | None = None
        self._group_size = 0
        self._process = Process.current()

    def __reduce__(self) -> tuple[type[Self], tuple[str, tuple[int, ...], Any]]:
        return type(self), (self.shm_name, self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shm_name!r}, {self.shape}, {self.dtype})"

    @classmethod
    def publish(cls, tensor: torch.Tensor) -> Self:
        """Write a CPU tensor of any strides into a new segment. Blocks; ``tensor`` may be reused at once.

        Raises :class:`NoSpaceError` and the other errors of a failed write, with nothing left behind.
        """
        flat = flatten(tensor)
        owner, sweeper = _owner(Process.current(), SHM_DIR)
        sweeper.sweep_if_due()
        name, _ = owner.write(flat.array, num_threads=default_num_threads())
        return cls(name, flat.shape, tensor.dtype)

    @property
    def data(self) -> TensorData:
        """The same as mmcopy describes it."""
        name = str(self.dtype).removeprefix("torch.")
        return TensorData(name, self.shape, ShmHandle(self.shm_name, 0, self.nbytes()))

    @property
    def segment(self) -> Segment | None:
        """The open segment, once this rank has attached."""
        return self._segment

    @property
    def remote(self) -> torch.Tensor | None:
        """The bytes that came from another rank, by :meth:`set_remote`."""
        return self._remote

    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def attach(self) -> None:
        """Open the segment, on every rank before any of them removes the name. Again: does nothing.

        Raises :class:`SegmentNotFoundError`, which is a FileNotFoundError, and the errors of a bad segment.
        """
        if self._segment is None:
            segment = self._open()
            try:
                segment.check(0, self.nbytes())
            except BaseException:
                segment.close()
                raise
            self._segment = segment

    def try_attach(self) -> bool:
        """:meth:`attach`; False when there is no such segment here, as on another host."""
        if self._remote is not None:
            return True
        try:
            self.attach()
        except SegmentNotFoundError:
            return False
        return True

    def copy_bytes_into(self, destination: torch.Tensor) -> None:
        """Copy the bytes into flat uint8 host memory of :meth:`nbytes`; the segment stays. Blocks.

        Raises ValueError for another destination, RuntimeError when this rank has not attached.
        """
        import torch

        segment = self._attached()
        is_bytes = destination.dtype is torch.uint8 and destination.device.type == "cpu" and destination.is_contiguous()
        if not is_bytes or destination.numel() != self.nbytes():
            raise ValueError(
                f"want {self.nbytes()} contiguous elements of torch.uint8 on the cpu, "
                f"found {destination.numel()} of {destination.dtype} on {destination.device}"
            )
        if self.nbytes():
            segment.read_into(destination.numpy().reshape(-1), 0, num_threads=default_num_threads())

    def copy_to_pinned(self) -> torch.Tensor:
        """A copy in pinned memory (plain host memory on a machine without a GPU). Blocks.

        This rank keeps the segment until :meth:`release`, so that an asynchronous H2D copy can be queued first.
        """
        if self._remote is not None:
            return self._view(self._remote)
        import torch

        if self.is_cross_node and not self.nbytes():
            return torch.empty(self.shape, dtype=self.dtype)  # empty tensors are not sent
        self._attached()
        pinned = torch.empty(self.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        self.copy_bytes_into(pinned)
        return self._view(pinned)

    def copy_into(self, destination: torch.Tensor) -> None:
        """Copy into an existing tensor of the same dtype and number of elements, in C order, and :meth:`release`.

        Blocks until the bytes have left shared memory; a GPU's copy is queued on the current stream. Raises ValueError
        when the dtypes or the numbers of elements differ, and releases then, too.
        """
        try:
            is_elsewhere = self._remote is not None or (self.is_cross_node and not self.nbytes())
            if not is_elsewhere:
                self._attached()
            if destination.dtype is not self.dtype:
                raise ValueError(
                    f"the dtypes differ: the segment has {self.dtype}, the destination {destination.dtype}"
                )
            if destination.numel() != math.prod(self.shape):
                raise ValueError(
                    f"the shapes differ: the segment has {list(self.shape)}, the destination {list(destination.shape)}"
                )
            if not is_elsewhere and destination.device.type == "cpu" and destination.is_contiguous():
                import torch

                self.copy_bytes_into(destination.detach().reshape(-1).view(torch.uint8))
            else:
                destination.copy_(self.copy_to_pinned().reshape(destination.shape), non_blocking=True)
        finally:
            self.release()

    def consume(self) -> torch.Tensor:
        """:meth:`copy_to_pinned` and :meth:`release`. The release comes also after an error."""
        try:
            return self.copy_to_pinned()
        finally:
            self.release()

    def release(self) -> None:
        """Close the segment and remove its name, if it is still there. May be called again; raises nothing."""
        segment, self._segment = self._segment, None
        had_remote, self._remote = self._remote is not None, None
        if segment is None and (had_remote or self._reachable_ranks is not None):
            return  # the segment is on another host, or was released before
        with contextlib.suppress(MmcopyError), segment or self._open() as found:
            found.unlink()

    def detach(self) -> Segment | None:
        """Give the open segment to the caller, whose it is from now on to remove and close."""
        segment, self._segment = self._segment, None
        return segment

    def set_reachability(self, ranks: tuple[int, ...], group_size: int) -> None:
        """Which global ranks of a group of ``group_size`` can open the segment: set by :func:`prepare_shm_features`."""
        if not ranks or len(set(ranks)) != len(ranks) or len(ranks) > group_size:
            raise ValueError(f"reachable from the ranks {ranks} of a group of {group_size}")
        self._reachable_ranks = ranks
        self._group_size = group_size

    @property
    def is_cross_node(self) -> bool:
        """Whether some rank of the group cannot open the segment."""
        return self._reachable_ranks is not None and len(self._reachable_ranks) < self._group_size

    @property
    def source_rank(self) -> int | None:
        """The global rank that reads the segment for those that cannot."""
        return self._reachable_ranks[0] if self._reachable_ranks else None

    def is_reachable_from(self, rank: int) -> bool:
        """Whether this global rank can open the segment."""
        return self._reachable_ranks is not None and rank in self._reachable_ranks

    def set_remote(self, flat_bytes: torch.Tensor) -> None:
        """The tensor's bytes, flat uint8 host memory, as another rank has sent them."""
        self._remote = flat_bytes

    def _open(self) -> Segment:
        if not self._process.is_current():
            raise ClosedError(f"{self!r} belongs to process {self._process.pid}, from which this one was forked")
        name = validate_segment_name(self.shm_name)
        check_accepted(name, self.accept_prefixes)
        return Segment.open(SHM_DIR, name)

    def _attached(self) -> Segment:
        if self._segment is None:
            raise RuntimeError(f"{self!r} is not attached on this rank, or was released: call attach() first")
        return self._segment

    def _view(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.dtype).reshape(self.shape)


@functools.lru_cache(maxsize=1)
def _owner(process: Process, shm_dir: str) -> tuple[SegmentOwner, Sweeper]:  # noqa: ARG001 - a child needs its own
    """This process's name on the host, taken with its first segment, and what removes what dead senders left."""
    owner = SegmentOwner(shm_dir)
    atexit.register(owner.close)
    return owner, Sweeper(shm_dir)
