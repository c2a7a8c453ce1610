"""Leases on two GPUs that receive together: read where they are, in windows, by the ranks that they are for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mmcopy import Sender, TransportConfig, WorkerSpec
from tests.rigs.arrays import MIB, random_bytes
from tests.rigs.ranks import Ranks, wanted
from tests.rigs.waiting import settle

pytestmark = pytest.mark.gpu

ALWAYS = TransportConfig(mode="auto", shm_min_bytes=1)
STRATEGIES = ["each", "broadcast", "scatter"]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def ranks(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, dict[str, list[WorkerSpec]]]]:
    """The ranks, and by strategy the two workers: an endpoint each, because a process registers a mapping once."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    directory = tmp_path_factory.mktemp("ranks")
    workers: dict[str, list[WorkerSpec]] = {}
    with Ranks(2, directory, environment=[{"RANK_BACKEND": "cpu:gloo,cuda:nccl"}] * 2) as ranks:
        for name in STRATEGIES:
            answers = ranks.each(
                [
                    {"do": "make", "name": name, "device": f"cuda:{n}", "parallel": {"strategy": name},
                     "endpoint": str(directory / f"{name}{n}"), "options": {"timeout_s": 20}}
                    for n in range(2)
                ]
            )  # fmt: skip
            workers[name] = [
                WorkerSpec(f"grpc://127.0.0.1:{n}", labels={"mmcopy_endpoint": answer["endpoint"]})
                for n, answer in enumerate(answers)
            ]
        yield ranks, workers


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("consumers", [[0, 1], [0], [1]])
def test_two_gpus_have_the_same_bytes(
    ranks: tuple[Ranks, dict[str, list[WorkerSpec]]],
    segments: Callable[[], list[str]],
    strategy: str,
    consumers: list[int],
) -> None:
    """Leases for both ranks, or for one of them, which then reads for the other."""
    group, workers = ranks[0], ranks[1][strategy]
    named = [workers[n] for n in consumers]
    with Sender(ALWAYS, arena_bytes=128 * MIB) as sender:
        for worker in workers:
            sender.connect(worker, timeout_s=20)
        for seed in range(30):
            sources = [random_bytes(seed * 1_000_003 % (40 * MIB) + 1, seed), random_bytes(1001, seed)]
            items = sender.send_many(sources, worker=named, consumers=len(named))
            assert {item.path for item in items} == {"lease"}
            answers = group.receive(items, receiver=strategy)
            assert [a.get("tensors", a) for a in answers] == [[wanted(source, "uint8") for source in sources]] * 2
            sending = sender.send_streaming(sources[0], worker=named)
            answers = group.receive([sending.data], receiver=strategy)
            assert [a.get("tensors", a) for a in answers] == [[wanted(sources[0], "uint8")]] * 2
            sending.wait(20)
            assert settle(lambda: sender.leases_out == 0)
    assert segments() == []
