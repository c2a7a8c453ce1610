"""Prefill and decode on separate workers, with and without encode workers: which leg gets what, and by which way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.rigs.gateway_pictures import Tensor, expected, picture
from tests.rigs.gateway_stack import FOREIGN, GONE, Leg, Row, Stack, WorkerProcess, by_path, only, without_path
from tests.rigs.waiting import settle

from .conftest import StackMaker

pytestmark = pytest.mark.gateway

PREFILL, DECODE, ENCODE = Leg("prefill"), Leg("decode"), Leg("encode")


def side_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {label: tensor for label, tensor in tensors.items() if not label.endswith("encoder_input")}


def item(tensors: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    """The tensors of one item, as those of the only item: Encode takes one item a call."""
    prefix = f"item{index}."
    return {f"item0.{k.removeprefix(prefix)}": v for k, v in tensors.items() if k.startswith(prefix)}


def encodes_by_item(stack: Stack, generate: Row) -> list[tuple[WorkerProcess, Row]]:
    """The Encode call of each item of a request, found by the room that prefill is told to fetch it from."""
    calls = {row["rooms"][0]: (worker, row) for worker in stack.of("encode") for row in worker.rows("encode")}
    return [calls[room] for room in generate["rooms"]]


def assert_encodes_end(stack: Stack, count: int) -> None:
    """The gateway answers the client without waiting for Encode."""

    def answered() -> int:
        return sum(len(worker.rows("answered")) for worker in stack.of("encode"))

    assert settle(lambda: answered() == count), [worker.rows() for worker in stack.of("encode")]


# ---- prefill and decode ----------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "prefill", "decode", "path"),
    [
        pytest.param("inline", "own", "own", "inline", id="inline"),
        pytest.param("shm", "own", "own", "segment", id="shm"),
        pytest.param("auto", "own", "own", "segment", id="auto"),
        pytest.param("auto", "own", FOREIGN, "inline", id="auto-foreign-decode"),
        pytest.param("auto", None, "own", "inline", id="auto-unknown-prefill"),
    ],
)
def test_pd_prefill_gets_the_pixels_and_decode_only_side_tensors(
    start: StackMaker, transport: str, prefill: str | None, decode: str | None, path: str
) -> None:
    legs = Leg("prefill", namespace=prefill), Leg("decode", namespace=decode)
    stack = start(*legs, topology="pd", transport=transport)
    pictures = [picture(11), picture(12, width=320, height=256)]
    reply = stack.ask(*pictures)
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    at_prefill, at_decode = (only(stack[role].wait_for("generate")) for role in ("prefill", "decode"))
    assert at_prefill["request_id"] == at_decode["request_id"] == reply.id

    assert without_path(at_prefill["tensors"]) == expected(pictures)
    assert without_path(at_decode["tensors"]) == side_tensors(expected(pictures))
    pixels, sides = ["item0.encoder_input", "item1.encoder_input"], sorted(side_tensors(expected(pictures)))
    assert by_path(at_prefill["tensors"]) == (
        {"segment": pixels, "inline": sides} if path == "segment" else {"inline": sorted(pixels + sides)}
    )
    assert by_path(at_decode["tensors"]) == {"inline": sides}
    assert at_prefill["segments_on_disk"] == []
    stack.assert_nothing_left()


def test_pd_a_consumed_handle_comes_again_when_decode_is_unavailable(start: StackMaker) -> None:
    stack = start(PREFILL, Leg("decode", behaviour="answer UNAVAILABLE"), topology="pd", transport="shm")
    reply = stack.ask(picture(13))
    prefill = stack["prefill"]
    # The first attempt has the pixels; each further one names the same segment.
    refused = prefill.wait_for("refused")
    assert without_path(only(prefill.rows("generate"))["tensors"]) == expected([picture(13)])
    assert {row["error"] for row in refused} == {"SegmentNotFoundError"}
    handles = [row["segments"] for row in prefill.rows("receiving")]
    assert handles == [handles[0]] * len(handles)
    # Both legs fail from the second attempt on; which of them the gateway reports is a race of its own.
    if "Prefill worker failed" in reply.text:
        assert reply.status == GONE, reply.text
        assert "SegmentNotFoundError: [Errno 2] no such segment" in reply.text
        assert handles[0][0] in reply.text
    else:
        assert reply.status == 503, reply.text
        assert "told to answer UNAVAILABLE" in reply.text
    stack.assert_nothing_left()

    stack["decode"].behave("ok")
    assert stack.ask(picture(14)).status == 200
    assert without_path(prefill.rows("generate")[-1]["tensors"]) == expected([picture(14)])


def test_pd_the_same_side_tensor_segments_go_to_both_legs_under_a_tiny_threshold(start: StackMaker) -> None:
    stack = start(PREFILL, DECODE, topology="pd", transport="shm", shm_min_bytes=0)
    assert_legs_race_for_the_side_tensors(stack, picture(15), at_prefill=expected([picture(15)]))
    stack.assert_nothing_left()


def assert_legs_race_for_the_side_tensors(stack: Stack, pixels: np.ndarray, *, at_prefill: dict[str, Tensor]) -> None:
    """The gateway writes each side tensor once and names it to both legs; whoever reads it removes it. So a leg has
    opened it before the other's read ended, and is right, or it is too late, and says so."""
    replies = [stack.ask(pixels) for _ in range(3)]
    for reply in replies:
        if reply.status != 200:
            assert reply.status == GONE, reply.text
            assert "worker failed to start: SegmentNotFoundError: [Errno 2] no such segment" in reply.text
    prefill, decode = stack["prefill"], stack["decode"]
    assert settle(lambda: not any(worker.busy() for worker in stack.workers))
    refused = prefill.rows("refused") + decode.rows("refused")
    assert {row["error"] for row in refused} <= {"SegmentNotFoundError"}
    assert bool(refused) == any(reply.status == GONE for reply in replies)
    for row in prefill.rows("generate"):
        assert without_path(row["tensors"]) == at_prefill
        assert set(by_path(row["tensors"])) == {"segment"}
    for row in decode.rows("generate"):
        assert without_path(row["tensors"]) == side_tensors(at_prefill)
        assert set(by_path(row["tensors"])) == {"segment"}


