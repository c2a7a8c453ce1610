"""The paths of ``mmcopy bench e2e``, each as two halves: one for the process that sends, one for that which receives.

A path has both processes to itself, so that its caches, threads and arenas are its own.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from mmcopy.config import ENDPOINT_LABEL, TransportConfig, WorkerSpec
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.receive.receiver import Receiver
from mmcopy.send.sender import Sender

from . import baselines
from .h2d import CONNECT_LIMIT_S, SHM_DIR
from .load import Load
from .paths import Leases, Path, Role, Segments
from .peer import Peer, Receive, Receiving, Setup
from .place import CudaPlace, HostPlace, framework_for, place_for
from .slots import SlotReader, SlotWriter

__all__ = ["E2ePath", "e2e_paths"]


Sending = Callable[[Load], Path]
"""The path of one load. Its ``receive`` asks the other process."""


@dataclass(frozen=True, slots=True)
class E2ePath:
    """A path by its two halves, functions of a module: other processes find them by name."""

    name: str
    role: Role
    sending: Callable[[Setup, Peer], AbstractContextManager[Sending]]
    receiving: Callable[[Setup], AbstractContextManager[Receiving]]


def e2e_paths(device: str) -> list[E2ePath]:
    """All that can be measured onto ``device``, the limit first. Without torch there is no ``torch_slots``."""
    limit = (HostPlace if device == "cpu" else CudaPlace).limit_name
    paths = [
        E2ePath(limit, Role.LIMIT, _send_a_size, _receive_limit),
        E2ePath("lease", Role.OURS, _send_leases, _receive_ours),
        E2ePath("lease_streamed", Role.OURS, _send_streams, _receive_ours),
        E2ePath("segment", Role.OURS, _send_segments, _receive_ours),
        E2ePath("torch_slots", Role.BASELINE, _send_slots, _receive_slots),
        E2ePath("shared_memory_staged", Role.BASELINE, _send_shared_memory, _receive_staged),
        E2ePath("inline", Role.BASELINE, _send_inline, _receive_inline),
    ]
    has_torch = importlib.util.find_spec("torch") is not None
    return [path for path in paths if has_torch or path.name != "torch_slots"]


def _asking(peer: Peer) -> Callable[[Any], Any]:
    return lambda message: peer.ask(Receive(message))


@contextmanager
def _send_a_size(_: Setup, peer: Peer) -> Iterator[Sending]:
    yield lambda load: Path("", Role.LIMIT, lambda: load.case.total_bytes, _asking(peer))


@contextmanager
def _receive_limit(setup: Setup) -> Iterator[Receiving]:
    """One copy out of memory that is pinned and filled already into memory on the device that exists."""
    with Receiver(setup.device, framework=framework_for(setup.device)):
        pass  # it refuses a device that does not exist
    place = place_for(setup.device)
    memory: dict[int, tuple[Any, Any]] = {}

    def copy(nbytes: int) -> list[Any]:
        if nbytes not in memory:
            memory.clear()
            memory[nbytes] = (place.host(nbytes), place.empty(nbytes))
        host, existing = memory[nbytes]
        place.overwrite(existing, host)
        return [existing]

    yield Receiving(copy)


@contextmanager
def _send_leases(setup: Setup, peer: Peer, *, is_streamed: bool = False) -> Iterator[Sending]:
    with _sender(setup, arena_bytes=setup.room_bytes + (1 << 20)) as sender:
        worker = WorkerSpec("bench", labels={ENDPOINT_LABEL: peer.address})
        sender.connect(worker, timeout_s=CONNECT_LIMIT_S)

        def path(load: Load) -> Path:
            leases = Leases(sender, worker, load, is_streamed=is_streamed)
            return Path("", Role.OURS, leases.publish, _asking(peer), leases.settle, leases.cancel)

        yield path


def _send_streams(setup: Setup, peer: Peer) -> AbstractContextManager[Sending]:
    return _send_leases(setup, peer, is_streamed=True)


@contextmanager
def _send_segments(setup: Setup, peer: Peer) -> Iterator[Sending]:
    with _sender(setup, arena_bytes=0) as sender:

        def path(load: Load) -> Path:
            segments = Segments(sender, load, shm_dir=SHM_DIR)
            return Path("", Role.OURS, segments.publish, _asking(peer), segments.settle, segments.cancel)

        yield path


def _sender(setup: Setup, *, arena_bytes: int) -> Sender:
    config = TransportConfig(mode="shm", shm_min_bytes=0)
    return Sender(config, shm_dir=SHM_DIR, num_threads=setup.num_threads, arena_bytes=arena_bytes)


@contextmanager
def _receive_ours(setup: Setup) -> Iterator[Receiving]:
    with (
        tempfile.TemporaryDirectory(prefix="mmcopy-bench-") as directory,
        WorkerEndpoint(directory) as endpoint,
        Receiver(
            setup.device,
            framework=framework_for(setup.device),
            shm_dir=SHM_DIR,
            num_threads=setup.num_threads,
            endpoint=endpoint,
        ) as receiver,
    ):
        yield Receiving(receiver.receive, address=endpoint.path)


@contextmanager
def _send_slots(setup: Setup, peer: Peer) -> Iterator[Sending]:
    with closing(SlotWriter(setup.room_bytes)) as writer:
        yield lambda load: Path(
            "", Role.BASELINE, lambda: writer.write(load.parts), _asking(peer), writer.settle, writer.cancel
        )


@contextmanager
def _receive_slots(setup: Setup) -> Iterator[Receiving]:
    with closing(SlotReader(setup.device)) as reader:
        yield Receiving(reader.receive, reader.settle)


@contextmanager
def _send_shared_memory(_: Setup, peer: Peer) -> Iterator[Sending]:
    yield lambda load: Path(
        "",
        Role.BASELINE,
        lambda: baselines.publish_shared_memory(load.parts),
        _asking(peer),
        cancel=baselines.unlink_shared_memory,
    )


@contextmanager
def _receive_staged(setup: Setup) -> Iterator[Receiving]:
    place = place_for(setup.device)
    yield Receiving(lambda named: baselines.shared_memory_staged(place, named, shm_dir=SHM_DIR))


@contextmanager
def _send_inline(_: Setup, peer: Peer) -> Iterator[Sending]:
    yield lambda load: Path("", Role.BASELINE, lambda: [part.tobytes() for part in load.parts], _asking(peer))


@contextmanager
def _receive_inline(setup: Setup) -> Iterator[Receiving]:
    place = place_for(setup.device)
    yield Receiving(lambda messages: baselines.inline(place, messages))
