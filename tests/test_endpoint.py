"""Workers and senders that meet over a socket: real processes, killed, forked, of another user, in another mount."""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import pytest

from mmcopy import _native
from mmcopy.endpoint import ProbeResult, SenderLink, WorkerEndpoint, default_directory
from mmcopy.errors import (
    ClosedError,
    ConfigError,
    EndpointError,
    EndpointGoneError,
    EndpointRefusedError,
    MmcopyTimeoutError,
)
from tests.rigs.private_shm import private_shm
from tests.rigs.users import THEIRS, as_user, open_to_all

from .rigs.waiting import settle

__all__ = ["open_to_all"]

pytestmark = pytest.mark.usefixtures("nothing_left_open")

LIMIT_S = 20.0


@pytest.fixture
def directory(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Where sockets are made; it must be empty at the end."""
    path = tmp_path / "run"
    yield path
    assert not path.exists() or list(path.iterdir()) == []


class Program:
    """A Python program that says one line when it is ready and ends with its standard input."""

    def __init__(self, script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def say(self, text: str) -> None:
        assert self._process.stdin is not None
        print(text, file=self._process.stdin, flush=True)

    def stop(self) -> None:
        """No thread of it runs any more when this returns."""
        self._process.send_signal(signal.SIGSTOP)
        threads = pathlib.Path(f"/proc/{self._process.pid}/task")
        assert settle(lambda: all(stat.read_text().rpartition(") ")[2][0] == "T" for stat in threads.glob("*/stat")))

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.communicate(timeout=30)

    def end(self) -> int:
        self._process.communicate("", timeout=30)
        return self._process.returncode


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def begin(script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> Program:
        started.append(Program(script, *arguments, prefix=prefix))
        return started[-1]

    yield begin
    for program in started:
        program.kill()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def refuses(path: str) -> bool:
    try:
        SenderLink.connect(path, timeout_s=LIMIT_S).close()
    except EndpointGoneError as error:
        return error.errno == errno.ECONNREFUSED
    return False


WORKER = """
import sys
from mmcopy.endpoint import WorkerEndpoint
endpoint = WorkerEndpoint(sys.argv[1], shm_dir=sys.argv[2], allowed_uids=[int(uid) for uid in sys.argv[3:]])
print(endpoint.path, flush=True)
sys.stdin.read()
endpoint.close()
"""

SENDER = """
import sys
from mmcopy.endpoint import SenderLink
link = SenderLink.connect(sys.argv[1], timeout_s=20)
print("connected", flush=True)
sys.stdin.read()
"""


def test_a_probe_between_processes(
    start: Callable[..., Program], directory: pathlib.Path, shm_dir: pathlib.Path
) -> None:
    worker = start(WORKER, directory, shm_dir)
    path = worker.line()
    assert pathlib.Path(path).parent == directory
    with SenderLink.connect(path, timeout_s=LIMIT_S) as link:
        assert link.probe(shm_dir, timeout_s=LIMIT_S) == ProbeResult(
            True, f"the worker read 32 bytes that we wrote to {shm_dir}"
        )
        assert not link.closed
        assert list(shm_dir.iterdir()) == []
    assert worker.end() == 0
    assert link.closed
    with pytest.raises(ClosedError):
        link.probe(shm_dir, timeout_s=LIMIT_S)


def test_a_killed_worker_is_noticed_and_its_socket_removed_by_the_next(
    start: Callable[..., Program], directory: pathlib.Path, shm_dir: pathlib.Path
) -> None:
    first, second = start(WORKER, directory, shm_dir), start(WORKER, directory, shm_dir)
    path, other = first.line(), second.line()
    with SenderLink.connect(path, timeout_s=LIMIT_S) as link:
        first.kill()
        assert settle(lambda: link.closed)
        with pytest.raises(EndpointGoneError, match="the worker has gone"):
            link.probe(shm_dir, timeout_s=LIMIT_S)
    assert pathlib.Path(path).exists()
    with pytest.raises(EndpointGoneError) as raised:
        SenderLink.connect(path, timeout_s=LIMIT_S)
    assert (raised.value.errno, raised.value.filename) == (errno.ECONNREFUSED, path)
    with WorkerEndpoint(directory, shm_dir=shm_dir) as third:
        assert third.statistics()["swept"] == 1
        assert sorted(directory.iterdir()) == sorted(map(pathlib.Path, (other, third.path)))
        with SenderLink.connect(other, timeout_s=LIMIT_S) as link:
            assert link.probe(shm_dir, timeout_s=LIMIT_S)
    assert second.end() == 0


def test_a_killed_sender_is_noticed_and_harms_nobody(
    start: Callable[..., Program], directory: pathlib.Path, shm_dir: pathlib.Path
) -> None:
    with WorkerEndpoint(directory, shm_dir=shm_dir) as endpoint:
        senders = [start(SENDER, endpoint.path) for _ in range(3)]
        assert [sender.line() for sender in senders] == ["connected"] * 3
        assert settle(lambda: endpoint.statistics()["links"] == 3)
        senders[1].kill()
        assert settle(lambda: endpoint.statistics()["links"] == 2)
        with SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) as link:
            assert link.probe(shm_dir, timeout_s=LIMIT_S)
        assert endpoint.statistics()["faults"] == 0


def test_nobody_there(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(EndpointGoneError) as raised:
        SenderLink.connect(tmp_path / "missing", timeout_s=LIMIT_S)
    assert raised.value.errno == errno.ENOENT
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EndpointGoneError):
        SenderLink.connect(tmp_path / "file", timeout_s=LIMIT_S)
    with pytest.raises(EndpointError, match="at most 107 fit"):
        SenderLink.connect(tmp_path / ("x" * 120), timeout_s=LIMIT_S)


def test_a_worker_that_is_stopped_reaches_the_limit(
    start: Callable[..., Program], directory: pathlib.Path, shm_dir: pathlib.Path
) -> None:
    worker = start(WORKER, directory, shm_dir)
    path = worker.line()
    link = SenderLink.connect(path, timeout_s=LIMIT_S)
    worker.stop()
    with pytest.raises(MmcopyTimeoutError, match=r"the worker's answer to a probe did not end within 50ms"):
        link.probe(shm_dir, timeout_s=0.05)
    with pytest.raises(MmcopyTimeoutError, match="connecting"):
        SenderLink.connect(path, timeout_s=0.05)
    assert list(shm_dir.iterdir()) == []
    worker.go_on()
    # The late answer to the first probe is passed over.
    assert link.probe(shm_dir, timeout_s=LIMIT_S)
    link.close()
    assert worker.end() == 0


def test_closing_ends_a_call_of_another_thread(
    start: Callable[..., Program], directory: pathlib.Path, shm_dir: pathlib.Path
) -> None:
    worker = start(WORKER, directory, shm_dir)
    link = SenderLink.connect(worker.line(), timeout_s=LIMIT_S)
    worker.stop()
    outcome: list[BaseException] = []

    def probe() -> None:
        try:
            link.probe(shm_dir, timeout_s=LIMIT_S)
        except ClosedError as error:
            outcome.append(error)

    thread = threading.Thread(target=probe)
    thread.start()
    assert settle(lambda: len(list(shm_dir.iterdir())) == 2)  # the probe's segment and its owner's lock
    link.close()
    thread.join(timeout=LIMIT_S)
    assert len(outcome) == 1
    worker.go_on()
    assert worker.end() == 0


def test_forked_children_keep_neither_side_alive(
    start: Callable[..., Program], directory: pathlib.Path, shm_dir: pathlib.Path
) -> None:
    forking = """
    import os, sys, time
    from mmcopy.endpoint import SenderLink, WorkerEndpoint
    from mmcopy.errors import ClosedError
    endpoint = WorkerEndpoint(sys.argv[1], shm_dir=sys.argv[2])
    link = SenderLink.connect(sys.argv[3], timeout_s=20)
    child = os.fork()
    if child == 0:
        outcomes = [endpoint.closed, link.closed]
        for call in (lambda: link.probe(sys.argv[2], timeout_s=1), endpoint.statistics):
            try:
                call()
            except ClosedError:
                outcomes.append(True)
        endpoint.close(); link.close()
        del endpoint, link
        sockets = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                   if os.path.exists(f"/proc/self/fd/{n}") or os.path.islink(f"/proc/self/fd/{n}")]
        outcomes.append(not any("socket:" in name or "eventfd" in name for name in sockets))
        os.write(1, b"%d\\n" % (all(outcomes) and len(outcomes)))
        os.close(1)
        time.sleep(60)
    os.write(1, f"{child} {endpoint.path}\\n".encode())
    sys.stdin.read()
    """
    with WorkerEndpoint(directory, shm_dir=shm_dir) as ours:
        both = start(forking, directory, shm_dir, ours.path)
        lines = sorted([both.line(), both.line()], key=len)
        assert lines[0] == "5"
        child, _, path = lines[1].partition(" ")
        try:
            assert pathlib.Path(path).exists()
            with SenderLink.connect(path, timeout_s=LIMIT_S) as link:
                assert link.probe(shm_dir, timeout_s=LIMIT_S)
                both.kill()
                os.kill(int(child), 0)  # the child lives, and nobody takes it for its parent
                assert settle(lambda: link.closed)
                assert settle(lambda: ours.statistics()["links"] == 0)
            with pytest.raises(EndpointGoneError):
                SenderLink.connect(path, timeout_s=LIMIT_S)
        finally:
            os.kill(int(child), signal.SIGKILL)
    with WorkerEndpoint(directory, shm_dir=shm_dir) as last:
        assert last.statistics()["swept"] == 1


def test_close_may_be_repeated_and_leaves_nothing(directory: pathlib.Path) -> None:
    endpoint = WorkerEndpoint(directory)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(pathlib.Path(endpoint.path).stat().st_mode) == 0o600
    link = SenderLink.connect(endpoint.path, timeout_s=LIMIT_S)
    assert "open" in repr(endpoint)
    assert "open" in repr(link)
    endpoint.close()
    endpoint.close(timeout_s=0)
    assert (endpoint.closed, link.closed) == (True, True)
    assert "closed" in repr(endpoint)
    link.close()
    link.close()
    assert "closed" in repr(link)
    WorkerEndpoint(directory)  # dropped: closed


def test_bad_options(directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    for options in (
        {"accept_prefixes": "mmcopy-"},
        {"accept_prefixes": [""]},
        {"accept_prefixes": [3]},
        {"accept_prefixes": None},
        {"max_links": 0},
        {"max_links": "many"},
        {"max_arenas": None},
        {"max_arenas": -1},
        {"allowed_uids": [-1]},
        {"allowed_uids": ["root"]},
        {"allowed_uids": 0},
        {"hello_timeout_s": "soon"},
    ):
        with pytest.raises(ConfigError):
            WorkerEndpoint(directory, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout_s"):
        WorkerEndpoint(directory, hello_timeout_s=float("nan"))
    with pytest.raises(EndpointError, match=r"has 1\d\d bytes, at most 107 fit"):
        WorkerEndpoint(tmp_path / ("x" * 90))
    with pytest.raises(EndpointError) as raised:
        WorkerEndpoint(tmp_path / "missing" / "below")
    assert raised.value.errno == errno.ENOENT
    with pytest.raises(EndpointError, match="surrogates"):
        SenderLink.connect("/tmp/\ud800", timeout_s=1)
    assert default_directory().is_absolute()


@pytest.mark.root
def test_an_unwritable_directory_is_one_error(tmp_path: pathlib.Path) -> None:
    script = f"""
    import os, sys
    import mmcopy
    from mmcopy.endpoint import WorkerEndpoint
    os.makedirs({str(tmp_path)!r} + "/d", mode=0o700)
    os.chmod({str(tmp_path)!r}, 0o755)
    os.chown({str(tmp_path)!r} + "/d", 65534, 65534)
    os.chmod({str(tmp_path)!r} + "/d", 0o500)
    os.setgid(65534); os.setuid(65534)
    try:
        WorkerEndpoint({str(tmp_path)!r} + "/d")
    except mmcopy.errors.EndpointError as error:
        print(error.errno)
    try:
        WorkerEndpoint("/root/mmcopy-test")
    except mmcopy.errors.EndpointError as error:
        print(error.errno)
    """
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == 0 and parent != pathlib.Path("/") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o001)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == [str(errno.EACCES)] * 2, done.stderr


def test_a_signal_does_not_look_like_a_workers_end(directory: pathlib.Path) -> None:
    with WorkerEndpoint(directory) as endpoint, SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) as link:
        signals = itertools.count()
        before = signal.signal(signal.SIGALRM, lambda *_: next(signals))
        try:
            signal.setitimer(signal.ITIMER_REAL, 20e-6, 20e-6)
            assert not any(link.closed for _ in range(100_000))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert next(signals) > 100
        assert link.probe(timeout_s=LIMIT_S)


DEFAULT_DIRECTORY = """
first, second = WorkerEndpoint(), WorkerEndpoint()
directory = pathlib.Path(first.path).parent
print(directory, pathlib.Path(second.path).parent == directory, oct(directory.stat().st_mode)[-4:])
with SenderLink.connect(first.path, timeout_s=20) as link:
    print(link.probe(timeout_s=20).reason)
