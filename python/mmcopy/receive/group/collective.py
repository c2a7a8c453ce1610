"""One receive on a group of ranks, from opening to tensors.

    open      each rank opens what it can reach, and allocates
    agree     one exchange: the same items everywhere? who reaches what? did anything fail?
    remove    names go: everybody who will read has opened
    read      each rank its windows of the packed buffer (plan.py)
    ready     where bytes are to go from rank to rank: one more exchange; a rank that failed to read says so
    collect   broadcasts and gathers, on the caller's stream

Where each tensor is one rank's alone (`owners`), messages over the CPU group take the place of the collectives, and
each rank receives its own as it would without a group.

Until `agree` nothing is removed and nothing is read. An error on one rank is the same error on all, and a rank with an
error of its own still takes part in the exchange, so that nobody waits for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Protocol

from mmcopy.errors import (
    ConfigError,
    LeaseForgedError,
    LeaseUnknownArenaError,
    MmcopyError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from mmcopy.metrics import Counter, Metrics
from mmcopy.receive.plan import views_into
from mmcopy.receive.request import Described, Source
from mmcopy.tensors import ShmHandle, TensorData

from .agreement import agree, gather_reachability
from .digest import READY_STEP, Digest, Status, hash_items, hash_options, pack_bits, raise_failure, text_of
from .group import RankGroup
from .owned import Transfer, arrived, host_buffer, nothing, plan_transfers, read_for
from .plan import (
    GroupPlan,
    ItemFacts,
    ParallelOptions,
    Strategy,
    capacity_bytes,
    choose_strategy,
    first_unreached,
    plan_group,
)

__all__ = ["CollectiveReceive", "Opener", "PackedDestination"]


class PackedDestination(Protocol):
    """A destination that can also fill parts of one packed buffer of bytes."""

    def move(
        self, sources: Sequence[Source], *, out: Sequence[Any] | None, while_copying: Callable[[], None]
    ) -> list[Any]: ...

    def allocate_packed(self, nbytes: int) -> Any: ...

    def read_windows(
        self,
        sources: Sequence[Source],
        starts: Sequence[int],
        base: Any,
        windows: Sequence[tuple[int, int]],
        *,
        while_copying: Callable[[], None],
    ) -> None: ...

    def check_out(self, sources: Sequence[Described], out: Sequence[object]) -> None: ...

    def on_current_stream(self) -> contextlib.AbstractContextManager[None]: ...

    def close(self) -> None: ...


class Opener(Protocol):
    """Where sources come from; :class:`mmcopy.receive.request.SourceOpener` opens them by name."""

    def open_reachable(self, items: Sequence[TensorData], opened: list[Source]) -> dict[int, MmcopyError]: ...

    def close(self, sources: Sequence[Source], why: str) -> None: ...

    def release(self, items: Sequence[TensorData]) -> int: ...


class _Item(NamedTuple):
    data: TensorData


class _Opened:
    """What one rank has of a receive: a source for each item that it reaches, and its buffer."""

    def __init__(self, items: Sequence[TensorData]) -> None:
        self.items = [_Item(item) for item in items]
        self.sources: list[Source] = []
        self.missing: dict[int, MmcopyError] = {}
        self.base: Any = None
        self.error: Exception | None = None

    def clear(self) -> None:
        """Let go of all. An error's traceback refers to this object, and would keep the bytes for as long."""
        self.sources, self.missing, self.base, self.error = [], {}, None, None

    @property
    def bits(self) -> list[bool]:
        return [n not in self.missing for n in range(len(self.items))]

    @property
    def by_item(self) -> dict[int, Source]:
        """The sources by their items' number."""
        here = (n for n in range(len(self.items)) if n not in self.missing)
        return dict(zip(here, self.sources, strict=True))

    def starts(self, plan: GroupPlan) -> list[int]:
        """Where the sources begin in the buffer."""
        return [start for n, start in enumerate(plan.starts) if n not in self.missing]

    def remove_names(self) -> None:
        for source in self.sources:
            source.remove("received")


