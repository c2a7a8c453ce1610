"""Plans: every byte is copied once, to the right place, in chunks that fit a slot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy.receive.plan import ALIGN_BYTES, CopyPlan, Layout, chunk_bytes_for, extents, pack, plan_chunks, scatter

SIZES = st.lists(st.one_of(st.integers(0, 5000), st.sampled_from([0, 1, 255, 256, 257, 1023, 1024, 1025])), max_size=12)
CHUNKS = st.sampled_from([256, 512, 1024, 4096])


def planned(layout: Layout, *, chunk_bytes: int) -> CopyPlan:
    """Everything staged, in chunks of that size."""
    return CopyPlan((), *plan_chunks(extents(layout), chunk_bytes=chunk_bytes))


def execute(plan: CopyPlan, sources: list[bytes], dests: list[bytearray], *, chunk_bytes: int) -> None:
    """Copy as the plan says, one slot for each chunk, filled with a byte no source has."""
    slots = [bytearray(b"\xff" * chunk_bytes) for _ in range(plan.num_chunks)]
    last = 0
    for fill in plan.fills:
        assert fill.nbytes > 0
        assert fill.chunk >= last, "chunks come in order"
        last = fill.chunk
        part = sources[plan.staged[fill.source]][fill.source_start : fill.source_start + fill.nbytes]
        assert len(part) == fill.nbytes
        slots[fill.chunk][fill.slot_start : fill.slot_start + fill.nbytes] = part
        assert len(slots[fill.chunk]) == chunk_bytes
    for slot, copies in zip(slots, plan.copies, strict=True):
        assert copies
        for dest, dest_start, slot_start, nbytes in copies:
            assert nbytes > 0
            assert slot_start + nbytes <= chunk_bytes
            assert dest_start + nbytes <= len(dests[dest])
            dests[dest][dest_start : dest_start + nbytes] = slot[slot_start : slot_start + nbytes]


def some_bytes(sizes: list[int]) -> list[bytes]:
    return [bytes((7 * n + i) % 251 for i in range(size)) for n, size in enumerate(sizes)]


@given(SIZES, CHUNKS)
@settings(max_examples=200, deadline=None)
def test_packed(sizes: list[int], chunk_bytes: int) -> None:
    sources = some_bytes(sizes)
    layout = pack(tuple(sizes))
    plan = planned(layout, chunk_bytes=chunk_bytes)
    dest = bytearray(layout.nbytes)
    execute(plan, sources, [dest], chunk_bytes=chunk_bytes)
    for start, source in zip(layout.starts, sources, strict=True):
        assert start % ALIGN_BYTES == 0
        assert dest[start : start + len(source)] == source
    assert plan.num_chunks == -(-layout.nbytes // chunk_bytes)
    assert all(len(copies) == 1 for copies in plan.copies)
    assert layout.nbytes < sum(sizes) + ALIGN_BYTES * max(1, len(sizes))


@given(SIZES, CHUNKS)
@settings(max_examples=200, deadline=None)
def test_scattered(sizes: list[int], chunk_bytes: int) -> None:
    sources = some_bytes(sizes)
    plan = planned(scatter(tuple(sizes)), chunk_bytes=chunk_bytes)
    dests = [bytearray(size) for size in sizes]
    execute(plan, sources, dests, chunk_bytes=chunk_bytes)
    assert [bytes(dest) for dest in dests] == sources


def test_many_small_tensors_share_a_slot_and_a_copy() -> None:
    layout = pack((64 << 10,) * 256)
    plan = planned(layout, chunk_bytes=2 << 20)
    assert (plan.num_chunks, len(plan.fills), layout.nbytes) == (8, 256, 16 << 20)


def test_some_tensors_come_first() -> None:
    assert pack((10, 300, 0, 256), (3, 1)).starts == (768, 256, 1024, 0)


@pytest.mark.parametrize(
    ("total", "chunk"),
    [
        (0, 256 << 10),
        (1 << 20, 256 << 10),
        (16 << 20, 512 << 10),
        (64 << 20, 2 << 20),
        (256 << 20, 2 << 20),
        (8 << 30, 2 << 20),
    ],
)
def test_chunk_sizes_follow_what_was_measured(total: int, chunk: int) -> None:
    assert chunk_bytes_for(total, num_threads=8, slot_bytes=2 << 20) == chunk


def test_a_chunk_never_exceeds_a_slot() -> None:
    assert chunk_bytes_for(1 << 30, num_threads=1, slot_bytes=100_000) == 100_000