for each in (first, second):
    each.close()
try:
    WorkerEndpoint(sys.argv[3])
except errors.EndpointError as error:
    print(error)
"""


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_default_directory_of_another_user_is_not_used(open_to_all: pathlib.Path, mode: int) -> None:
    uid = 2_000_000 + os.getpid()  # whose default directory no other run uses
    usual = pathlib.Path(f"/tmp/mmcopy-{uid}")
    try:
        as_user(THEIRS, open_to_all, "os.umask(0); os.mkdir(sys.argv[3], int(sys.argv[4]))", str(usual), str(mode))
        found, answer, refused = as_user(uid, open_to_all, DEFAULT_DIRECTORY, str(usual)).splitlines()
        directory, is_same, found_mode = found.split()
        assert directory.startswith(f"{usual}-")
        assert (is_same, found_mode) == ("True", "0700")
        assert "the worker read 32 bytes" in answer
        assert f"endpoint directory {usual} is refused: it belongs to uid {THEIRS}, we are uid {uid}" in refused
        assert as_user(uid, open_to_all, "print(endpoint.default_directory())") == directory
    finally:
        for path in usual.parent.glob(f"{usual.name}*"):
            path.rmdir()


AS_NOBODY = """
import os, sys
import mmcopy
from mmcopy.endpoint import SenderLink
os.setgid(65534); os.setuid(65534)
try:
    link = SenderLink.connect(sys.argv[1], timeout_s=20, allowed_uids=[0])
    print(link.probe(sys.argv[2], timeout_s=20).reason, flush=True)
