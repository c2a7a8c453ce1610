"""Who receives what: a request's workers, by their roles, and the way of its pixels and of its side tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmcopy.config.transport import ResolvedTransport
from mmcopy.config.worker import Role, WorkerSpec
from mmcopy.errors import ConfigError

from .delivery import Delivery, Sharing, deliver

__all__ = ["Route", "plan_route", "receivers_of"]


@dataclass(frozen=True)
class Route:
    """The two decisions about one request.

    ``pixels``: each tensor goes to one of the receivers (``route.pixels.to(worker)``). ``side_tensors``: each goes to
    all of them. What an encode worker gets beside its pixels goes as they do.
    """

    pixels: Delivery
    side_tensors: Delivery


def receivers_of(workers: Sequence[WorkerSpec]) -> tuple[tuple[WorkerSpec, ...], tuple[WorkerSpec, ...]]:
    """Who gets pixels, and who gets side tensors.

    Pixels go to the encode workers; without any, to the prefill or the aggregated worker. Side tensors go to prefill
    and decode, or to the aggregated worker. Raises :class:`ConfigError` for a set of roles that serves no
    request: none at all, no prefill (or aggregated) worker, two workers of a role other than encode, or prefill or
    decode beside aggregated.
    """
    by_role = {role: tuple(worker for worker in workers if worker.role == role) for role in Role}
    named = ", ".join(f"{worker.url} ({worker.role})" for worker in workers) or "none"
    for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE):
        if len(by_role[role]) > 1:
            raise ConfigError(f"workers of a request: {len(by_role[role])} of role {role}, want 1 at most: {named}")
    aggregated, prefill, decode = by_role[Role.AGGREGATED], by_role[Role.PREFILL], by_role[Role.DECODE]
    if aggregated and (prefill or decode):
        raise ConfigError(f"workers of a request: want either an aggregated worker or prefill and decode: {named}")
    if not (aggregated or prefill):
        raise ConfigError(f"workers of a request: want a prefill or an aggregated worker: {named}")
    side = (*aggregated, *prefill, *decode)
    return by_role[Role.ENCODE] or side[:1], side


def plan_route(
    workers: Sequence[WorkerSpec],
    resolve: Callable[[WorkerSpec | None], ResolvedTransport],
    sharing: Callable[[WorkerSpec], Sharing],
) -> Route:
    """Decide for one request that ``workers`` serve; the callables are those of :func:`deliver`.

    As SMG does, ``auto`` asks of decode too that it shares memory before prefill gets pixels by it. Other than SMG,
    each decision asks those alone who receive, and all of them; and side tensors of several readers go inline, where
    SMG names one segment to both and the slower one finds nothing.
    """
    pixels, side = receivers_of(workers)
    encoded = pixels[0].role == Role.ENCODE
    return Route(
        pixels=deliver(pixels, resolve, sharing, also_sharing=() if encoded else side[1:]),
        side_tensors=deliver(side, resolve, sharing, several_readers=True),
    )
