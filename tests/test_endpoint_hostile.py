"""Peers that break the protocol: each costs its own connection and nothing else."""

from __future__ import annotations

import array
import fcntl
import os
import pathlib
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mmcopy import Receiver, ShmHandle, TensorData, _native
from mmcopy.endpoint import SenderLink, WorkerEndpoint
from mmcopy.errors import EndpointError, EndpointRefusedError

from .rigs.arrays import MIB
from .rigs.waiting import settle

pytestmark = pytest.mark.usefixtures("nothing_left_open")

LIMIT_S = 20.0
HELLO, PROBE, PROBE_REPLY, OFFER, ACCEPTED, REFUSED = range(1, 7)


def frame(kind: int, sequence: int, body: bytes = b"", *, magic: bytes = b"mmcp", version: int = 1) -> bytes:
    return magic + struct.pack("<HHQ", version, kind, sequence) + body


def hello(sequence: int = 1) -> bytes:
    return frame(HELLO, sequence, struct.pack("<Q", 7))


def probe(name: bytes, offset: int = 0, nbytes: int = 4) -> bytes:
    return frame(PROBE, 2, struct.pack("<QIH", offset, nbytes, len(name)) + name)


def reason_of(answer: bytes) -> str:
    """The text of a Refused or of a failed ProbeReply."""
    kind = struct.unpack_from("<H", answer, 6)[0]
    assert kind in (REFUSED, PROBE_REPLY)
    (length,) = struct.unpack_from("<H", answer, 20)
    return answer[22 : 22 + length].decode()


@pytest.fixture
def endpoint(tmp_path: pathlib.Path, shm_dir: pathlib.Path) -> Iterator[WorkerEndpoint]:
    with WorkerEndpoint(tmp_path / "run", shm_dir=shm_dir, hello_timeout_s=LIMIT_S, max_links=1000) as made:
        yield made
        with SenderLink.connect(made.path, timeout_s=LIMIT_S) as link:  # whatever happened, it serves on
            assert link.probe(shm_dir, timeout_s=LIMIT_S)


def connect(endpoint: WorkerEndpoint, *, known: bool = True) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(LIMIT_S)
    peer.connect(endpoint.path)
    if known:
        peer.send(hello())
        assert peer.recv(4096)[6] == HELLO
    return peer


def expect_end(peer: socket.socket) -> str:
    """Why the worker ends this connection; it must."""
    reason = reason_of(peer.recv(4096))
    assert peer.recv(4096) == b""
    return reason


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b"x", "ends within magic"),
        (hello()[:-1], "a frame of 23 bytes ends within instance, at byte 16"),
        (hello() + b"\0", "with 1 bytes too many"),
        (frame(HELLO, 1, bytes(8), magic=b"MMCP"), "begins with"),
        (frame(HELLO, 1, bytes(8), version=2), "version 2, we speak 1"),
        (frame(99, 1), "unknown kind 99"),
        (frame(PROBE_REPLY, 1, struct.pack("<iH", 0, 0)), "ProbeReply from a sender"),
        (frame(ACCEPTED, 1, bytes(8)), "Accepted from a sender"),
        (hello(), "Hello from a sender"),
        (probe(b"mmcopy-0000000000000000-1", nbytes=65), "a probe of 65 bytes, at most 64 are read"),
        (probe(b"\xff"), "name is not UTF-8"),
        (probe(b"x" * 1025), "name of 1025 bytes, at most 1024 allowed"),
        (bytes(2049), "a frame of more than 2048 bytes"),
        (bytes(100_000), "a frame of more than 2048 bytes"),
        (frame(OFFER, 1, bytes(32)), "descriptors were lost on the way: 0 of 4 arrived"),
    ],
)  # fmt: skip
def test_a_bad_frame_ends_the_connection_and_says_why(endpoint: WorkerEndpoint, bad: bytes, reason: str) -> None:
    with connect(endpoint) as bystander, connect(endpoint) as peer:
        peer.send(bad)
        assert reason in expect_end(peer)
        statistics = endpoint.statistics()
        assert statistics["faults"] == 1
        assert reason in str(statistics["last_fault"])
        bystander.send(probe(b"mmcopy-0000000000000000-1"))
        assert "no such segment" in reason_of(bystander.recv(4096))


def test_nothing_is_answered_before_hello(endpoint: WorkerEndpoint) -> None:
    with connect(endpoint, known=False) as peer:
        peer.send(probe(b"mmcopy-0000000000000000-1"))
        assert expect_end(peer) == "protocol error: Probe before Hello"