except mmcopy.MmcopyError as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.mark.root
def test_another_user(start: Callable[..., Program], tmp_path: pathlib.Path) -> None:
    # Not below tmp_path: pytest closes that to others.
    directory = pathlib.Path("/tmp") / f"mmcopy-test-{os.getpid()}"
    try:
        with WorkerEndpoint(directory) as private:
            answer = start(AS_NOBODY, private.path, "/dev/shm").line()
            assert answer.startswith("EndpointError [Errno 13] connect failed: Permission denied"), answer
            directory.chmod(0o711)
            pathlib.Path(private.path).chmod(0o666)
            answer = start(AS_NOBODY, private.path, "/dev/shm").line()
            assert answer.startswith("EndpointRefusedError"), answer
            assert "the sender has uid 65534; allowed: 0 (ours)" in answer
            assert private.statistics()["refused_users"] == 1
        with WorkerEndpoint(directory, allowed_uids=[65534]) as endpoint:
            assert stat.S_IMODE(pathlib.Path(endpoint.path).stat().st_mode) == 0o666
            # root may read nobody's segment
            assert "the worker read 32 bytes" in start(AS_NOBODY, endpoint.path, "/dev/shm").line()
            assert "we cannot write to /proc" in start(AS_NOBODY, endpoint.path, "/proc").line()
    finally:
        directory.rmdir()