class CollectiveReceive:
    """The receives of one group, one after the other. The same calls, in the same order, are made on every rank."""

    def __init__(
        self,
        group: RankGroup,
        options: ParallelOptions,
        *,
        opener: Opener,
        destination: PackedDestination,
        timeout_s: float,
        metrics: Metrics,
    ) -> None:
        self.group = group
        self.options = options
        self._opener = opener
        self._destination = destination
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._options_hash = hash_options(options)

    def receive(
        self, items: Sequence[TensorData], out: Sequence[Any] | None, owners: Sequence[int] | None = None
    ) -> list[Any]:
        """Every rank's tensors alike: views into one new buffer, or ``out`` filled.

        With ``owners``, a rank of the group for each item: new tensors of the items that this rank owns, and None.
        Blocks as :meth:`Receiver.receive`, and until every rank has come. The segments are removed, whatever happens.
        """
        deadline = time.monotonic() + self._timeout_s
        opened = _Opened(items)
        why = "released"
        try:
            with self.group.turn(deadline), self._destination.on_current_stream():
                if owners is None:
                    tensors = self._receive(opened, out, deadline)
                else:
                    tensors = self._receive_owned(opened, owners, deadline)
            why = "received"
            return tensors
        finally:
            self._opener.close(opened.sources, why)
            opened.clear()
            if why == "released":
                self._opener.release(items)  # of which some may not be open here

    def _receive(self, opened: _Opened, out: Sequence[Any] | None, deadline: float) -> list[Any]:
        facts = tuple(
            ItemFacts(item.data.nbytes, item.data.dtype, isinstance(item.data.payload, ShmHandle))
            for item in opened.items
        )

        def prepare() -> None:
            if out is not None:
                self._destination.check_out(opened.items, out)
            likely = choose_strategy(facts, size=self.group.size, options=self.options)
            if out is None or likely is not Strategy.EACH:
                self._allocate(opened, facts)

        mine = self._open(opened, prepare)
        reachable = self._agree(opened, mine, deadline)
        plan = plan_group(facts, size=self.group.size, options=self.options, reachable=reachable)
        self._metrics.count(Counter.GROUP_RECEIVES, plan.label)
        if not plan.has_collectives and out is not None:
            return self._destination.move(opened.sources, out=out, while_copying=opened.remove_names)
        if not plan.has_collectives:
            self._read(opened, plan)
        else:

            def read() -> None:
                self._allocate(opened, facts)
                self._read(opened, plan)

            self._say_how(opened, replace(mine, step=READY_STEP), read, deadline)
            self._collect(opened.base, plan, deadline)
        tensors = views_into(opened.base, plan.starts, opened.items)
        if out is None:
            return tensors
        for each, tensor in zip(out, tensors, strict=True):
            each.copy_(tensor)
        return list(out)

    def _receive_owned(self, opened: _Opened, owners: Sequence[int], deadline: float) -> list[Any]:
        rank, size = self.group.rank, self.group.size

        def prepare() -> None:
            if len(owners) != len(opened.items) or not all(owner in range(size) for owner in owners):
                raise ConfigError(
                    f"owners is {list(owners)}, want one rank of 0 to {size - 1} for each of {len(opened.items)} items"
                )

        opening = self._open(opened, prepare, tuple(owners))
        reachable = self._agree(opened, opening, deadline) or ((True,) * len(owners),) * size
        self._metrics.count(Counter.GROUP_RECEIVES, "owned")
        opened.remove_names()
        transfers = plan_transfers([item.data.nbytes for item in opened.items], owners, reachable)
        sources = opened.by_item
        if transfers:
            buffers: list[tuple[Transfer, Any]] = []

            def fill() -> None:
                for transfer in transfers:
                    if rank in (transfer.source, transfer.owner):
                        buffers.append((transfer, host_buffer(transfer.nbytes)))
                    if rank == transfer.source:
                        read_for(transfer, sources, buffers[-1][1])

            self._say_how(opened, replace(opening, step=READY_STEP), fill, deadline)
            self.group.transfer(
                [(buffer, transfer.owner) for transfer, buffer in buffers if transfer.source == rank],
                [(buffer, transfer.source) for transfer, buffer in buffers if transfer.owner == rank],
                deadline,
            )
            for transfer, buffer in buffers:
                if transfer.owner == rank:
                    sources.update(arrived(transfer, [item.data for item in opened.items], buffer))
        own = [n for n, owner in enumerate(owners) if owner == rank]
        mine = [sources.get(n) or nothing(opened.items[n].data) for n in own]
        tensors = self._destination.move(mine, out=None, while_copying=lambda: None)
        by_item = dict(zip(own, tensors, strict=True))
        return [by_item.get(n) for n in range(len(owners))]

    def _open(self, opened: _Opened, prepare: Callable[[], None], *further: object) -> Digest:
        """Open what is here, prepare, and the digest of how it went; ``further`` has to agree, too."""
        items = [item.data for item in opened.items]
        digest = Digest(
            self.group.line.sequence,
            0,
            Status.OK,
            len(items),
            sum(item.nbytes for item in items),
            hash_items(items, *further),
            self._options_hash,
        )
        try:
            opened.missing = self._opener.open_reachable(items, opened.sources)
            prepare()
        except Exception as error:
            opened.error = error
            return digest.having(Status.FAILED, text_of(error))
        if not opened.missing:
            return digest
        is_denied = any(
            isinstance(error, (SegmentPermissionError, LeaseForgedError)) for error in opened.missing.values()
        )
        return replace(digest, status=Status.PARTIAL, is_denied=is_denied, body=pack_bits(opened.bits, 0))

    def _agree(self, opened: _Opened, mine: Digest, deadline: float) -> tuple[tuple[bool, ...], ...] | None:
        """Who reaches what; None: everybody everything. Raises what is wrong on any rank."""
        digests = agree(self.group, mine, deadline)
        raise_failure(digests, opened.error)
        reachable = gather_reachability(self.group, digests, opened.bits, deadline)
        if reachable is not None and (n := first_unreached(reachable)) is not None:
            self._raise_unreached(opened, n, is_denied=any(digest.is_denied for digest in digests))
        return reachable

    def _allocate(self, opened: _Opened, facts: tuple[ItemFacts, ...]) -> None:
        if opened.base is None:
            opened.base = self._destination.allocate_packed(capacity_bytes(facts, size=self.group.size))

    def _read(self, opened: _Opened, plan: GroupPlan) -> None:
        self._destination.read_windows(
            opened.sources,
            opened.starts(plan),
            opened.base,
            plan.windows(self.group.rank),
            while_copying=opened.remove_names,
        )

    def _say_how(self, opened: _Opened, ready: Digest, read: Callable[[], None], deadline: float) -> None:
        """Read for the others, and wait until all have; one rank's failure is that of all."""
        try:
            read()
            ready = ready.having(Status.OK)
        except Exception as error:
            opened.error = error
            ready = ready.having(Status.FAILED, text_of(error))
        raise_failure(agree(self.group, ready, deadline), opened.error)

    def _collect(self, base: Any, plan: GroupPlan, deadline: float) -> None:
        for section in plan.sections:
            if section.strategy is Strategy.BROADCAST:
                self.group.broadcast(base[section.start : section.stop], section.source, deadline)
            elif section.strategy is Strategy.SCATTER:
                start, stop = plan.share(section, self.group.rank)
                self.group.gather_shares(base[section.start : section.stop], base[start:stop], deadline)

    def _raise_unreached(self, opened: _Opened, n: int, *, is_denied: bool) -> NoReturn:
        payload = opened.items[n].data.payload
        assert isinstance(payload, ShmHandle)  # what is in the message is everywhere
        kind: type[MmcopyError]
        if payload.is_lease:
            what, kind = "lease", LeaseForgedError if is_denied else LeaseUnknownArenaError
        else:
            what, kind = "segment", SegmentPermissionError if is_denied else SegmentNotFoundError
        raise kind(
            f"{what} {payload.name!r}, item {n} of {len(opened.items)}: none of the {self.group.size} ranks can open it"
        ) from opened.missing[n]
