"""Child processes: stopped within a limit, never outliving the parent, signals asked for instead of raised anywhere."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from mmcopy.tools.process import ChildProcess
from mmcopy.tools.signals import Interrupted, Signals
from tests.rigs.orphans import have_ended, orphans_of
from tests.rigs.waiting import settle

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
FOLLOWS_STDIN = "import sys; print('up', flush=True); sys.stdin.read()"


def child(tmp_path: Path, code: str, *, watched: bool = True, stop_timeout_s: float = 5.0) -> ChildProcess:
    command = [sys.executable, "-c", code]
    return ChildProcess(command, log_path=tmp_path / "log", watched=watched, stop_timeout_s=stop_timeout_s)


@pytest.mark.parametrize("watched", [True, False])
def test_a_stopped_child_is_gone_and_its_log_stays(tmp_path: Path, watched: bool, nothing_left_open: None) -> None:
    process = child(tmp_path, "import time; print('up', flush=True); time.sleep(60)", watched=watched)
    assert process.stop() is None  # nothing was started yet
    with process:
        assert settle(lambda: process.log() == "up\n")  # an unbuffered child writes the end of the line by itself
        assert process.running
        pid = process.pid
        assert os.getpgid(pid) == pid != os.getpgid(0)
    assert process.returncode == -signal.SIGTERM
    assert not psutil.pid_exists(pid)
    assert process.stop() == -signal.SIGTERM
    assert process.log() == "up\n"


def test_a_stubborn_child_is_killed_after_the_limit(tmp_path: Path) -> None:
    process = child(tmp_path, STUBBORN, stop_timeout_s=0.2)
    with process:
        assert settle(lambda: process.log() == "up\n")  # an unbuffered child writes the end of the line by itself
    assert process.returncode == -signal.SIGKILL


def test_a_command_that_does_not_exist(tmp_path: Path, nothing_left_open: None) -> None:
    process = ChildProcess(["/nonexistent/command"], log_path=tmp_path / "log", watched=False)
    with pytest.raises(FileNotFoundError):
        process.start()
    with pytest.raises(RuntimeError, match="was not started"):
        _ = process.pid


@pytest.mark.parametrize(("watched", "code"), [(True, "import time; time.sleep(60)"), (False, FOLLOWS_STDIN)])
def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path, watched: bool, code: str) -> None:
    parent_code = (
        "import sys, time\n"
        "from mmcopy.tools.process import ChildProcess\n"
        f"c = ChildProcess([sys.executable, '-c', {code!r}], log_path={str(tmp_path / 'log')!r}, watched={watched})\n"
        "c.start(); print(c.pid, flush=True); time.sleep(60)"
    )
    orphans = orphans_of(parent_code)
    assert settle(lambda: have_ended(orphans))


def test_a_signal_is_remembered_until_it_is_asked_for() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Signals() as signals:
        signals.check()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        time.sleep(0)  # here it would have been raised
        for _ in range(2):
            with pytest.raises(Interrupted, match="stopped by SIGTERM") as caught:
                signals.check()
            assert caught.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) is before