def test_descriptors_that_do_not_belong_are_closed(endpoint: WorkerEndpoint) -> None:
    read, write = os.pipe()
    for count in (1, 3, 30):
        with connect(endpoint) as peer:
            passed = array.array("i", [write] * count)
            peer.sendmsg([probe(b"mmcopy-0000000000000000-1")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
            reason = expect_end(peer)
            assert f"{count} descriptors, 0 wanted" in reason or "descriptors were lost" in reason
    os.close(write)
    assert os.read(read, 1) == b""  # nobody has the other end open any more
    os.close(read)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"", "it is empty"),
        (b"..", "it names a directory"),
        (b"a/../../etc/passwd", 'it has a "/" inside'),
        (b"mmcopy-\0", "it has a NUL inside"),
        (b"passwd", "it does not begin with a prefix that this worker accepts"),
        (b"smg-tokenspeed-1-2-3", "it does not begin with a prefix"),
        (b"mmcopy-0000000000000001-1", "no such segment"),
        (b"mmcopy-0000000000000002-1", "not a regular file but a FIFO"),
        (b"mmcopy-0000000000000003-1", "not a regular file but a symbolic link"),
        (b"mmcopy-0000000000000004-1", "wanted 4 bytes at offset 0, but the file has 3 bytes"),
    ],
)
def test_a_probe_reads_only_segments(endpoint: WorkerEndpoint, shm_dir: pathlib.Path, name: bytes, reason: str) -> None:
    os.mkfifo(shm_dir / "mmcopy-0000000000000002-1")
    (shm_dir / "mmcopy-0000000000000003-1").symlink_to("/etc/passwd")
    (shm_dir / "mmcopy-0000000000000004-1").write_bytes(b"abc")
    try:
        with connect(endpoint) as peer:
            peer.send(probe(name))
            assert reason in reason_of(peer.recv(4096))
            peer.send(probe(b"mmcopy-0000000000000004-1", offset=2**64 - 1))
            assert "offset 18446744073709551615" in reason_of(peer.recv(4096))
            peer.send(probe(b"mmcopy-0000000000000004-1", offset=1, nbytes=2))
            assert peer.recv(4096)[16:] == struct.pack("<iH", 0, 2) + b"bc"
    finally:
        for path in shm_dir.iterdir():
            path.unlink()


