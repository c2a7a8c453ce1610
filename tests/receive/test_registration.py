"""Registering in parts, and copies that are cut where the parts meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcopy.receive.cuda import registration
from mmcopy.receive.in_place import Run

PART = 4096
BASE = 10 * PART + 512


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "PART_BYTES", PART)


class Runtime:
    """Keeps what is registered, refuses what CUDA refuses, and one call of its own."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self, refuse_at: int | None = None) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refuse_at = refuse_at

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        assert flags == 8
        if self.calls == self.refuse_at:
            raise self.CUDARuntimeError("no more")
        self.calls += 1
        for start, length in self.registered.items():
            if address < start + length and start < address + nbytes:
                raise self.CUDARuntimeError("registered already")
        self.registered[address] = nbytes

    def hostUnregister(self, address: int) -> None:
        if self.registered.pop(address, None) is None:
            raise self.CUDARuntimeError("not registered")

    def copy(self, run: Run) -> None:
        """A copy's source has to lie in one registration."""
        if not any(a <= run.source and run.source + run.nbytes <= a + n for a, n in self.registered.items()):
            raise self.CUDARuntimeError("invalid argument")


@given(start=st.integers(0, 5 * PART), nbytes=st.integers(1, 5 * PART), dest=st.integers(0, 1 << 40))
def test_split_copies_can_be_made_and_are_the_same_bytes(start: int, nbytes: int, dest: int) -> None:
    runtime = Runtime()
    parts = registration.register(runtime, BASE, 10 * PART, 8, should_stop=lambda: False)
    assert sum(length for _, length in parts) == 10 * PART
    whole = Run(dest, BASE + start, nbytes)
    pieces = registration.split_runs([whole])
    at = 0
    for piece in pieces:
        runtime.copy(piece)
        assert (piece.dest, piece.source) == (dest + at, whole.source + at)
        at += piece.nbytes
    assert at == nbytes
    if len(pieces) > 1:
        with pytest.raises(Runtime.CUDARuntimeError):
            runtime.copy(whole)
    registration.unregister(runtime, parts)
    assert not runtime.registered


def test_only_what_has_to_be_cut_is_cut() -> None:
    inside = Run(5, 20 * PART, PART)
    runs = [inside, Run(90000, 21 * PART - 1, 2)]
    assert registration.split_runs([inside]) == [inside]
    assert registration.split_runs(runs) == [inside, Run(90000, 21 * PART - 1, 1), Run(90001, 21 * PART, 1)]


@pytest.mark.parametrize("refuse_at", [0, 1, 5])
def test_a_refusal_leaves_nothing_registered(refuse_at: int) -> None:
    runtime = Runtime(refuse_at)
    with pytest.raises(Runtime.CUDARuntimeError, match="no more"):
        registration.register(runtime, BASE, 10 * PART, 8, should_stop=lambda: False)
    assert runtime.calls == refuse_at
    assert not runtime.registered


def test_who_has_to_stop_waits_for_one_part() -> None:
    runtime = Runtime()
    assert registration.register(runtime, BASE, 10 * PART, 8, should_stop=lambda: runtime.calls == 3) == []
    assert runtime.calls == 3
    assert not runtime.registered
