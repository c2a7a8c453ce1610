"""``auto`` between namespaces, with real ``unshare``: containers that share /dev/shm, IPC and process ids, or do not.

Each worker is asked in both ways: a stock one, which only advertises its namespace id, and an mmcopy one, which reads
back what the sender writes. Where shared memory is chosen, the worker really receives the tensor.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Sender, ShmHandle, TransportConfig, WorkerSpec, shm_namespace_id

from .rigs.shared_memory import shared_files

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("nothing_left_open", "segments")]

BIG = np.arange(1 << 16, dtype=np.uint8)
WORKER = """
import json, os, sys
import mmcopy
from mmcopy.endpoint import WorkerEndpoint
if len(sys.argv) > 2:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
with WorkerEndpoint(sys.argv[1], allowed_uids=[0]) as endpoint, mmcopy.Receiver("cpu", framework="numpy") as receiver:
    print(json.dumps({"mmcopy_endpoint": endpoint.path, "shm_namespace_id": mmcopy.shm_namespace_id(),
                      "pid": os.getpid(), "shm_uid": str(os.geteuid())}), flush=True)
    for line in sys.stdin:
        handle = mmcopy.ShmHandle(**json.loads(line))
        tensor = receiver.receive(mmcopy.TensorData("uint8", (handle.nbytes,), handle))
        print(json.dumps(int(tensor.astype("uint64").sum())), flush=True)
"""

OWN_SHM = 'mount -t tmpfs -o mode=1777,size=64m tmpfs /dev/shm; exec "$@"'
REBOUND = 'mount --bind /dev/shm /mnt; mount --bind /mnt /dev/shm; exec "$@"'


class Worker:
    def __init__(self, directory: pathlib.Path, prefix: tuple[str, ...], uid: int | None) -> None:
        command = [*prefix, sys.executable, "-c", WORKER, str(directory), *([] if uid is None else [str(uid)])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self._line()
        assert line, "the worker did not start"
        self.told: dict[str, Any] = json.loads(line)

    def spec(self, *labels: str) -> WorkerSpec:
        return WorkerSpec("grpc://w", labels={name: self.told[name] for name in labels})

    def receive(self, handle: ShmHandle) -> int:
        assert self.process.stdin is not None
        told = {"name": handle.name, "offset": handle.offset, "nbytes": handle.nbytes, "owner_id": handle.owner_id}
        print(json.dumps(told), file=self.process.stdin, flush=True)
        return int(json.loads(self._line()))

    def end(self) -> None:
        self.process.communicate("", timeout=30)
        assert self.process.returncode == 0

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


@pytest.fixture
def directory() -> Iterator[pathlib.Path]:
    """For sockets: the only thing that a container without our /dev/shm shares with us."""
    with tempfile.TemporaryDirectory(prefix="mmcopy-test-") as name:
        pathlib.Path(name).chmod(0o711)
        yield pathlib.Path(name) / "run"


def paths_and_sums(worker: Worker, *labels: str) -> tuple[str, str, int | None]:
    """Which way a tensor goes, why inline, and the sum of what the worker received by shared memory."""
    with Sender(TransportConfig(mode="auto"), arena_bytes=0) as sender:
        data = sender.send(BIG, worker=worker.spec(*labels))
        reason = next(iter(sender.metrics.snapshot().get("inline_fallbacks", {})), "")
        if isinstance(data.payload, ShmHandle):
            return "segment", reason, worker.receive(data.payload)
        return "inline", reason, None


def in_shell(script: str, *flags: str) -> tuple[str, ...]:
    return ("unshare", "--mount", *flags, "sh", "-ec", script, "sh")


@pytest.mark.parametrize(
    ("prefix", "is_shared"),
    [
        pytest.param((), True, id="no namespace"),
        pytest.param(("unshare", "--mount"), True, id="mount"),
        pytest.param(("unshare", "--ipc"), True, id="ipc"),
        pytest.param(("unshare", "--pid", "--fork"), True, id="pid"),
        pytest.param(
            ("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--ipc", "--uts"), True, id="all but shm"
        ),
        pytest.param(in_shell(REBOUND), True, id="shm bound again"),
        pytest.param(in_shell(OWN_SHM), False, id="own shm"),
        pytest.param(in_shell(OWN_SHM, "--pid", "--fork", "--mount-proc", "--ipc"), False, id="own shm, pid, ipc"),
    ],
)
def test_auto_between_namespaces(directory: pathlib.Path, prefix: tuple[str, ...], is_shared: bool) -> None:
    worker = Worker(directory, prefix, None)
    try:
        assert (worker.told["shm_namespace_id"] == shm_namespace_id()) == is_shared
        if "--pid" in prefix:
            assert worker.told["pid"] == 1  # pids lie
        total = int(BIG.astype(np.uint64).sum())
        shared = ("segment", "", total)
        assert paths_and_sums(worker, "shm_namespace_id") == (
            shared if is_shared else ("inline", "namespace_differs", None)
        )
        assert paths_and_sums(worker, "shm_namespace_id", "mmcopy_endpoint") == (
            shared if is_shared else ("inline", "proof_failed", None)
        )
    finally:
        worker.end()


def test_another_user_is_found_by_its_label_and_by_asking(directory: pathlib.Path) -> None:
    directory.mkdir(mode=0o700)
    os.chown(directory, 65534, 65534)
    worker = Worker(directory, (), 65534)
    try:
        assert worker.told["shm_namespace_id"] == shm_namespace_id()
        assert paths_and_sums(worker, "shm_namespace_id", "shm_uid") == ("inline", "uid_differs", None)
        assert paths_and_sums(worker, "shm_namespace_id", "mmcopy_endpoint") == ("inline", "proof_failed", None)
    finally:
        worker.end()


def test_a_worker_that_could_not_remove_what_it_is_sent_advertises_nothing(directory: pathlib.Path) -> None:
    script = """
