"""The behaviours that TokenSpeed's own tests ask of its handle and its transport, on one rank."""

from __future__ import annotations

import os
import pathlib
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmcopy import ParallelOptions
from mmcopy.errors import ClosedError, PayloadError, SegmentSizeError
from mmcopy.integrations.tokenspeed import EncoderFeatureTransport, ShmTensorHandle
from mmcopy.receive.group import Strategy
from tests.rigs.arrays import MIB

Added = Callable[[], list[str]]


def named(added: list[str]) -> list[str]:
    return [name for name in added if not name.endswith(".lock")]


@pytest.fixture(scope="module", autouse=True)
def our_own_lock() -> None:
    """The process's own lock file stays as long as the process: it is there before the first test."""
    ShmTensorHandle.publish(torch.zeros(1)).release()


@pytest.fixture
def left(segments: Added) -> Callable[[], list[str]]:
    return lambda: named(segments())


def test_a_forked_child_takes_no_segment_of_its_parents(left: Callable[[], list[str]]) -> None:
    published, attached = (ShmTensorHandle.publish(torch.arange(n)) for n in (3, 4))
    attached.attach()
    child = os.fork()
    if child == 0:
        problems = 0
        for call in (published.attach, published.try_attach, attached.consume):
            try:
                call()
                problems += 1
            except ClosedError:
                pass
        published.release()
        attached.release()
        os._exit(problems)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sorted(left()) == sorted([published.shm_name, attached.shm_name])
    for handle, count in ((published, 3), (attached, 4)):
        handle.attach()
        assert handle.consume().tolist() == list(range(count))


SOURCES = [
    torch.arange(24, dtype=torch.int32).reshape(2, 3, 4),
    torch.rand(5, 7).t(),
    torch.tensor(3.5, dtype=torch.bfloat16),
    torch.zeros(0, 4, dtype=torch.float16),
    torch.tensor([True, False]),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: f"{s.dtype}{list(s.shape)}")
def test_consume_has_the_tensor_and_releases(source: torch.Tensor, left: Callable[[], list[str]]) -> None:
    handle = ShmTensorHandle.publish(source)
    assert left() == [handle.shm_name]
    assert handle.nbytes() == source.numel() * source.element_size()
    handle.attach()
    handle.attach()
    got = handle.consume()
    assert (got.dtype, got.shape) == (source.dtype, source.shape)
    assert torch.equal(got, source)
    assert left() == []
    handle.release()
    with pytest.raises(RuntimeError, match=r"call attach\(\) first"):
        handle.consume()


def test_copy_to_pinned_keeps_the_segment_until_release(left: Callable[[], list[str]]) -> None:
    handle = ShmTensorHandle.publish(SOURCES[0])
    handle.attach()
    first, second = handle.copy_to_pinned(), handle.copy_to_pinned()
    assert torch.equal(first, SOURCES[0])
    assert torch.equal(second, SOURCES[0])
    assert first.is_pinned() == torch.cuda.is_available()
    assert left() == [handle.shm_name]
    handle.release()
    assert left() == []
    assert torch.equal(first, SOURCES[0])


@pytest.mark.parametrize("strided", [False, True])
def test_copy_into_reshapes_byte_for_byte_and_releases(strided: bool, left: Callable[[], list[str]]) -> None:
    handle = ShmTensorHandle.publish(SOURCES[0])
    handle.attach()
    destination = torch.zeros(6, 8, dtype=torch.int32)[:, ::2] if strided else torch.zeros(6, 4, dtype=torch.int32)
    handle.copy_into(destination)
    assert torch.equal(destination, SOURCES[0].reshape(6, 4))
    assert left() == []


@pytest.mark.parametrize(
    ("destination", "message"),
    [(torch.zeros(24), "dtypes differ"), (torch.zeros(23, dtype=torch.int32), "shapes differ")],
)
def test_copy_into_another_kind_is_an_error_and_releases(
    destination: torch.Tensor, message: str, left: Callable[[], list[str]]
) -> None:
    handle = ShmTensorHandle.publish(SOURCES[0])
    handle.attach()
    with pytest.raises(ValueError, match=message):
        handle.copy_into(destination)
    assert left() == []
    assert not destination.any()


