"""Tensor-parallel ranks encode the same shapes in the same order, or none of them does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from mmcopy.errors import ConfigError, PrewarmError

__all__ = ["Ranks"]

T = TypeVar("T")


class Ranks:
    """The group that encodes together; without one, this process alone.

    ``group`` is a ``torch.distributed`` group for objects on the CPU (gloo). Its calls block until all ranks have made
    them: they run on the prewarm's thread, inside its deadline, or by :meth:`within`.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        if group is not None:
            import torch.distributed as dist

            backend = str(dist.get_backend(group))
            if "gloo" not in backend and "mpi" not in backend:
                raise ConfigError(f"group has the backend {backend}, want one for the CPU: new_group(backend='gloo')")

    @property
    def rank(self) -> int:
        """This process's place in the group; 0 without one."""
        if self._group is None:
            return 0
        import torch.distributed as dist

        return int(dist.get_rank(self._group))

    def within(self, limit_s: float, call: Callable[[], T]) -> T | None:
        """What ``call``, made of the calls below, returns, or raises; None when that took longer than ``limit_s``.

        For a thread that has to be back by then. A call that takes longer is left behind on a thread of its own.
        """
        if self._group is None:
            return call()
        answers: list[T] = []
        failures: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(call())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work, name="mmcopy-prewarm-ranks", daemon=True)
        thread.start()
        thread.join(max(0.0, limit_s))
        if failures:
            raise failures[0]
        return answers[0] if answers else None

    def gather(self, value: T) -> list[T]:
        """Everyone's ``value``, in the order of ranks."""
        if self._group is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def agree(self, plan: Sequence[str]) -> None:
        """Raises :class:`PrewarmError` on every rank when the plans differ, naming the first difference."""
        plans = self.gather(list(plan))
        for rank, other in enumerate(plans):
            if other != plans[0]:
                at = next((i for i, (a, b) in enumerate(zip(plans[0], other, strict=False)) if a != b), None)
                at = min(len(plans[0]), len(other)) if at is None else at
                mine, theirs = (repr(each[at]) if at < len(each) else "nothing" for each in (plans[0], other))
                raise PrewarmError(
                    f"ranks do not agree on what to encode: at {at} rank 0 has {mine}, rank {rank} has {theirs} "
                    f"({len(plans[0])} and {len(other)} entries)"
                )

    def all_of(self, value: T, choose: Callable[[list[T]], T]) -> T:
        """What ``choose`` makes of everyone's value: the same on each rank."""
        return choose(self.gather(value))
