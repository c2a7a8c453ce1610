"""One receive on a group of ranks, from opening to tensors.

    open      each rank opens what it can reach, and allocates
    agree     one exchange: the same items everywhere? who reaches what? did anything fail?
    unlink    names go: every rank that will read has opened
    read      each rank its windows of the packed buffer (plan.py)
    ready     where bytes are to go from rank to rank: one more exchange; a rank that failed to read says so
    collect   broadcasts and gathers, on the caller's stream

Where each tensor is one rank's alone (`owners`), messages over the CPU group take the place of the collectives, and
each rank receives its own as it would without a group.

Until `agree` nothing is removed and nothing is read. An error on one rank is the same error on all, and a rank with an
error of its own still takes part in the exchange, so that the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from mmcopy.errors import (
    ConfigError,
    LeaseForgedError,
    LeaseUnknownArenaError,
    MmcopyError,
    SegmentNotFoundError,
    SegmentPermissionError,
)
from mmcopy.metrics import Counter, Metrics
from mmcopy.receive.plan import Layout, Windows, place, views_into
from mmcopy.receive.request import Request
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

__all__ = ["CollectiveReceive", "PackedDestination"]


class PackedDestination(Protocol):
    """A destination that can also fill windows of a packed buffer."""

    def receive(self, request: Request, out: Sequence[Any] | None = None) -> list[Any]: ...

    def allocate(self, nbytes: int) -> Any: ...

    def fill(self, request: Request, layout: Layout, bases: Sequence[Any], windows: Windows | None = None) -> None: ...

    def check_out(self, items: Sequence[TensorData], out: Sequence[object]) -> None: ...

    def on_current_stream(self) -> contextlib.AbstractContextManager[None]: ...

    def close(self) -> None: ...


class _Turn:
    """What one rank has of a receive: the request, and the buffer."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.base: Any = None
        self.error: Exception | None = None

    @property
    def items(self) -> Sequence[TensorData]:
        return self.request.items

    @property
    def bits(self) -> list[bool]:
        return [n not in self.request.missing for n in range(len(self.items))]


