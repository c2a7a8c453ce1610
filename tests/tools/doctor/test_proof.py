"""What a worker that was asked is told to be."""

from __future__ import annotations

import pytest

from mmcopy.config import WorkerSpec
from mmcopy.send.delivery import SHARED, Sharing
from mmcopy.send.reason import Reason
from mmcopy.tools.doctor import Status, arena, proof

GOOD, WARNING = Status.GOOD, Status.WARNING


FOREIGN = Sharing(Reason.NAMESPACE_DIFFERS, "theirs is a:1, ours b:2")
TAKEN, REFUSED = arena.Offer(True, "handed over at /s"), arena.Offer(False, "the worker takes none at /s")


@pytest.mark.parametrize(
    ("sharing", "offer", "status", "found"),
    [
        (SHARED, TAKEN, GOOD, "takes the arena, auto uses it; reads what uid"),
        (FOREIGN, TAKEN, GOOD, "takes the arena, auto uses it; theirs is a:1, ours b:2"),
        (SHARED, REFUSED, GOOD, "auto uses segments; no arena (the worker takes none at /s)"),
        (FOREIGN, REFUSED, WARNING, "theirs is a:1, ours b:2; no arena (the worker takes none at /s)"),
    ],
)
def test_a_worker_that_takes_the_arena_needs_no_other_proof(
    sharing: Sharing, offer: arena.Offer, status: Status, found: str
) -> None:
    line = proof.judge_worker(WorkerSpec("grpc://a:1", labels={"mmcopy_endpoint": "/s"}), sharing, offer)
    assert line.status is status
    assert found in line.found
