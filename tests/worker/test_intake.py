"""The receiving threads by themselves, with no gRPC around them."""

from __future__ import annotations

import asyncio
import logging
import pathlib
import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from mmcopy import Receiver, ShmHandle, TensorData
from mmcopy.errors import MmcopyTimeoutError
from mmcopy.integrations.smg.intake import Intake
from tests.rigs.smg_rig import Gate, SegmentMaker, cpu_receiver, run, until

pytestmark = pytest.mark.usefixtures("nothing_left_open")


def intake_of(receiver: Receiver, *, num_threads: int = 2, timeout_s: float = 30.0) -> Intake:
    return Intake(receiver.receive, receiver.release, num_threads=num_threads, timeout_s=timeout_s)


def new_tensor(maker: SegmentMaker, nbytes: int = 4096) -> TensorData:
    return TensorData("uint8", (nbytes,), ShmHandle(maker.new(nbytes)[0], 0, nbytes))


def handles_of(data: dict[str, TensorData]) -> list[ShmHandle]:
    return [item.payload for item in data.values() if isinstance(item.payload, ShmHandle)]


@pytest.mark.parametrize("seed", range(4))
def test_cancelled_at_any_moment_nothing_is_left(shm_dir: pathlib.Path, seed: int) -> None:
    maker, dice = SegmentMaker(shm_dir), random.Random(seed)

    async def test(intake: Intake) -> list[str]:
        async def one(name: str) -> str:
            data = {f"{name}.{i}": new_tensor(maker) for i in range(3)}
            task = asyncio.create_task(intake.receive(name, handles_of(data), lambda: data))
            if dice.random() < 0.7:
                await asyncio.sleep(dice.choice([0, dice.random() * 0.004]))
                task.cancel()
            try:
                received = await task
            except asyncio.CancelledError:
                return "cancelled"
            assert received.tensors.keys() == data.keys()
            return "received"

        outcomes = await asyncio.gather(*(one(f"r{i}") for i in range(150)))
        assert await intake.close(10.0) == 0
        return outcomes

    with cpu_receiver(shm_dir) as receiver:
        outcomes = run(test(intake_of(receiver)))
        assert set(outcomes) == {"cancelled", "received"}
        assert maker.names() == []


def test_threads_are_bounded(shm_dir: pathlib.Path) -> None:
    maker, gate, names = SegmentMaker(shm_dir), Gate(), set()

    async def test(receiver: Receiver) -> None:
        def receive(data: Any) -> Any:
            names.add(threading.current_thread().name)
            gate.pass_through()
            return receiver.receive(data)

        intake = Intake(receive, receiver.release, num_threads=3, timeout_s=30.0)
        requests = [{"t": new_tensor(maker)} for _ in range(10)]
        tasks = [
            asyncio.create_task(intake.receive("r", handles_of(data), lambda data=data: data)) for data in requests
        ]
        await until(lambda: len(names) == 3)
        gate.open()
        await asyncio.gather(*tasks)
        assert await intake.close(10.0) == 0

    with cpu_receiver(shm_dir) as receiver:
        run(test(receiver))
    assert len(names) == 3
    assert all(name.startswith("mmcopy-receive") for name in names)


def test_reading_that_fails_releases(shm_dir: pathlib.Path) -> None:
    maker = SegmentMaker(shm_dir)

    def read() -> dict[str, TensorData]:
        raise ValueError("not a tensor")

    async def test(intake: Intake) -> None:
        with pytest.raises(ValueError, match="not a tensor"):
            await intake.receive("r", [ShmHandle(maker.new(8)[0], 0, 8) for _ in range(2)], read)
        assert maker.names() == []
        await intake.close(10.0)

    with cpu_receiver(shm_dir) as receiver:
        run(test(intake_of(receiver)))


def test_release_ends_although_its_caller_is_cancelled(shm_dir: pathlib.Path) -> None:
    maker, gate = SegmentMaker(shm_dir), Gate()

    async def test(receiver: Receiver) -> None:
        def release(handles: Sequence[ShmHandle]) -> None:
            gate.pass_through()
            receiver.release(handles)

        intake = Intake(receiver.receive, release, num_threads=1, timeout_s=30.0)
        task = asyncio.create_task(intake.release([ShmHandle(maker.new(8)[0], 0, 8)]))
        await until(gate.arrived.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(maker.names()) == 1
        gate.open()
        assert await intake.close(10.0) == 0
        assert maker.names() == []

    with cpu_receiver(shm_dir) as receiver:
        run(test(receiver))


def test_a_release_that_fails_is_logged(shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    def release(_: Sequence[ShmHandle]) -> None:
        raise OSError("no")

    async def test(receiver: Receiver) -> None:
        intake = Intake(receiver.receive, release, num_threads=1, timeout_s=30.0)
        await intake.release([ShmHandle("smg-tokenspeed-gone", 0, 8)])
        assert await intake.close(10.0) == 0

    with cpu_receiver(shm_dir) as receiver:
        run(test(receiver))
    assert "could not release 'smg-tokenspeed-gone'" in caplog.text
    assert caplog.records[0].levelno == logging.ERROR


def test_close_has_a_limit(shm_dir: pathlib.Path) -> None:
    maker, gate = SegmentMaker(shm_dir), Gate()

    async def test(receiver: Receiver) -> None:
        def receive(data: Any) -> Any:
            gate.pass_through()
            return receiver.receive(data)

        intake = Intake(receive, receiver.release, num_threads=1, timeout_s=0.05)
        running, queued = {"t": new_tensor(maker)}, {"t": new_tensor(maker)}
        calls = [asyncio.create_task(intake.receive("r", handles_of(d), lambda d=d: d)) for d in (running, queued)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [MmcopyTimeoutError] * 2
        assert await intake.close(0.05) == 1
        gate.open()
        await until(lambda: maker.names() == [])

    with cpu_receiver(shm_dir) as receiver:
        run(test(receiver))


def test_close_without_work_starts_no_thread(shm_dir: pathlib.Path) -> None:
    before = threading.active_count()

    async def test(intake: Intake) -> None:
        assert await intake.close(10.0) == 0
        assert threading.active_count() == before

    with cpu_receiver(shm_dir) as receiver:
        run(test(intake_of(receiver)))