@pytest.mark.parametrize(
    ("shm_min_bytes", "segments"),
    [(None, ["item0.pixel_values"]), (0, ["item0.patches_per_image", "item0.pixel_values"])],
    ids=["default-threshold", "no-threshold"],
)
def test_pd_of_vllm_shares_no_segment_between_the_legs(
    start: StackMaker, shm_min_bytes: int | None, segments: list[str]
) -> None:
    legs = Leg("prefill", engine="vllm"), Leg("decode", engine="vllm")
    stack = start(*legs, topology="pd", transport="shm", shm_min_bytes=shm_min_bytes)
    pictures = [picture(18), picture(19, width=320, height=256)]
    reply = stack.ask(*pictures)
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    at_prefill, at_decode = (only(stack[role].wait_for("generate")) for role in ("prefill", "decode"))
    wanted = expected(pictures, engine="vllm")
    assert without_path(at_prefill["tensors"]) == wanted
    assert by_path(at_prefill["tensors"])["segment"] == segments
    assert without_path(at_decode["tensors"]) == {"item0.image_grid_thw": wanted["item0.image_grid_thw"]}
    assert by_path(at_decode["tensors"]) == {"inline": ["item0.image_grid_thw"]}
    stack.assert_nothing_left()


# ---- encode, prefill and decode --------------------------------------------


@pytest.mark.parametrize("transport", ["inline", "shm", "auto"])
def test_epd_each_picture_is_one_encode_call_and_only_that_has_pixels(start: StackMaker, transport: str) -> None:
    stack = start(ENCODE, PREFILL, DECODE, topology="epd", transport=transport)
    pictures = [picture(21), picture(22, width=256, height=320)]
    reply = stack.ask(*pictures)
    assert (reply.status, reply.content) == (200, "seen"), reply.text
    assert_encodes_end(stack, 2)
    at_prefill, at_decode = (only(stack[role].wait_for("generate")) for role in ("prefill", "decode"))
    wanted = expected(pictures)
    for index, (_, encode) in enumerate(encodes_by_item(stack, at_prefill)):
        assert without_path(encode["tensors"]) == item(wanted, index)
        pixels_path = encode["tensors"].pop("item0.encoder_input")["path"]
        assert pixels_path == ("inline" if transport == "inline" else "segment")
        assert set(by_path(encode["tensors"])) == {"inline"}
        # Received, and removed, before the answer: the gateway itself removes them only when the call has ended.
        assert encode["segments_on_disk"] == []
    for row in (at_prefill, at_decode):
        assert without_path(row["tensors"]) == side_tensors(wanted)
        assert set(by_path(row["tensors"])) == {"inline"}
    stack.assert_nothing_left()


