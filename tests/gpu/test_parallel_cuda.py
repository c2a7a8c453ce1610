"""Groups on GPUs: NCCL with one rank, the edges between the copy stream and the caller's under held streams; and two
ranks where there are two GPUs."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, ParallelOptions, Receiver, Sender, ShmHandle, TensorData, TransportConfig
from mmcopy.errors import SegmentNotFoundError
from mmcopy.receive.staging import StagingOptions
from tests.rigs.arrays import random_bytes
from tests.rigs.ranks import Ranks, as_json, wanted

from .test_receiver_cuda import copy_stream_of, hold, raw

pytestmark = pytest.mark.gpu

ALWAYS = TransportConfig(mode="shm", shm_min_bytes=0)
SLOT = 1 << 20
STRATEGIES = ["each", "broadcast", "scatter"]


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.fixture(params=STRATEGIES)
def receiver(request: pytest.FixtureRequest, world: Any) -> Iterator[Receiver]:
    options = ParallelOptions(strategy=request.param)
    with Receiver(
        "cuda:0", group=world, parallel=options, staging=StagingOptions(4 * SLOT, SLOT), timeout_s=20
    ) as receiver:
        yield receiver


@pytest.fixture
def sender(segments: Callable[[], list[str]]) -> Iterator[Sender]:
    with Sender(ALWAYS) as sender:
        yield sender


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, SLOT - 1, SLOT + 1, 11 * SLOT + 5])
def test_edge_sizes(sender: Sender, receiver: Receiver, nbytes: int) -> None:
    source = random_bytes(nbytes, nbytes)
    for data in (sender.send(source), TensorData("uint8", (nbytes,), Inline(source.tobytes()))):
        assert raw(receiver.receive(data)) == source.tobytes()


def test_mixed_dtypes_in_one_receive(sender: Sender, receiver: Receiver) -> None:
    arrays = {
        "pixels": random_bytes(3 * SLOT + 2, 1).view(np.int16),
        "grid": np.array([[1, 30, 40]]),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 7), np.uint8),
        "odd": random_bytes(1001, 2),
    }
    got = receiver.receive({key: sender.send(value) for key, value in arrays.items()})
    for key, value in arrays.items():
        assert (tuple(got[key].shape), raw(got[key])) == (np.shape(value), np.asarray(value).tobytes())


def test_results_are_ordered_on_the_callers_stream(torch: Any, sender: Sender, receiver: Receiver) -> None:
    """The copy stream is held; the caller queues work on the tensor at once, and that work must see all bytes."""
    stream = torch.cuda.Stream()
    for seed in range(100):
        source = random_bytes(3 * SLOT + seed, seed)
        if seed % 10 == 0:
            hold(torch, copy_stream_of(receiver), 2)
        with torch.cuda.stream(stream):
            tensor = receiver.receive(sender.send(source))
            total = tensor.sum(dtype=torch.int64)
        stream.synchronize()
        assert int(total) == int(source.sum(dtype=np.int64))


def test_the_buffer_is_not_written_under_earlier_work(torch: Any, sender: Sender, receiver: Receiver) -> None:
    """Memory that is freed with work pending on the caller's stream is handed out again: that work must come first."""
    torch.cuda.empty_cache()
    for seed in range(50):
        old = torch.zeros(2 * SLOT + 512, dtype=torch.uint8, device="cuda:0")
        hold(torch, torch.cuda.current_stream(), 2)
        old.fill_(255)
        del old
        source = random_bytes(2 * SLOT, seed)
        assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_a_receive_does_not_wait_for_the_gpu(torch: Any, sender: Sender, receiver: Receiver) -> None:
    """The caller's stream is held for ever longer than the host takes: the call returns while it still runs.

    One chunk: with more of them than slots the copy threads have to wait for the copies, which wait for that stream.
    """
    source = random_bytes(SLOT // 4, 7)
    receiver.receive(sender.send(source))  # the communicator is made with the first collective
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    hold(torch, stream, 2000)
    with torch.cuda.stream(stream):
        tensor = receiver.receive(sender.send(source))
    assert not stream.query()
    stream.synchronize()
    assert raw(tensor) == source.tobytes()


def test_out_is_filled_in_stream_order(torch: Any, sender: Sender, receiver: Receiver) -> None:
    out = [torch.zeros(n, dtype=torch.uint8, device="cuda:0") for n in (100, 3 * SLOT + 5, 0)]
    for round_ in range(10):
        sources = [random_bytes(len(tensor), round_) for tensor in out]
        hold(torch, torch.cuda.current_stream(), 1)
        before = [tensor.clone() for tensor in out]
        wanted_before = [raw(tensor) for tensor in out] if round_ % 5 == 0 else None
        got = receiver.receive([sender.send(source) for source in sources], out=out)
        assert [raw(tensor) for tensor in got] == [source.tobytes() for source in sources]
        if wanted_before is not None:
            assert [raw(tensor) for tensor in before] == wanted_before


def test_errors_leave_nothing_and_the_next_receive_works(sender: Sender, receiver: Receiver) -> None:
    good = sender.send(random_bytes(2 * SLOT, 1))
    with pytest.raises(SegmentNotFoundError):
        receiver.receive([good, TensorData("uint8", (4,), ShmHandle("smg-tokenspeed-missing", 0, 4))])
    source = random_bytes(2 * SLOT, 2)
    assert raw(receiver.receive(sender.send(source))) == source.tobytes()


def test_memory_is_flat_over_many_receives(torch: Any, sender: Sender, receiver: Receiver) -> None:
    sizes = np.random.default_rng(9).integers(1, 2 * SLOT, 600).tolist()
    for n in sizes[:100]:
        receiver.receive(sender.send(np.zeros(n, np.uint8)))
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated(0)
    for n in sizes[100:]:
        receiver.receive(sender.send(np.zeros(n, np.uint8)))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(0) == allocated


def named_files() -> set[str]:
    """Segments in /dev/shm; the lock of this process's publisher stays as long as the process."""
    return {path.name for path in pathlib.Path("/dev/shm").iterdir() if path.suffix != ".lock"}


def test_tokenspeed_features_move(torch: Any) -> None:
    from types import SimpleNamespace

    from mmcopy.integrations.tokenspeed import EncoderFeatureTransport, ShmTensorHandle

    sources = [torch.rand(3, 500_000), torch.arange(6).reshape(2, 3), torch.tensor(1.5)]
    before = named_files()
    transport = EncoderFeatureTransport(staging=StagingOptions(4 * SLOT))
    for _ in range(20):
        items = [SimpleNamespace(feature=None, feature_shm=ShmTensorHandle.publish(source)) for source in sources]
        items.append(SimpleNamespace(feature=torch.ones(5), feature_shm=None))
        for item in items[:3]:
            item.feature_shm.attach()
        transport.move_to_device(items, "cuda:0")
        for item, source in zip(items, [*sources, torch.ones(5)], strict=True):
            assert str(item.feature.device) == "cuda:0"
            assert torch.equal(item.feature.cpu(), source)
    handle = ShmTensorHandle.publish(sources[0])
    handle.attach()
    pinned = handle.copy_to_pinned()
    assert pinned.is_pinned()
    handle.release()
    handle = ShmTensorHandle.publish(sources[0])
    handle.attach()
    destination = torch.zeros(1_500_000, device="cuda:0")
    handle.copy_into(destination)
    assert torch.equal(destination.cpu().reshape(3, -1), sources[0])
    transport.close()
    assert named_files() <= before


# -- two GPUs


@pytest.fixture(scope="module")
def ranks(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = [{"RANK_BACKEND": "cpu:gloo,cuda:nccl"}] * 2
    with Ranks(2, tmp_path_factory.mktemp("ranks"), environment=environment) as ranks:
        for name in STRATEGIES:
            ranks.each(
                [{"do": "make", "name": name, "device": f"cuda:{n}", "parallel": {"strategy": name}} for n in range(2)]
            )
        yield ranks


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_gpus_have_the_same_bytes(ranks: Ranks, sender: Sender, strategy: str) -> None:
    for nbytes in (0, 1, 257, 65_536, SLOT + 1, 64 * SLOT + 3):
        sources = [random_bytes(nbytes, 1), random_bytes(1001, 2)]
        answers = ranks.receive([sender.send(source) for source in sources], receiver=strategy)
        assert [a.get("tensors", a) for a in answers] == [[wanted(source, "uint8") for source in sources]] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_gpus_hundreds_of_times(ranks: Ranks, sender: Sender, strategy: str) -> None:
    for seed in range(150):
        source = random_bytes(seed * 50_021 % (5 * SLOT) + 1, seed)
        answers = ranks.receive([sender.send(source)], receiver=strategy)
        assert [a.get("tensors", a) for a in answers] == [[wanted(source, "uint8")]] * 2


def test_one_gpus_rank_with_other_items(ranks: Ranks, sender: Sender) -> None:
    items = [as_json(sender.send(random_bytes(SLOT, n))) for n in range(2)]
    given = [{"do": "receive", "receiver": "broadcast", "items": each} for each in (items, items[:1])]
    assert [answer["error"] for answer in ranks.each(given)] == ["ParallelMismatchError"] * 2


def test_each_rank_has_a_context_on_its_own_gpu_alone(ranks: Ranks) -> None:
    """A context takes some hundred MiB: more processes a GPU than ranks would show there."""
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    pids = {process.pid for process in ranks.processes}
    seen = [line.split(", ") for line in listed if int(line.split(",")[0]) in pids]
    if not seen:
        pytest.skip("nvidia-smi lists no processes here")
    assert len({(pid, gpu) for pid, gpu in seen}) == 2


def test_a_dying_rank_on_two_gpus(torch: Any, sender: Sender, tmp_path: pathlib.Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = [{"RANK_BACKEND": "cpu:gloo,cuda:nccl"}] * 2
    with Ranks(2, tmp_path, environment=environment) as ranks:
        ranks.each(
            [
                {"do": "make", "name": "it", "device": f"cuda:{n}", "parallel": {"strategy": "scatter"},
                 "options": {"timeout_s": 5}}
                for n in range(2)
            ]
        )  # fmt: skip
        source = random_bytes(8 * SLOT, 1)
        answers = ranks.receive([sender.send(source)], receiver="it")
        assert [answer["tensors"] for answer in answers] == [[wanted(source, "uint8")]] * 2
        given = {"do": "receive", "receiver": "it", "items": [as_json(sender.send(source))]}
        answers = ranks.each([given, {"do": "die", "delay_s": 0.5}])
        assert answers[0]["error"] in ("PeerLostError", "MmcopyTimeoutError")


def test_bench_tp_on_two_gpus(torch: Any, segments: Callable[[], list[str]]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "mmcopy", "bench", "tp", "--device", "cuda", "--ranks", "2"]
    command += ["--sizes", "1MiB,64MiB", "--repeats", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    assert '"ranks": 2' in done.stdout
