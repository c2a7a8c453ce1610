"""The check before the timing, the turns, and what is left in /dev/shm whatever happens."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import mmcopy.tools.bench.load
import mmcopy.tools.bench.paths
from mmcopy import Receiver, Sender, TransportConfig
from mmcopy.errors import NoSpaceError
from mmcopy.tools.bench.load import BytesDifferError, Load
from mmcopy.tools.bench.paths import LeftBehindError, Path, Role, Segments, h2d_paths
from mmcopy.tools.bench.place import HostPlace
from mmcopy.tools.bench.plan import Case, Effort
from mmcopy.tools.bench.timing import measure

Added = Callable[[], list[str]]


@pytest.fixture
def load() -> Load:
    return Load(Case(5000, 3), HostPlace())


@pytest.fixture
def sender(segments: Added) -> Iterator[Sender]:
    with Sender(TransportConfig(mode="shm", shm_min_bytes=0)) as sender:
        yield sender


@pytest.fixture
def published(load: Load, sender: Sender) -> Segments:
    return Segments(sender, load, shm_dir="/dev/shm")


def segment_files(segments: Added) -> list[str]:
    return [name for name in segments() if not name.endswith(".lock")]


def broken(published: Segments, receive: Callable[[Any], Sequence[Any]]) -> Path:
    return Path("broken", Role.BASELINE, published.publish, receive, published.settle, published.cancel)


def test_every_path_delivers_the_bytes_and_leaves_no_segment(load: Load, sender: Sender, segments: Added) -> None:
    with Receiver("cpu", framework="numpy") as receiver:
        paths = h2d_paths(load, sender, receiver, shm_dir="/dev/shm")
        assert [(path.name, path.role.value) for path in paths] == [
            ("memcpy", "limit"),
            ("segment", "ours"),
            ("shared_memory_staged", "baseline"),
            ("inline", "baseline"),
        ]
        seconds = measure(paths, load, Effort(repeats=2))
    assert {name: len(values) for name, values in seconds.items()} == {path.name: 2 for path in paths}
    assert min(min(values) for values in seconds.values()) > 0
    assert segment_files(segments) == []


def test_plain_code_reads_the_mapping_too(load: Load, published: Segments, segments: Added) -> None:
    place, sent = load.place, published.publish()
    names = mmcopy.tools.bench.paths.named(sent)
    assert len(segment_files(segments)) == 3
    load.check(mmcopy.tools.bench.paths.baselines.pageable(place, names, shm_dir="/dev/shm"), path="pageable")
    assert segment_files(segments) == []


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda arrays: [arrays[0], arrays[1] ^ (np.arange(5000) == 4321).astype(np.uint8), arrays[2]],
         r"broken, 3 x 4.9 KiB: 1 of 5000 bytes of tensor 1 differ; the first is byte 4321, found \d+, want \d+"),
        (lambda arrays: arrays[:2], "10000 bytes arrived, 15000 were sent"),
        (lambda arrays: [*arrays, arrays[0]], "20000 bytes arrived, 15000 were sent"),
        (lambda arrays: [*arrays[:2], arrays[2][:-1]], "14999 bytes arrived, 15000 were sent"),
        (lambda arrays: [arrays[1], arrays[0], arrays[2]], "of tensor 0 differ"),
        (lambda arrays: [], "0 bytes arrived"),
    ],
)  # fmt: skip
def test_wrong_bytes_stop_everything_before_it_is_timed(
    load: Load,
    published: Segments,
    segments: Added,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Any], Any],
    told: str,
) -> None:
    monkeypatch.setattr(mmcopy.tools.bench.load, "BLOCK_BYTES", 1024)
    calls = 0

    def receive(sent: Any) -> Any:
        nonlocal calls
        calls += 1
        with Receiver("cpu", framework="numpy") as receiver:
            return spoil(receiver.receive(sent))

    with pytest.raises(BytesDifferError, match=told):
        measure([broken(published, receive)], load, Effort(repeats=3))
    assert calls == 1
    assert segment_files(segments) == []


def test_bytes_that_another_path_delivered_before_do_not_pass(load: Load, published: Segments) -> None:
    kept: list[Any] = []

    def keep(_message: None) -> list[Any]:
        kept[:] = [part.copy() for part in load.parts]
        return kept

    first = Path("keeps", Role.LIMIT, lambda: None, keep)
    with Receiver("cpu", framework="numpy") as receiver:

        def stale(sent: Any) -> list[Any]:
            receiver.receive(sent)
            return kept

        with pytest.raises(BytesDifferError, match=r"broken, 3 x 4.9 KiB: 5000 of 5000 bytes of tensor 0 differ"):
            measure([first, broken(published, stale)], load, Effort(repeats=1))


def test_paths_take_turns_and_the_first_place_moves_on(load: Load) -> None:
    order: list[str] = []

    def recorded(name: str) -> Path:
        def receive(_message: None) -> list[Any]:
            order.append(name)
            return [part.copy() for part in load.parts]

        return Path(name, Role.BASELINE, lambda: None, receive)

    seconds = measure([recorded(name) for name in "abc"], load, Effort(repeats=4))
    check, warm_up, rounds = "".join(order[:3]), "".join(order[3:6]), "".join(order[6:])
    assert (check, warm_up, rounds) == ("abc", "abc", "abc" + "bca" + "cab" + "abc")
    assert {name: len(values) for name, values in seconds.items()} == {"a": 4, "b": 4, "c": 4}


def test_a_path_that_leaves_its_segments_is_found_out_and_they_are_removed(
    load: Load, published: Segments, segments: Added, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmcopy.tools.bench.paths, "GONE_LIMIT_S", 0.02)

    def read_only(sent: Any) -> list[Any]:
        assert len(segment_files(segments)) == 3
        return [part.copy() for part in load.parts]

    with pytest.raises(LeftBehindError, match=r"3 segments were not removed within 0.02 s: mmcopy-"):
        measure([broken(published, read_only)], load, Effort(repeats=1))
    assert segment_files(segments) == []


def test_a_path_that_raises_leaves_nothing(load: Load, published: Segments, segments: Added) -> None:
    def fail(sent: Any) -> list[Any]:
        assert len(segment_files(segments)) == 3
        raise OSError("out of luck")

    with pytest.raises(OSError, match="out of luck"):
        measure([broken(published, fail)], load, Effort(repeats=1))
    assert segment_files(segments) == []


@pytest.mark.parametrize("asked", range(1, 13))
def test_an_interruption_at_any_poll_leaves_nothing(load: Load, sender: Sender, segments: Added, asked: int) -> None:
    polls = 0

    def poll() -> None:
        nonlocal polls
        polls += 1
        if polls == asked:
            raise KeyboardInterrupt

    with Receiver("cpu", framework="numpy") as receiver:
        paths = h2d_paths(load, sender, receiver, shm_dir="/dev/shm")
        with pytest.raises(KeyboardInterrupt):
            measure(paths, load, Effort(repeats=1), poll=poll)
    assert polls == asked
    assert segment_files(segments) == []


def test_a_segment_that_had_to_go_inline_is_an_error_with_none_left(load: Load, segments: Added) -> None:
    with Sender(TransportConfig(mode="inline")) as sender:
        with pytest.raises(NoSpaceError, match=r"/dev/shm: segment 1 of 3 x 4.9 KiB could not be written"):
            Segments(sender, load, shm_dir="/dev/shm").publish()
        assert segments() == []


def test_without_the_folder_there_is_no_room(tmp_path: pathlib.Path) -> None:
    assert mmcopy.tools.bench.paths.free_bytes(str(tmp_path)) > 0
    with pytest.raises(NoSpaceError, match="No such file"):
        mmcopy.tools.bench.paths.free_bytes(str(tmp_path / "gone"))