def sealed(content: bytes, nbytes: int, *, reserve: bool = True) -> int:
    """A memfd of so many bytes that begins with ``content`` and can neither shrink nor grow."""
    file = os.memfd_create("offered", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    if reserve:
        os.posix_fallocate(file, 0, nbytes)
    os.pwrite(file, content, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


class Lookalike:
    """Files with which a peer offers an arena under the number of one that exists: its header, other memory."""

    def __init__(self, arena: _native.Arena, *, data_nbytes: int, reserve: bool = True) -> None:
        (control,) = [int(path.name) for path in memfds() if "control" in path.readlink().name]
        self.control_nbytes = os.fstat(control).st_size
        maps = pathlib.Path("/proc/self/maps").read_text()
        found = re.search(r"^(\w+)-(\w+) .*/memfd:mmcopy-arena-flags", maps, re.MULTILINE)
        assert found is not None
        self.flags_nbytes = int(found[2], 16) - int(found[1], 16)
        header = bytearray(os.pread(control, self.control_nbytes, 0))
        at = header.index(struct.pack("<Q", arena.data_nbytes))
        header[at : at + 8] = struct.pack("<Q", data_nbytes)
        pipe, self._write = os.pipe()
        self.files = [
            sealed(b"forged bytes", data_nbytes, reserve=reserve),
            sealed(bytes(header), self.control_nbytes),
            sealed(b"", self.flags_nbytes),
            pipe,
        ]
        self.body = struct.pack(
            "<QQQII",
            int(arena.instance_id, 16),
            data_nbytes,
            self.control_nbytes,
            arena.statistics()["num_leases"],
            1,
        )

    def offer(self, peer: socket.socket) -> bytes:
        passed = array.array("i", self.files)
        peer.sendmsg([frame(OFFER, 9, self.body)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
        return peer.recv(4096)

    def close(self) -> None:
        for file in (*self.files, self._write):
            os.close(file)


def memfds() -> list[pathlib.Path]:
    return [path for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink() and is_memfd(path)]


def is_memfd(path: pathlib.Path) -> bool:
    try:
        return str(path.readlink()).startswith("/memfd:mmcopy-arena")
    except FileNotFoundError:  # the one that lists this directory
        return False


def test_an_arena_keeps_its_number_from_other_memory(endpoint: WorkerEndpoint) -> None:
    """A peer of the same user that offers memory of its own under a gateway's number."""
    arena = _native.Arena(MIB)
    with SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) as link, connect(endpoint) as peer:
        slot = arena.hand_over(link.native, timeout_s=LIMIT_S)
        lookalike = Lookalike(arena, data_nbytes=arena.data_nbytes)
        answer = lookalike.offer(peer)
        assert f"the number {arena.instance_id} is that of another arena, which is mapped here" in reason_of(answer)
        (writer,) = arena.take([4], [slot], timeout_s=LIMIT_S)
        writer.write(b"real")
        writer.commit()
        item = TensorData("uint8", (4,), ShmHandle(writer.name, writer.offset, 4, writer.owner_id))
        with Receiver("cpu", framework="numpy", endpoint=endpoint) as receiver:
            assert receiver.receive(item).tobytes() == b"real"
    lookalike.close()
    arena.close(LIMIT_S)


def test_an_arena_without_memory_behind_it_is_refused(endpoint: WorkerEndpoint) -> None:
    """256 GiB that take no page: a worker on a GPU would pin them."""
    arena = _native.Arena(MIB)
    with SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) as link, connect(endpoint) as peer:
        arena.hand_over(link.native, timeout_s=LIMIT_S)
        lookalike = Lookalike(arena, data_nbytes=256 << 30, reserve=False)
        assert f"data: its file has memory for 4096 of {256 << 30} bytes" in reason_of(lookalike.offer(peer))
    lookalike.close()
    arena.close(LIMIT_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user, which takes root")
def test_a_probe_reads_nothing_of_another_user(endpoint: WorkerEndpoint, shm_dir: pathlib.Path) -> None:
    path = shm_dir / "mmcopy-0000000000000004-1"
    path.write_bytes(b"abcd")
    os.chown(path, 12345, 12345)
    with connect(endpoint) as peer:
        peer.send(probe(b"mmcopy-0000000000000004-1"))
        assert f"{path} belongs to user 12345, and is read for user 0" in reason_of(peer.recv(4096))
    path.unlink()


def test_a_peer_that_takes_no_answers_is_cut_off(endpoint: WorkerEndpoint) -> None:
    with connect(endpoint) as peer:
        peer.setblocking(False)

        def flood() -> None:
            while True:
                try:
                    peer.send(probe(b"mmcopy-0000000000000000-1"))
                except BlockingIOError:
                    peer.settimeout(LIMIT_S)

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            flood()
    assert "does not take its answers" in str(endpoint.statistics()["last_fault"])


def test_a_peer_that_says_nothing_is_cut_off(tmp_path: pathlib.Path) -> None:
    with WorkerEndpoint(tmp_path / "run", hello_timeout_s=0.05) as endpoint, connect(endpoint, known=False) as peer:
        assert peer.recv(4096) == b""
        assert "saying Hello after connecting did not end within 50ms" in str(endpoint.statistics()["last_fault"])


def test_more_links_than_allowed(tmp_path: pathlib.Path) -> None:
    with WorkerEndpoint(tmp_path / "run", max_links=2) as endpoint:
        links = [SenderLink.connect(endpoint.path, timeout_s=LIMIT_S) for _ in range(2)]
        with pytest.raises(EndpointRefusedError, match="2 senders are connected already"):
            SenderLink.connect(endpoint.path, timeout_s=LIMIT_S)
        links.pop().close()
        assert settle(lambda: endpoint.statistics()["links"] == 1)
        links.append(SenderLink.connect(endpoint.path, timeout_s=LIMIT_S))
        for link in links:
            link.close()


def test_random_frames_never_stop_it(endpoint: WorkerEndpoint) -> None:
    chance = random.Random(5)
    for _ in range(300):
        with connect(endpoint, known=chance.random() < 0.5) as peer:
            good = chance.choice(
                [hello(), probe(b"mmcopy-0000000000000000-1"), frame(OFFER, 1, bytes(32)), frame(REFUSED, 3, bytes(6))]
            )
            bad = bytearray(good)
            for _ in range(chance.randrange(4)):
                bad[chance.randrange(len(bad))] = chance.randrange(256)
            peer.send(bad[: chance.randrange(1, len(bad) + 1)])
    assert settle(lambda: endpoint.statistics()["links"] == 0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"junk", "begins with"),
        (frame(ACCEPTED, 1, bytes(8)), "Accepted is no answer"),
        (frame(HELLO, 9, bytes(8)), "Hello answers question 9, of which 1 is the last"),
        (bytes(3000), "more than 2048 bytes"),
    ],
)  # fmt: skip
def test_a_worker_that_breaks_the_protocol(tmp_path: pathlib.Path, answer: bytes, error: str) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.send(answer)
                peer.recv(4096)

        worker = threading.Thread(target=serve)
        worker.start()
        with pytest.raises(EndpointError, match=error):
            SenderLink.connect(path, timeout_s=LIMIT_S)
        worker.join(timeout=LIMIT_S)
        assert not worker.is_alive()
