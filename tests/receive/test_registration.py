"""Registering in parts, and copies that are cut where the parts meet."""

from __future__ import annotations

import pytest

from mmcopy.receive.cuda import registration

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
