"""What senders that are gone left behind is removed, and no send needs that or waits for it."""

from __future__ import annotations

import os
import pathlib
import time

import pytest

from mmcopy import Sender, TransportConfig, WorkerSpec, _native
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.metrics import Counter
from tests.rigs.users import OURS, THEIRS, as_user, open_to_all
from tests.rigs.waiting import settle

__all__ = ["open_to_all"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")

SHM = TransportConfig(mode="shm", shm_min_bytes=1)


def leave(shm_dir: pathlib.Path, *, is_dead: bool = True) -> str:
    """A segment of a sender that was killed, or has closed."""
    owner = _native.SegmentOwner(shm_dir)
    name = owner.next_name()
    _native.write_segment(shm_dir, name, bytes(100))
    owner.forget() if is_dead else owner.close()
    return name


def names(shm_dir: pathlib.Path) -> set[str]:
    return {path.name for path in shm_dir.iterdir()}


def test_a_sender_clears_up_when_it_starts_whatever_it_sends(shm_dir: pathlib.Path) -> None:
    leave(shm_dir)
    with Sender(TransportConfig(mode="inline"), shm_dir=shm_dir) as sender:
        assert settle(lambda: names(shm_dir) == set())
        sender.send(b"a")
        assert sender.metrics.get(Counter.SEGMENTS_REMOVED, "swept") == 1


def test_an_endpoint_clears_up_when_it_starts(shm_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    leave(shm_dir)
    with WorkerEndpoint(tmp_path / "s", shm_dir=shm_dir) as endpoint:
        assert settle(lambda: names(shm_dir) == set())
        assert settle(lambda: endpoint.statistics()["segments_swept"] == 1)
        assert endpoint.statistics()["sweep_failures"] == 0


def test_a_sender_of_leases_clears_up_now_and_then(
    shm_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmcopy.send.segments.Sweeper", lambda path: _native.Sweeper(path, every_s=0.01))
    with (
        WorkerEndpoint(tmp_path / "s", shm_dir=shm_dir) as endpoint,
        Sender(TransportConfig(mode="auto", shm_min_bytes=1), shm_dir=shm_dir, arena_bytes=1 << 20) as sender,
    ):
        worker = WorkerSpec("grpc://w", labels={"mmcopy_endpoint": endpoint.path})
        assert sender.connect(worker, timeout_s=20).has_arena
        # Younger than a minute when both started, as an orderly close leaves it.
        name = leave(shm_dir, is_dead=False)
        for _ in range(5):
            data = sender.send(b"abc", worker=worker)
            assert data.path == "lease"
            sender.cancel(data)
        assert name in names(shm_dir)
        os.utime(shm_dir / name, (0, time.time() - 61))
        assert settle(lambda: sender.cancel(sender.send(b"abc", worker=worker)) and name not in names(shm_dir))


SEND = """
import threading
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
if sys.argv[3] == "no threads":
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
sender = mmcopy.Sender(mmcopy.TransportConfig(mode="shm", shm_min_bytes=1), shm_dir=folder)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    sent = [sender.send(np.zeros(10, np.uint8)) for _ in range(10)]
    assert {data.path for data in sent} == {"segment"}, sent
    for data in sent:
        sender.cancel(data)
    failures = sender.metrics.get(mmcopy.metrics.Counter.REMOVE_FAILURES, "swept")
    left = {path.name for path in folder.glob("*-*-*")} & set(sys.argv[4:])
    if failures and sys.argv[3] != "foreign" or sys.argv[3] == "foreign" and not left:
        break
sender.close()
print(sorted(left), failures)
"""


@pytest.mark.root
def test_a_thousand_lock_files_of_another_user_change_nothing(open_to_all: pathlib.Path) -> None:
    as_user(THEIRS, open_to_all, "for n in range(1100): (folder / f'mmcopy-{n:016x}.lock').touch()")
    left = as_user(OURS, open_to_all, LEAVE)
    assert as_user(OURS, open_to_all, SEND, "foreign", left) == "[] 0"


LEAVE = """
owner = _native.SegmentOwner(folder)
name = owner.next_name()
_native.write_segment(folder, name, bytes(100))
owner.forget()
print(name)
"""


@pytest.mark.root
def test_what_cannot_be_removed_is_counted_and_sends_go_on(open_to_all: pathlib.Path) -> None:
    left = as_user(OURS, open_to_all, LEAVE)
    (open_to_all / left).chmod(0)
    assert as_user(OURS, open_to_all, SEND, "unreadable", left) == f"['{left}'] 1"


@pytest.mark.root
def test_without_a_thread_nothing_is_swept_and_sends_go_on(open_to_all: pathlib.Path) -> None:
    left = as_user(OURS, open_to_all, LEAVE)
    assert as_user(OURS, open_to_all, SEND, "no threads", left) == f"['{left}'] 1"