def test_copy_bytes_into(left: Callable[[], list[str]]) -> None:
    handle = ShmTensorHandle.publish(SOURCES[0])
    with pytest.raises(RuntimeError, match="not attached"):
        handle.copy_bytes_into(torch.zeros(96, dtype=torch.uint8))
    handle.attach()
    got = torch.zeros(96, dtype=torch.uint8)
    handle.copy_bytes_into(got)
    assert torch.equal(got.view(torch.int32).reshape(2, 3, 4), SOURCES[0])
    for bad in (torch.zeros(95, dtype=torch.uint8), torch.zeros(96, dtype=torch.int8)):
        with pytest.raises(ValueError, match="want 96 contiguous elements"):
            handle.copy_bytes_into(bad)
    assert left() == [handle.shm_name]
    handle.release()


def test_losing_the_race_to_remove_it_is_fine(left: Callable[[], list[str]]) -> None:
    """Two ranks of one host, both attached before either removes it."""
    one = ShmTensorHandle.publish(SOURCES[0])
    other = pickle.loads(pickle.dumps(one))
    assert (other.shm_name, other.shape, other.dtype) == (one.shm_name, one.shape, one.dtype)
    one.attach()
    other.attach()
    assert torch.equal(one.consume(), SOURCES[0])
    assert left() == []
    assert torch.equal(other.consume(), SOURCES[0])


def test_what_is_not_there(left: Callable[[], list[str]]) -> None:
    gone = ShmTensorHandle("smg-tokenspeed-gone", (4,), torch.uint8)
    assert gone.try_attach() is False
    with pytest.raises(FileNotFoundError):
        gone.attach()
    gone.release()
    handle = ShmTensorHandle.publish(torch.zeros(3, dtype=torch.uint8))
    long = ShmTensorHandle(handle.shm_name, (4,), torch.uint8)
    with pytest.raises(SegmentSizeError):
        long.try_attach()
    assert left() == [handle.shm_name]
    long.release()
    assert left() == []


def test_another_programs_files_are_left_alone(tmp_path: pathlib.Path) -> None:
    foreign = pathlib.Path("/dev/shm/foreign-to-mmcopy")
    foreign.write_bytes(b"1234")
    try:
        handle = ShmTensorHandle(foreign.name, (4,), torch.uint8)
        with pytest.raises(PayloadError, match="is refused"):
            handle.attach()
        handle.release()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_nothing_of_a_publisher_that_ends_is_left(segments: Added) -> None:
    script = (
        "import torch; from mmcopy.integrations.tokenspeed import ShmTensorHandle as H;"
        "h = H.publish(torch.ones(9)); h.release()"
    )
    before = segments()
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert segments() == before


