"""``mmcopy bench e2e``: two processes a path, the bytes that are checked, and what is left when one of them fails."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from mmcopy.errors import DeviceError, MmcopyError, MmcopyTimeoutError
from mmcopy.tools.bench import slots
from mmcopy.tools.bench.child import Child, PeerError
from mmcopy.tools.bench.e2e import run_e2e
from mmcopy.tools.bench.e2e_paths import E2ePath, e2e_paths
from mmcopy.tools.bench.load import BytesDifferError
from mmcopy.tools.bench.pair import Pair
from mmcopy.tools.bench.paths import Role
from mmcopy.tools.bench.peer import Peer, Receive, Receiving, Setup, digest
from mmcopy.tools.bench.plan import Case, Effort, turn_of
from mmcopy.tools.bench.slots import SlotReader, Slots, SlotWriter
from mmcopy.tools.cli import main
from tests.rigs.arrays import random_bytes
from tests.rigs.waiting import settle

Added = Callable[[], list[str]]
SETUP = Setup("cpu", num_threads=1, room_bytes=1 << 20)
OURS_AND_BASELINES = ["lease", "lease_streamed", "segment", "torch_slots", "shared_memory_staged", "inline"]


def named(name: str, device: str = "cpu") -> E2ePath:
    return next(path for path in e2e_paths(device) if path.name == name)


def check_records(said: str, limit: str, case: tuple[int, int]) -> None:
    rows = json.loads(said)
    assert [row["path"] for row in rows] == [limit, *OURS_AND_BASELINES]
    fastest = max(row["gbps"] for row in rows[4:])
    for row in rows:
        assert (row["nbytes"], row["count"]) == case
        assert row["gbps"] == pytest.approx(case[0] * case[1] / row["median_s"] / 1e9)
        assert row["versus"] == pytest.approx(row["gbps"] / fastest)
        assert 0 < row["receive_s"] <= row["median_s"]
        assert row["consumer_cpu_s_per_gib"] >= 0


def test_every_path_is_right_and_leaves_nothing(capfd: pytest.CaptureFixture[str], segments: Added) -> None:
    pytest.importorskip("torch")
    options = ["--sizes", "none", "--batches", "3x4097", "--repeats", "3", "--threads", "1"]
    assert main(["bench", "e2e", *options, "--json"]) == 0
    said = capfd.readouterr()
    check_records(said.out, "memcpy", (4097, 3))
    assert "end to end" in said.err
    assert "3 x 4.0 KiB: deliveries 21" in said.err


@contextlib.contextmanager
def receive_with_a_wrong_byte(setup: Setup) -> Iterator[Receiving]:
    with named("inline").receiving(setup) as real:

        def receive(message: Any) -> Sequence[Any]:
            arrays = list(real.receive(message))
            arrays[-1] = arrays[-1].copy()
            arrays[-1][7] ^= 1
            return arrays

        yield Receiving(receive)


@contextlib.contextmanager
def receive_the_first_message_again(setup: Setup) -> Iterator[Receiving]:
    with named("inline").receiving(setup) as real:
        messages: list[Any] = []

        def receive(message: Any) -> Sequence[Any]:
            messages.append(message)
            return real.receive(messages[0])

        yield Receiving(receive)


@pytest.mark.parametrize("receiving", [receive_with_a_wrong_byte, receive_the_first_message_again])
def test_a_path_that_delivers_wrong_bytes_ends_it(
    receiving: Callable[[Setup], contextlib.AbstractContextManager[Receiving]], segments: Added
) -> None:
    broken = E2ePath("broken", Role.BASELINE, named("inline").sending, receiving)
    cases = [Case(4096), Case(4096, 2)]
    with pytest.raises(
        BytesDifferError, match=r"broken, .*4 KiB: \d+ bytes with digest \w+ arrived, \d+ with \w+ were"
    ):
        run_e2e(cases, effort=Effort(repeats=1), paths=[named("memcpy"), named("lease"), broken], num_threads=1)


def test_a_device_that_is_none_is_refused(segments: Added) -> None:
    with pytest.raises(DeviceError, match="device is 'gpu', want 'cpu' or 'cuda:N'"):
        run_e2e([Case(4096)], device="gpu", effort=Effort(repeats=1))


@pytest.mark.parametrize("name", ["lease", "segment", "torch_slots"])
def test_it_ends_when_its_receiving_process_is_killed(name: str, segments: Added) -> None:
    if name == "torch_slots":
        pytest.importorskip("torch")
    with Pair(named(name), SETUP) as pair:
        pair.ready()
        pair.begin_case(Case(4096), seed=1)
        pair.answer()
        pair.check()
        receiving = child_of(pair.pid)
        os.kill(receiving, signal.SIGKILL)
        with pytest.raises(MmcopyError, match=r"the receiving process|a worker took none"):
            pair.deliver(untimed=0, timed=1)


def test_the_receiving_process_ends_with_its_sender(segments: Added) -> None:
    with Pair(named("memcpy"), SETUP) as pair:
        pair.ready()
        receiving = child_of(pair.pid)
        os.kill(pair.pid, signal.SIGKILL)
        with pytest.raises(PeerError, match="the sending process"):
            pair.check()
        assert settle(lambda: not pathlib.Path(f"/proc/{receiving}/cmdline").exists())


def child_of(pid: int) -> int:
    """The one process that ``pid`` started to receive; spawn starts a resource tracker as well."""
    children = [int(each) for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    (found,) = [each for each in children if b"spawn_main" in pathlib.Path(f"/proc/{each}/cmdline").read_bytes()]
    return found


def test_what_the_receiving_process_could_not_do_is_raised_here(segments: Added) -> None:
    with Peer(named("shared_memory_staged").receiving, SETUP) as peer:
        with pytest.raises(PeerError, match="FileNotFoundError"):
            peer.ask(Receive([("smg-tokenspeed-none", 4096)]))
        (data,) = named_shared_memory([b"abc"])
        assert peer.ask(Receive([data], check=True)).digest == digest([b"abc"])


def named_shared_memory(contents: Sequence[bytes]) -> list[tuple[str, int]]:
    from mmcopy.tools.bench.baselines import publish_shared_memory

    return publish_shared_memory([np.frombuffer(each, np.uint8) for each in contents])


def answers_nothing(connection: Any) -> None:
    connection.recv()


def test_an_answer_that_does_not_come_is_an_error() -> None:
    with (
        Child(answers_nothing, name="a silent process") as child,
        pytest.raises(PeerError, match=r"a silent process did not answer within 0.05 s"),
    ):
        child.answer(0.05)


@pytest.mark.parametrize(
    ("case", "turn"),
    [
        (Case(64 << 10), (1, 7)),
        (Case(16 << 20), (1, 7)),
        (Case(16 << 20, 8), (1, 3)),
        (Case(256 << 20), (1, 1)),
        (Case(1 << 30), (0, 1)),
    ],
)
def test_small_cases_are_delivered_back_to_back(case: Case, turn: tuple[int, int]) -> None:
    assert turn_of(case) == turn


def test_slots_are_given_back_and_used_again(nothing_left_open: None) -> None:
    pytest.importorskip("torch")
    with contextlib.closing(SlotWriter(1 << 20)) as writer, contextlib.closing(SlotReader("cpu")) as reader:
        for round_ in range(3):
            parts = [random_bytes(n, round_ + n) for n in (4097, 1, 8192)]
            message = writer.write(parts)
            assert message.slot_bytes == 8192
            arrays = reader.receive(message)
            reader.settle()
            writer.settle(message)
            assert [np.asarray(each).tobytes() for each in arrays] == [part.tobytes() for part in parts]


def test_a_slot_that_is_not_given_back_is_waited_for_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(slots, "FREE_LIMIT_S", 0.02)
    with contextlib.closing(SlotWriter(1 << 20)) as writer:
        message: Slots = writer.write([random_bytes(100)])
        with pytest.raises(MmcopyTimeoutError, match=r"slot 0 was not given back within 0.02 s"):
            writer.write([random_bytes(100)])
        writer.cancel(message)
        writer.write([random_bytes(100)])


@pytest.mark.gpu
def test_on_a_gpu_every_path_is_right(capfd: pytest.CaptureFixture[str], segments: Added) -> None:
    options = ["--sizes", "1MiB", "--batches", "none", "--repeats", "3", "--device", "cuda:0"]
    assert main(["bench", "e2e", *options, "--json"]) == 0
    check_records(capfd.readouterr().out, "pinned_h2d", (1 << 20, 1))