class CollectiveReceive:
    """The receives of one group, one after the other. The same calls, in the same order, are made on every rank."""

    def __init__(
        self,
        group: RankGroup,
        options: ParallelOptions,
        *,
        destination: PackedDestination,
        timeout_s: float,
        metrics: Metrics,
    ) -> None:
        self.group = group
        self.options = options
        self._destination = destination
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._options_hash = hash_options(options)

    def receive(
        self, request: Request, out: Sequence[Any] | None = None, owners: Sequence[int] | None = None
    ) -> list[Any]:
        """Every rank's tensors alike: views into one new buffer, or ``out`` filled. Opens ``request``, which the caller
        closes.

        With ``owners``, a rank of the group for each item: new tensors of the items that this rank owns, and None.
        Blocks as :meth:`Receiver.receive`, and until every rank has come.
        """
        deadline = time.monotonic() + self._timeout_s
        turn = _Turn(request)
        try:
            with self.group.turn(deadline), self._destination.on_current_stream():
                if owners is None:
                    return self._receive(turn, out, deadline)
                return self._receive_owned(turn, owners, deadline)
        finally:
            turn.base, turn.error = None, None  # an error's traceback refers to this turn, and would keep the bytes

    def _receive(self, turn: _Turn, out: Sequence[Any] | None, deadline: float) -> list[Any]:
        facts = tuple(ItemFacts(item.nbytes, item.dtype, isinstance(item.payload, ShmHandle)) for item in turn.items)

        def prepare() -> None:
            if out is not None:
                self._destination.check_out(turn.items, out)
            likely = choose_strategy(facts, size=self.group.size, options=self.options)
            if out is None or likely is not Strategy.EACH:
                self._allocate(turn, facts)

        mine = self._open(turn, prepare)
        reachable = self._agree(turn, mine, deadline)
        plan = plan_group(facts, size=self.group.size, options=self.options, reachable=reachable)
        self._metrics.count(Counter.GROUP_RECEIVES, plan.label)
        if not plan.has_collectives and out is not None:
            return self._destination.receive(turn.request, out)
        if not plan.has_collectives:
            self._read(turn, plan)
        else:

            def read() -> None:
                self._allocate(turn, facts)
                self._read(turn, plan)

            self._say_how(turn, replace(mine, step=READY_STEP), read, deadline)
            self._collect(turn.base, plan, deadline)
        tensors = views_into(turn.base, plan.starts, turn.items)
        if out is None:
            return tensors
        for each, tensor in zip(out, tensors, strict=True):
            each.copy_(tensor)
        return list(out)

    def _receive_owned(self, turn: _Turn, owners: Sequence[int], deadline: float) -> list[Any]:
        rank, size = self.group.rank, self.group.size

        def prepare() -> None:
            if len(owners) != len(turn.items) or not all(owner in range(size) for owner in owners):
                raise ConfigError(
                    f"owners is {list(owners)}, want one rank of 0 to {size - 1} for each of {len(turn.items)} items"
                )

        opening = self._open(turn, prepare, tuple(owners))
        reachable = self._agree(turn, opening, deadline) or ((True,) * len(owners),) * size
        self._metrics.count(Counter.GROUP_RECEIVES, "owned")
        turn.request.unlink()
        transfers = plan_transfers([item.nbytes for item in turn.items], owners, reachable)
        parts: dict[int, int | TensorData] = {**turn.request.by_item()}
        if transfers:
            buffers: list[tuple[Transfer, Any]] = []

            def fill() -> None:
                for transfer in transfers:
                    if rank in (transfer.source, transfer.owner):
                        buffers.append((transfer, host_buffer(transfer.nbytes)))
                    if rank == transfer.source:
                        read_for(transfer, turn.request, buffers[-1][1])

            self._say_how(turn, replace(opening, step=READY_STEP), fill, deadline)
            self.group.transfer(
                [(buffer, transfer.owner) for transfer, buffer in buffers if transfer.source == rank],
                [(buffer, transfer.source) for transfer, buffer in buffers if transfer.owner == rank],
                deadline,
            )
            for transfer, buffer in buffers:
                if transfer.owner == rank:
                    parts.update(arrived(transfer, turn.items, buffer))
        own = [n for n, owner in enumerate(owners) if owner == rank]
        mine = [parts[n] if n in parts else nothing(turn.items[n]) for n in own]
        tensors = self._destination.receive(turn.request.select(mine, [turn.items[n] for n in own]))
        by_item = dict(zip(own, tensors, strict=True))
        return [by_item.get(n) for n in range(len(owners))]

    def _open(self, turn: _Turn, prepare: Callable[[], None], *further: object) -> Digest:
        """Open what is here, prepare, and the digest of how it went; ``further`` has to agree, too."""
        items = turn.items
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
            turn.request.open_reachable()
            prepare()
        except Exception as error:
            turn.error = error
            return digest.having(Status.FAILED, text_of(error))
        if not turn.request.missing:
            return digest
        is_denied = any(
            isinstance(error, (SegmentPermissionError, LeaseForgedError)) for error in turn.request.missing.values()
        )
        return replace(digest, status=Status.PARTIAL, is_denied=is_denied, body=pack_bits(turn.bits, 0))

    def _agree(self, turn: _Turn, mine: Digest, deadline: float) -> tuple[tuple[bool, ...], ...] | None:
        """Who reaches what; None: everybody everything. Raises what is wrong on any rank."""
        digests = agree(self.group, mine, deadline)
        raise_failure(digests, turn.error)
        reachable = gather_reachability(self.group, digests, turn.bits, deadline)
        if reachable is not None and (n := first_unreached(reachable)) is not None:
            self._raise_unreached(turn, n, is_denied=any(digest.is_denied for digest in digests))
        return reachable

    def _allocate(self, turn: _Turn, facts: tuple[ItemFacts, ...]) -> None:
        if turn.base is None:
            turn.base = self._destination.allocate(capacity_bytes(facts, size=self.group.size))

    def _read(self, turn: _Turn, plan: GroupPlan) -> None:
        request = turn.request
        starts = [start for n, start in enumerate(plan.starts) if n not in request.missing]
        layout = place(request.sizes, tuple(starts))
        self._destination.fill(request, layout, [turn.base], tuple(plan.windows(self.group.rank)))

    def _say_how(self, turn: _Turn, ready: Digest, read: Callable[[], None], deadline: float) -> None:
        """Read for the others, and wait until all have; one rank's failure is that of all."""
        try:
            read()
            ready = ready.having(Status.OK)
        except Exception as error:
            turn.error = error
            ready = ready.having(Status.FAILED, text_of(error))
        raise_failure(agree(self.group, ready, deadline), turn.error)

    def _collect(self, base: Any, plan: GroupPlan, deadline: float) -> None:
        for section in plan.sections:
            if section.strategy is Strategy.BROADCAST:
                self.group.broadcast(base[section.start : section.stop], section.source, deadline)
            elif section.strategy is Strategy.SCATTER:
                start, stop = plan.share(section, self.group.rank)
                self.group.gather_shares(base[section.start : section.stop], base[start:stop], deadline)

    def _raise_unreached(self, turn: _Turn, n: int, *, is_denied: bool) -> NoReturn:
        payload = turn.items[n].payload
        assert isinstance(payload, ShmHandle)  # what is in the message is everywhere
        kind: type[MmcopyError]
        if payload.is_lease:
            what, kind = "lease", LeaseForgedError if is_denied else LeaseUnknownArenaError
        else:
            what, kind = "segment", SegmentPermissionError if is_denied else SegmentNotFoundError
        raise kind(
            f"{what} {payload.name!r}, item {n} of {len(turn.items)}: none of the {self.group.size} ranks can open it"
        ) from turn.request.missing[n]