def test_epd_encode_answers_only_when_it_has_received(start: StackMaker) -> None:
    stack = start(Leg("encode", behaviour="hold-receive"), PREFILL, DECODE, topology="epd", transport="shm")
    encode = stack["encode"]
    assert stack.ask(picture(23)).status == 200
    segment = only(only(encode.wait_for("receiving"))["segments"])
    assert encode.rows("encode") == encode.rows("answered") == []
    assert Path("/dev/shm", segment).exists(), "the gateway removed it, so the call has ended"
    encode.behave("ok")
    encode.wait_for("answered")
    assert without_path(only(encode.rows("encode"))["tensors"]) == expected([picture(23)])
    stack.assert_nothing_left()


def test_epd_auto_with_a_foreign_encode_worker_among_those_assigned_is_all_inline(start: StackMaker) -> None:
    legs = ENCODE, Leg("encode", namespace=FOREIGN), PREFILL, DECODE
    stack = start(*legs, topology="epd", transport="auto")
    assigned: set[frozenset[str | None]] = set()
    for seed in range(100, 140, 2):  # which worker encodes which picture is the gateway's choice
        pictures = [picture(seed), picture(seed + 1)]
        reply = stack.ask(*pictures)
        assert (reply.status, reply.content) == (200, "seen"), reply.text
        assert_encodes_end(stack, seed + 2 - 100)
        encodes = encodes_by_item(stack, stack["prefill"].rows("generate")[-1])
        namespaces = frozenset(worker.leg.namespace for worker, _ in encodes)
        for index, (_, encode) in enumerate(encodes):
            assert without_path(encode["tensors"]) == item(expected(pictures), index)
            path = encode["tensors"]["item0.encoder_input"]["path"]
            assert path == ("inline" if FOREIGN in namespaces else "segment"), namespaces
        assigned.add(namespaces)
        if len(assigned) == 3:
            break
    assert frozenset(["own", FOREIGN]) in assigned
    stack.assert_nothing_left()


@pytest.mark.parametrize("behaviour", ["fail-first", "answer UNAVAILABLE"])
def test_epd_a_failing_encode_is_not_repeated_and_leaves_nothing(start: StackMaker, behaviour: str) -> None:
    stack = start(Leg("encode", behaviour=behaviour), PREFILL, DECODE, topology="epd", transport="shm")
    assert stack.ask(picture(26)).status == 200
    encode = stack["encode"]
    assert without_path(only(encode.wait_for("encode"))["tensors"]) == expected([picture(26)])
    stack.assert_nothing_left()
    encode.behave("ok")
    assert stack.ask(picture(27)).status == 200
    encode.wait_for("answered")
    assert [row["event"] for row in encode.rows()] == ["receiving", "encode"] * 2 + ["answered"]
    stack.assert_nothing_left()


def test_epd_under_a_tiny_threshold_prefill_and_decode_race_and_encode_is_unharmed(start: StackMaker) -> None:
    stack = start(ENCODE, PREFILL, DECODE, topology="epd", transport="shm", shm_min_bytes=0)
    wanted = expected([picture(28)])
    assert_legs_race_for_the_side_tensors(stack, picture(28), at_prefill=side_tensors(wanted))
    assert_encodes_end(stack, 3)
    for encode in stack["encode"].rows("encode"):
        assert without_path(encode["tensors"]) == wanted
        assert set(by_path(encode["tensors"])) == {"segment"}
    # smg 1.13.0 also writes an empty file for the pixels that prefill does not get, and names it to nobody.
    named = {name for worker in stack.workers for row in worker.rows("receiving") for name in row["segments"]}
    assert settle(lambda: named.isdisjoint(stack.segments()))
    assert {Path("/dev/shm", name).stat().st_size for name in stack.segments()} <= {0}
    stack.remove_segments()
