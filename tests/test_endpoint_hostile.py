"""Peers that break the protocol: each costs its own connection and nothing else."""

from __future__ import annotations

import array
import os
import pathlib
import random
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mmcopy.endpoint import SenderLink, WorkerEndpoint
from mmcopy.errors import EndpointError, EndpointRefusedError

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
