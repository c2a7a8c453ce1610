"""A sender's decisions: its settings as they were at its start, and what it knows of its workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

from mmcopy._native import shm_namespace_id
from mmcopy.config import Environment, ResolvedTransport, TransportConfig, TransportMode, WorkerSpec
from mmcopy.errors import ConfigError

from .delivery import SHARED, Choice, Delivery, Sharing, by_labels, choose, deliver
from .outstanding import Outstanding
from .reason import Reason
from .route import Route, plan_route

__all__ = ["ENDPOINT_LABEL", "Policy", "Proofs", "Target"]

ENDPOINT_LABEL = "mmcopy_endpoint"
"""The label of an mmcopy worker that holds the path of its socket."""

_MAX_DECIDED = 256

Target: TypeAlias = "WorkerSpec | Sequence[WorkerSpec] | Delivery | None"
"""Who a tensor is for: one worker, several that all read it, what a route decided, or nobody in particular."""


_CURED_BY_AN_ARENA = frozenset(
    {
        Reason.SEVERAL_READERS,
        Reason.NAMESPACE_UNKNOWN,
        Reason.NAMESPACE_DIFFERS,
        Reason.UID_DIFFERS,
        Reason.NOT_PROVED,
        Reason.PROOF_FAILED,
    }
)
"""What speaks against a file in /dev/shm says nothing against memory that the worker was handed."""


class Proofs(Protocol):
    """What asks workers by their sockets; see :class:`mmcopy.send.proof.Prover`."""

    def sharing(self, worker: WorkerSpec) -> Sharing: ...

    def is_gone(self, worker: WorkerSpec) -> bool: ...

    def consumer(self, worker: WorkerSpec) -> int | None: ...


class Policy:
    """Decides, without reading anything from outside but the shared memory's id, once. Thread-safe."""

    def __init__(
        self,
        config: TransportConfig,
        environment: Environment,
        *,
        shm_dir: str,
        outstanding: Outstanding,
        proofs: Proofs | None = None,
    ) -> None:
        self._config = config
        self._environment = environment
        self._shm_dir = shm_dir
        self._outstanding = outstanding
        self._proofs = proofs
        self._namespace_id = ""
        self._nobody = deliver((), self._resolve, self._sharing)
        self._decided: dict[int, Delivery] = {}  # by the spec's id, which the delivery keeps from being another's

    def delivery(self, target: Target) -> Delivery:
        """The decision for ``target``. Raises :class:`ConfigError` for what is no worker."""
        if isinstance(target, Delivery):
            return target
        if target is None:
            return self._nobody
        if isinstance(target, WorkerSpec):
            return self._for_one(target)
        receivers = tuple(target) if isinstance(target, Sequence) else ()
        if not receivers or not all(isinstance(worker, WorkerSpec) for worker in receivers):
            raise ConfigError(f"worker is {target!r}, want a WorkerSpec, several, or a Delivery")
        return deliver(receivers, self._resolve, self._sharing, several_readers=True)

    def route(self, workers: Sequence[WorkerSpec]) -> Route:
        """The decisions for a request that ``workers`` serve; see :func:`mmcopy.config.plan_route`."""
        return plan_route(workers, self._resolve, self._sharing)

    def choose(self, delivery: Delivery, nbytes: int) -> Choice:
        """The way of one tensor. A receiver that has gone gets nothing by shared memory, whatever the mode.

        A lease where all receivers have our arena: they hold its memory, so there is nothing left to prove.
        """
        return self.choose_each(delivery, [nbytes])[0]

    def choose_each(self, delivery: Delivery, sizes: Sequence[int]) -> list[Choice]:
        """:meth:`choose` for each of the tensors of one request."""
        consumers: tuple[int, ...] | None = None
        gone: Choice | None = None
        choices = []
        for nbytes in sizes:
            choice = choose(delivery, nbytes)
            if choice.reason is None or choice.reason in _CURED_BY_AN_ARENA:
                if consumers is None:
                    consumers = self.consumers(delivery)
                    gone = self._gone(delivery)
                if consumers:
                    choice = Choice("lease")
                elif choice.reason is None and gone is not None:
                    choice = gone
            choices.append(choice)
        return choices

    def _gone(self, delivery: Delivery) -> Choice | None:
        for worker in delivery.receivers:
            if self.is_gone(worker):
                return Choice("inline", Reason.WORKER_GONE, f"worker {worker.url} has gone")
        return None

    def consumers(self, delivery: Delivery) -> tuple[int, ...]:
        """The receivers' numbers as consumers of our arena; none unless all of them have it."""
        if self._proofs is None or not delivery.receivers:
            return ()
        if not delivery.several_readers and len(delivery.receivers) > 1:
            return ()  # one of them gets it, and nobody says here which
        numbers = []
        for worker in delivery.receivers:
            if not worker.labels.get(ENDPOINT_LABEL) or self._outstanding.is_gone(worker.url):
                return ()
            number = self._proofs.consumer(worker)
            if number is None:
                return ()
            numbers.append(number)
        return tuple(numbers)

    def against_names(self, delivery: Delivery) -> Reason | None:
        """What speaks against a segment with a name for each of several readers: that one of them has gone or, under
        ``auto``, does not share our memory. A delivery to several does not say: it ends at their number."""
        if self._gone(delivery) is not None:
            return Reason.WORKER_GONE
        if delivery.mode is not TransportMode.AUTO:
            return None
        found = (self._sharing(worker).reason for worker in delivery.receivers)
        return next((reason for reason in found if reason is not None), None)

    def is_gone(self, worker: WorkerSpec) -> bool:
        """Whether the worker was reported to be gone, or its socket has closed."""
        if self._outstanding.is_gone(worker.url):
            return True
        return self._proofs is not None and bool(worker.labels.get(ENDPOINT_LABEL)) and self._proofs.is_gone(worker)

    def by_labels(self, worker: WorkerSpec) -> Sharing:
        """What the labels of a stock worker prove."""
        if not self._namespace_id:
            # As SMG does, once; "" is asked for again, the directory may yet come.
            self._namespace_id = shm_namespace_id(self._shm_dir)
        return by_labels(worker, namespace_id=self._namespace_id, uid=os.geteuid())

    def _for_one(self, worker: WorkerSpec) -> Delivery:
        """What does not change is decided once a spec; only sharing is looked at anew."""
        known = self._decided.get(id(worker))
        if known is None or known.receivers[0] is not worker:
            if len(self._decided) >= _MAX_DECIDED:
                self._decided.clear()
            known = self._decided[id(worker)] = deliver((worker,), self._resolve, lambda _: SHARED)
        if known.mode is TransportMode.AUTO and (found := self._sharing(worker)).reason is not None:
            return replace(known, reason=found.reason, detail=found.detail)
        return known

    def _resolve(self, worker: WorkerSpec | None) -> ResolvedTransport:
        return self._config.resolve_in(self._environment, worker)

    def _sharing(self, worker: WorkerSpec) -> Sharing:
        if self._proofs is not None and worker.labels.get(ENDPOINT_LABEL):
            return self._proofs.sharing(worker)
        return self.by_labels(worker)
