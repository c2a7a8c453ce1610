"""Which bytes of which tensor lie in the windows of a packed destination, staged or read where they are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcopy.receive.group import ItemFacts, ParallelOptions, plan_group
from mmcopy.receive.plan import ALIGN_BYTES, CopyPlan, Extent, SlotCopy, Windows, extents, place, plan_chunks


def staged_plan(sizes: tuple[int, ...], starts: tuple[int, ...], *, windows: Windows, chunk_bytes: int) -> CopyPlan:
    return CopyPlan((), *plan_chunks(extents(place(sizes, starts), windows), chunk_bytes=chunk_bytes))


Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def test_a_window_cuts_a_tensor_and_a_tensor_lies_in_two_windows() -> None:
    sizes, starts = (1000, 0, 256), (256, 1280, 0)
    parts = extents(place(sizes, starts), ((0, 512), (768, 1024), (1024, 1024), (1280, 4096)))
    assert parts == (Extent(2, 0, 0, 0, 0, 256), Extent(0, 0, 0, 0, 256, 256), Extent(0, 0, 1, 512, 768, 256))
    assert extents(place(sizes, starts), ()) == ()


@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        ("each", [[(0, 0, 3000), (1, 0, 70), (2, 0, 5000)]] * 2),
        ("broadcast", [[(0, 0, 3000), (1, 0, 70), (2, 0, 5000)], []]),
        ("scatter", [[(0, 0, 3000), (1, 0, 70), (2, 0, 1024)], [(2, 1024, 3976)]]),
    ],
)
def test_what_each_rank_reads_of_which_lease(strategy: str, parts: list[list[tuple[int, int, int]]]) -> None:
    """Item, first byte of it and bytes: 3000, 70 and 5000 are 3072, 256 and 5120 in the buffer, two shares of 4352."""
    items = tuple(ItemFacts(nbytes, "uint8", True) for nbytes in (3000, 70, 5000))
    plan = plan_group(items, size=2, options=ParallelOptions(strategy=strategy))
    for rank in range(2):
        found = extents(place((3000, 70, 5000), plan.starts), tuple(plan.windows(rank)))
        assert [(part.source, part.source_start, part.nbytes) for part in found] == parts[rank]


def test_a_rank_that_reads_for_others_reads_a_share_and_a_broadcast() -> None:
    items = tuple(ItemFacts(nbytes, "uint8", True) for nbytes in (1024, 2048, 512))
    reachable = ((True, True, False), (True, True, True))
    plan = plan_group(items, size=2, options=ParallelOptions(strategy="scatter"), reachable=reachable)
    assert [section.strategy.value for section in plan.sections] == ["scatter", "broadcast"]
    assert plan.windows(1) == [(1536, 3584)]  # they touch, and are one
    found = extents(place((1024, 2048, 512), plan.starts), tuple(plan.windows(1)))
    assert found == (Extent(1, 0, 0, 512, 1536, 1536), Extent(2, 0, 0, 0, 3072, 512))


def test_a_copy_ends_where_something_else_lies() -> None:
    """24 bytes, then 1000 that are read in place, then 8: one chunk, two copys."""
    plan = staged_plan((24, 8), (0, 1280), windows=((0, 2048),), chunk_bytes=4096)
    assert plan.copies == ((SlotCopy(0, 0, 0, 24), SlotCopy(0, 1280, 256, 8)),)
    plan = staged_plan((24, 1000, 8), (0, 256, 1280), windows=((0, 2048),), chunk_bytes=4096)
    assert plan.copies == ((SlotCopy(0, 0, 0, 1288),),)


def staged(plan: CopyPlan, contents: list[Bytes], dest: Bytes, *, chunk_bytes: int) -> None:
    """As the pipeline does, with slots full of what was there before."""
    assert [fill.chunk for fill in plan.fills] == sorted(fill.chunk for fill in plan.fills)
    assert {fill.chunk for fill in plan.fills} == set(range(plan.num_chunks))
    for chunk in range(plan.num_chunks):
        slot = np.zeros(chunk_bytes, np.uint8)
        for fill in plan.fills:
            if fill.chunk == chunk:
                part = contents[plan.staged[fill.source]][fill.source_start : fill.source_start + fill.nbytes]
                slot[fill.slot_start : fill.slot_start + fill.nbytes] = part
        for copy in plan.copies[chunk]:
            assert copy.slot_start + copy.nbytes <= chunk_bytes
            dest[copy.dest_start : copy.dest_start + copy.nbytes] = slot[
                copy.slot_start : copy.slot_start + copy.nbytes
            ]


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from([256, 512, 1024, 4096, 5000, 1 << 20]),
    st.data(),
)
def test_windows_are_filled_and_nothing_outside_of_them(
    sizes: list[int], step: int, chunk_bytes: int, data: st.DataObject
) -> None:
    """Some tensors are staged, the others read in place, in whichever order the copies come."""
    starts, end = [0] * len(sizes), 0
    for n in data.draw(st.permutations(range(len(sizes)))):
        starts[n] = end
        end += -(-sizes[n] // ALIGN_BYTES) * ALIGN_BYTES + ALIGN_BYTES * (n % step)
    edges = sorted(data.draw(st.lists(st.integers(0, end // ALIGN_BYTES), max_size=6)))
    windows = tuple((a * ALIGN_BYTES, b * ALIGN_BYTES) for a, b in zip(edges[::2], edges[1::2], strict=False))
    contents = [np.random.default_rng(n).integers(1, 256, size, np.uint8) for n, size in enumerate(sizes)]
    in_place = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    rest = [n for n in range(len(sizes)) if n not in in_place]
    plan = staged_plan(
        tuple(sizes[n] for n in rest), tuple(starts[n] for n in rest), windows=windows, chunk_bytes=chunk_bytes
    )
    dest = np.zeros(end, np.uint8)

    def directly() -> None:
        for part in extents(place(tuple(sizes), tuple(starts)), windows):
            if part.source in in_place:
                run = contents[part.source][part.source_start : part.source_start + part.nbytes]
                dest[part.dest_start : part.dest_start + part.nbytes] = run

    def by_slots() -> None:
        staged(plan, [contents[n] for n in rest], dest, chunk_bytes=chunk_bytes)

    for copies in data.draw(st.permutations([directly, by_slots])):
        copies()
    wanted = np.zeros(end, np.uint8)
    for start, content in zip(starts, contents, strict=True):
        wanted[start : start + len(content)] = content
    outside = np.ones(end, bool)
    for first, last in windows:
        outside[first:last] = False
    wanted[outside] = 0
    assert (dest == wanted).all()