def item(nbytes: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    handle = ShmTensorHandle("smg-tokenspeed-unused", (nbytes // dtype.itemsize,), dtype)
    return SimpleNamespace(feature=None, feature_shm=handle)


@pytest.mark.parametrize(
    ("size", "items", "strategy"),
    [
        (2, [item(128 * MIB)], "broadcast"),
        (2, [item(128 * MIB - 2)], "each"),
        (4, [item(8 * MIB) for _ in range(8)], "broadcast"),
        (4, [item(32 * MIB), item(32 * MIB, torch.float16)], "each"),
        (4, [item(64 * MIB), SimpleNamespace(feature=torch.empty(1), feature_shm=None)], "each"),
    ],
)
def test_the_choice_of_tokenspeed(size: int, items: list[Any], strategy: str) -> None:
    transport = EncoderFeatureTransport(parallel=ParallelOptions(scatter_min_bytes=1 << 60))
    assert transport.strategy_for(items, size) is Strategy(strategy)
    transport.close()


@pytest.fixture
def transport() -> Any:
    transport = EncoderFeatureTransport()
    yield transport
    transport.close()
    transport.close()


def test_features_of_all_kinds_move(transport: Any, left: Callable[[], list[str]]) -> None:
    items = [SimpleNamespace(feature=None, feature_shm=ShmTensorHandle.publish(source)) for source in SOURCES]
    there = torch.ones(3)
    items += [SimpleNamespace(feature=there, feature_shm=None), SimpleNamespace(feature=None, feature_shm=None)]
    for each in items:
        if each.feature_shm is not None:
            each.feature_shm.attach()
    transport.move_to_device(items, "cpu")
    assert left() == []
    assert [each.feature_shm for each in items] == [None] * len(items)
    for each, source in zip(items, SOURCES, strict=False):
        assert (each.feature.dtype, each.feature.shape) == (source.dtype, source.shape)
        assert torch.equal(each.feature, source)
    assert items[-2].feature is there
    assert items[-1].feature is None
    transport.move_to_device([], "cpu")


def test_a_handle_that_is_not_attached_is_an_error_and_all_are_released(
    transport: Any, left: Callable[[], list[str]]
) -> None:
    items = [SimpleNamespace(feature=None, feature_shm=ShmTensorHandle.publish(source)) for source in SOURCES]
    items[0].feature_shm.attach()
    with pytest.raises(RuntimeError, match=r"is not attached on this rank: call attach\(\)"):
        transport.move_to_device(items, "cpu")
    assert left() == []
    assert [each.feature_shm for each in items] == [None] * len(items)
    with pytest.raises(RuntimeError):
        transport.move_to_device([SimpleNamespace(feature=None, feature_shm=item(4).feature_shm)], "nowhere:0")


def test_routing_without_anything_apart_does_nothing(transport: Any) -> None:
    handle = ShmTensorHandle("smg-tokenspeed-unused", (4,), torch.uint8)
    transport.route_to_item_owners([SimpleNamespace(feature=None, feature_shm=None)], [[0]])
    handle.set_reachability((0, 1), 2)
    assert (handle.is_cross_node, handle.source_rank) == (False, 0)
    transport.route_to_item_owners([SimpleNamespace(feature=None, feature_shm=handle)], [[0]])
    handle.set_reachability((1,), 2)
    assert (handle.is_cross_node, handle.source_rank, handle.is_reachable_from(0)) == (True, 1, False)
    with pytest.raises(RuntimeError, match="needs dp_cpu_group"):
        transport.route_to_item_owners([SimpleNamespace(feature=None, feature_shm=handle)], [[0]])
    for ranks in ((), (1, 1), (0, 1, 2)):
        with pytest.raises(ValueError, match="of a group of 2"):
            handle.set_reachability(ranks, 2)


def test_a_batch_that_was_moved_is_not_kept(transport: Any, left: Callable[[], list[str]]) -> None:
    """Not until the next one either: on a GPU it is the memory of a whole batch."""
    handle = ShmTensorHandle.publish(torch.rand(1000))
    handle.attach()
    items = [SimpleNamespace(feature=None, feature_shm=handle)]
    transport.move_to_device(items, "cpu")
    feature = weakref.ref(items[0].feature)
    del items
    assert feature() is None
    assert left() == []


def test_an_empty_tensor_of_another_host_is_there_for_every_call() -> None:
    """Nobody sends what is empty."""
    handle = ShmTensorHandle("smg-tokenspeed-elsewhere", (0, 3), torch.float32)
    handle.set_reachability((1,), 2)
    assert handle.consume().shape == (0, 3)
    handle.copy_into(torch.empty(0, 3))
    with pytest.raises(ValueError, match="dtypes differ"):
        handle.copy_into(torch.empty(0, 3, dtype=torch.int8))


def test_owners_of_items_that_are_not_there() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        handle = ShmTensorHandle("smg-tokenspeed-elsewhere", (0, 3), torch.float32)
        handle.set_reachability((1,), 2)
        items = [SimpleNamespace(feature=None, feature_shm=handle)]
        transport = EncoderFeatureTransport(dp_cpu_group=dist.group.WORLD)
        for index in (1, -1):
            with pytest.raises(ValueError, match=rf"rank 0 owns the items \[0, {index}\], want some of 0 to 0"):
                transport.route_to_item_owners(items, [[0, index]])
        transport.close()
        del transport
    finally:
        dist.destroy_process_group()