import json, mmcopy
from mmcopy.integrations.smg import ModelInfo, SmgWorker
model = ModelInfo(model_path="/m", served_model_name="m", model_type="m", architectures=(), vocab_size=1,
                  eos_token_ids=())
with mmcopy.Receiver("cpu", framework="numpy") as receiver:
    worker = SmgWorker(model, receiver, endpoint_path="/run/x.sock")
    print(json.dumps([worker.shm_namespace_id, worker.endpoint_path]))
"""
    read_only = 'mount --bind /dev/shm /dev/shm; mount -o remount,bind,ro /dev/shm; exec "$@"'
    for prefix, wanted in [((), [shm_namespace_id(), "/run/x.sock"]), (in_shell(read_only), ["", ""])]:
        command = [*prefix, sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert json.loads(done.stdout) == wanted
        assert ("/dev/shm cannot be written" in done.stderr) == (prefix != ())


def test_a_sender_whose_own_shared_memory_is_read_only_sends_inline(directory: pathlib.Path) -> None:
    worker = Worker(directory, (), None)
    script = """
import json, sys
import numpy as np, mmcopy
spec = mmcopy.WorkerSpec("grpc://w", labels=json.loads(sys.argv[1]))
with mmcopy.Sender(mmcopy.TransportConfig(mode="auto"), arena_bytes=0) as sender:
    sender.send(np.ones(1 << 16, np.uint8), worker=spec)
    print(json.dumps(sender.metrics.snapshot()))
"""
    try:
        before = shared_files()
        read_only = 'mount --bind /dev/shm /dev/shm; mount -o remount,bind,ro /dev/shm; exec "$@"'
        for labels, reason in [(["shm_namespace_id"], "permission"), (["mmcopy_endpoint"], "proof_failed")]:
            told = json.dumps({name: worker.told[name] for name in labels})
            command = [*in_shell(read_only), sys.executable, "-c", script, told]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
            counted = json.loads(done.stdout)
            assert counted["tensors_sent"] == {"inline": 1}
            assert counted["inline_fallbacks"] == {reason: 1}
        assert shared_files() == before
    finally:
        worker.end()
