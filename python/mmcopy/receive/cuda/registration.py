"""Memory registered with CUDA part by part.

Pinning takes 0.05 to 0.07 s a GiB (one H200 host; several threads are no faster), and a call cannot be interrupted. In
parts, whoever has to stop waits for one of them, and what was pinned before a refusal is given back. The price: CUDA
refuses one copy out of two registrations (cudaErrorInvalidValue), so copies are cut where parts meet. Parts end at
multiples of their size in the address space, so that a copy is cut without asking whose memory it reads.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mmcopy.receive.in_place import Run

__all__ = ["PART_BYTES", "register", "split_runs", "unregister"]

_log = logging.getLogger(__name__)

PART_BYTES = 1 << 30


def register(
    runtime: Any, address: int, nbytes: int, flags: int, *, should_stop: Callable[[], bool]
) -> list[tuple[int, int]]:
    """Register ``nbytes`` from ``address`` on the current device; the parts, each an address and its bytes.

    All or nothing: on an error, which is raised, and when ``should_stop`` says so between two parts (then there are no
    parts), what was registered is let go of. Blocks.
    """
    done: list[tuple[int, int]] = []
    try:
        for part in _parts(address, nbytes):
            if should_stop():
                unregister(runtime, done)
                return []
            runtime.hostRegister(*part, flags)
            done.append(part)
    except BaseException:
        unregister(runtime, done)
        raise
    return done


def unregister(runtime: Any, parts: Iterable[tuple[int, int]]) -> None:
    """Let go of all parts. No copy out of them may be queued. What CUDA refuses is logged."""
    for address, nbytes in parts:
        try:
            runtime.hostUnregister(address)
        except runtime.CUDARuntimeError as error:
            _log.warning("letting go of %d bytes of an arena: %s", nbytes, error)


def split_runs(runs: Sequence[Run]) -> Sequence[Run]:
    """The same copies, none out of two parts."""
    for run in runs:
        if run.source // PART_BYTES != (run.source + run.nbytes - 1) // PART_BYTES:
            break
    else:
        return runs
    return [
        Run(run.dest + (source - run.source), source, nbytes)
        for run in runs
        for source, nbytes in _parts(run.source, run.nbytes)
    ]


def _parts(address: int, nbytes: int) -> list[tuple[int, int]]:
    first = (address // PART_BYTES + 1) * PART_BYTES
    edges = [address, *range(first, address + nbytes, PART_BYTES), address + nbytes]
    return [(start, stop - start) for start, stop in itertools.pairwise(edges)]
