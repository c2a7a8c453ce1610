"""How the doctor reports a worker that it has probed."""

from __future__ import annotations

import pytest

from mmcopy.config import WorkerSpec
from mmcopy.send.routing import SHARED, Reason, Sharing
from mmcopy.send.workers import Connection
from mmcopy.tools.doctor import Status, probe

GOOD, WARNING = Status.GOOD, Status.WARNING


REFUSED = "the worker takes none at /s"
FOREIGN = Sharing(Reason.NAMESPACE_DIFFERS, "theirs is a:1, ours b:2")


@pytest.mark.parametrize(
    ("connection", "status", "found"),
    [
        (Connection(SHARED, 0), GOOD, "takes the arena, auto uses it; reads what uid"),
        (Connection(FOREIGN, 0), GOOD, "takes the arena, auto uses it; theirs is a:1, ours b:2"),
        (Connection(SHARED, None, REFUSED), GOOD, "auto uses segments; no arena (the worker takes none at /s)"),
        (
            Connection(FOREIGN, None, REFUSED),
            WARNING,
            "theirs is a:1, ours b:2; no arena (the worker takes none at /s)",
        ),
    ],
)
def test_a_worker_that_takes_the_arena_needs_no_probe(connection: Connection, status: Status, found: str) -> None:
    line = probe.judge_worker(WorkerSpec("grpc://a:1", labels={"mmcopy_endpoint": "/s"}), connection)
    assert line.status is status
    assert found in line.found