@pytest.mark.root
def test_a_worker_of_another_user_cannot_read_a_private_segment(tmp_path: pathlib.Path) -> None:
    script = """
    import os, sys
    from mmcopy.endpoint import WorkerEndpoint
    os.setgid(65534); os.setuid(65534)
    endpoint = WorkerEndpoint(sys.argv[1], allowed_uids=[0])
    print(endpoint.path, flush=True)
    sys.stdin.read()
    endpoint.close()
    """
    directory = f"/tmp/mmcopy-test-nobody-{os.getpid()}"
    worker = Program(script, directory)
    try:
        path = worker.line()
        with pytest.raises(EndpointRefusedError, match=r"the worker has uid 65534; allowed: 0 \(ours\)"):
            SenderLink.connect(path, timeout_s=LIMIT_S)
        with SenderLink.connect(path, timeout_s=LIMIT_S, allowed_uids=[65534]) as link:
            result = link.probe(timeout_s=LIMIT_S)
        assert not result
        assert "errno 13" in result.reason
        assert "owner uid 0, mode 0600; we are uid 65534" in result.reason
        assert worker.end() == 0
    finally:
        worker.kill()
        os.rmdir(directory)  # noqa: PTH106


@pytest.mark.root
def test_a_worker_with_a_dev_shm_of_its_own(
    start: Callable[..., Program], directory: pathlib.Path, segments: Callable[[], list[str]]
) -> None:
    worker = start(WORKER, directory, "/dev/shm", prefix=private_shm())
    with SenderLink.connect(worker.line(), timeout_s=LIMIT_S) as link:
        result = link.probe(timeout_s=LIMIT_S)
    assert not result.ok
    assert result.reason.startswith("the worker cannot read our segment (errno 2)")
    assert segments() == []
    assert worker.end() == 0


@pytest.mark.root
def test_another_pid_namespace_changes_nothing(
    start: Callable[..., Program], directory: pathlib.Path, segments: Callable[[], list[str]]
) -> None:
    worker = start(WORKER, directory, "/dev/shm", prefix=("unshare", "-p", "-f", "--kill-child"))
    with SenderLink.connect(worker.line(), timeout_s=LIMIT_S) as link:
        assert link.probe(timeout_s=LIMIT_S)
        # Not unshare, whose pipe would close first and let the worker end by itself.
        (inside,) = children_of(worker._process.pid)
        os.kill(inside, signal.SIGKILL)
        assert settle(lambda: link.closed)
        assert settle(lambda: refuses(link.path))
    with WorkerEndpoint(directory) as next_one:
        assert next_one.statistics()["swept"] == 1


def test_native_names_are_what_python_shows(directory: pathlib.Path) -> None:
    with WorkerEndpoint(directory) as endpoint:
        assert endpoint.path == str(directory / f"mmcopy-{endpoint.native.instance_id}.sock")
        with SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) as link:
            assert isinstance(link.native, _native.SenderLink)
            assert (link.native.worker_id, link.path) == (endpoint.native.instance_id, endpoint.path)
