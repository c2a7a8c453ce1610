"""How much code one send runs through."""

from __future__ import annotations

import pytest

from mmcopy import Sender, TensorData
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.lease_side import Side, sender, side, sockets
from tests.rigs.walk import files_run_by

__all__ = ["sender", "side", "sockets"]  # fixtures

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def test_a_send_by_lease_under_auto_runs_through_six_files_at_most(sender: Sender, side: Side) -> None:
    array = random_bytes(MIB)
    sent: list[TensorData] = [sender.send(array, worker=side.spec)]
    files = files_run_by(lambda: sent.append(sender.send(array, worker=side.spec)))
    assert [data.path for data in sent] == ["lease", "lease"]
    assert "send/sender.py" in files
    assert len(files) <= 6, sorted(files)
    for data in sent:
        side.receiver.release(data)
