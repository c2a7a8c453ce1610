"""A real /dev/shm of 8 MiB, full, read-only, or another user's: fall back or one clear error, never a signal."""

from __future__ import annotations

import pytest

from tests.rigs.private_shm import in_private_shm

pytestmark = pytest.mark.root


PREAMBLE = """
import json, os, logging, numpy, mmcopy
logging.disable(logging.WARNING)
SHM = mmcopy.TransportConfig(mode="shm")
def left(): return [n for n in os.listdir("/dev/shm") if not n.endswith(".lock")]
"""


def test_a_burst_beyond_the_space_is_served_inline_and_counted() -> None:
    result = in_private_shm(
        PREAMBLE
        + """
with mmcopy.Sender(SHM) as sender, mmcopy.Receiver("cpu", framework="numpy") as receiver:
    sources = [numpy.full(3 << 20, i, numpy.uint8) for i in range(20)]
    sent = [sender.send(s) for s in sources]
    got = receiver.receive(sent)
    equal = all(g.tobytes() == s.tobytes() for g, s in zip(got, sources))
    print(json.dumps({"equal": equal, "left": left(), **sender.metrics.snapshot()}))
"""
    )
    assert result["equal"] is True
    assert result["left"] == []
    assert result["tensors_sent"] == {"inline": 18, "segment": 2}
    assert result["shm_write_failures"] == {"no_space": 18}


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_one_tensor_larger_than_the_space(dtype: str | None) -> None:
    result = in_private_shm(
        PREAMBLE
        + f"""
with mmcopy.Sender(SHM) as sender:
    data = sender.send(numpy.ones(9 << 20, numpy.float32), dtype={dtype!r})
    try:
        mmcopy._native.write_segment("/dev/shm", "smg-tokenspeed-x", numpy.ones(36 << 20, numpy.uint8))
    except mmcopy.errors.NoSpaceError as error:
        message = str(error)
    print(json.dumps({{"path": data.path, "nbytes": data.nbytes, "left": left(), "message": message}}))
"""
    )
    assert (result["path"], result["left"]) == ("inline", [])
    assert result["nbytes"] == (9 << 20) * (2 if dtype else 4)
    assert str(36 << 20) in str(result["message"])
    assert "/dev/shm" in str(result["message"])


def test_no_inodes_left() -> None:
    result = in_private_shm(
        PREAMBLE
        + """
with mmcopy.Sender(SHM) as sender:
    paths = [sender.send(numpy.ones(70000, numpy.uint8)).path for _ in range(8)]
    print(json.dumps({"paths": paths, **sender.metrics.snapshot()}))
""",
        mount_options="size=8m,nr_inodes=5",
    )
    assert result["shm_write_failures"] == {"no_space": 5}
    assert result["paths"] == ["segment"] * 3 + ["inline"] * 5


def test_a_read_only_dev_shm() -> None:
    result = in_private_shm(
        PREAMBLE
        + """
import subprocess
subprocess.run(["mount", "-o", "remount,ro", "/dev/shm"], check=True)
with mmcopy.Sender(SHM) as sender:
    data = sender.send(numpy.ones(70000, numpy.uint8))
    print(json.dumps({"path": data.path, **sender.metrics.snapshot()}))
"""
    )
    assert (result["path"], result["shm_write_failures"]) == ("inline", {"permission": 1})


def test_a_segment_of_another_user() -> None:
    result = in_private_shm(
        PREAMBLE
        + """
sender = mmcopy.Sender(SHM)
data = sender.send(numpy.ones(70000, numpy.uint8))
os.chmod("/dev/shm", 0o1777)
read, write = os.pipe()
if os.fork() == 0:
    os.setgid(65534); os.setuid(65534)
    receiver = mmcopy.Receiver("cpu", framework="numpy")
    try:
        receiver.receive(data)
        outcome = "received"
    except mmcopy.errors.SegmentPermissionError as error:
        outcome = str(error)
    os.write(write, outcome.encode()); os._exit(0)
os.wait()
print(json.dumps({"outcome": os.read(read, 4096).decode(), "still": left() == [data.payload.name]}))
sender.cancel(data); sender.close()
"""
    )
    assert "mmcopy-" in str(result["outcome"])
    assert "65534" in str(result["outcome"])  # who we are; the message also says whose it is
    assert result["still"] is True
