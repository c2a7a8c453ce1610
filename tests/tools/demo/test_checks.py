"""The demo's judgement: reports linked to requests, tensors judged, leftovers told from other people's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmcopy import Inline, ShmHandle, TensorData
from mmcopy.errors import ConfigError
from mmcopy.tools.demo import job as job_module
from mmcopy.tools.demo.checks import Checker, Row, Sent, linked
from mmcopy.tools.demo.families import FAMILIES
from mmcopy.tools.demo.job import Job, Outcome
from mmcopy.tools.demo.leftovers import Leftover, Leftovers
from mmcopy.tools.demo.pictures import Attachments, noise
from mmcopy.tools.demo.report import json_line
from mmcopy.tools.demo.worker import bytes_on_device, plain_digest
from tests.rigs.oracle import encoder_input, side_tensors
from tests.rigs.oracle_families import PREPROCESSING

FAMILY = FAMILIES["qwen3_vl"]
PICTURES = (noise(64, 64), noise(96, 64, seed=1))
ATTACHED = Attachments(PICTURES)


def tensor(name: str, array: Any, dtype: str) -> dict[str, Any]:
    digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(array.shape),
        "path": "segment",
        "nbytes": array.nbytes,
        "segment": "smg-tokenspeed-1-2-3",
        "seconds": 0.001,
        "plain_sha256": digest,
        "plain_error": None,
        "device_sha256": digest,
        "device": "cpu",
    }


def item(picture: Any, **changes: Any) -> dict[str, Any]:
    pixels = encoder_input(PREPROCESSING["qwen3_vl"], picture.pixels, "bfloat16")
    assert pixels is not None
    sides = side_tensors(PREPROCESSING["qwen3_vl"], picture.width, picture.height)
    return {
        "modality": "image",
        "tensors": [
            tensor("patches_per_image", sides["patches_per_image"], "int64"),
            {**tensor("encoder_input", pixels.elements, "bfloat16"), **changes},
        ],
    }


def report(request_id: str = "r1", **changes: Any) -> dict[str, Any]:
    made = {"role": "regular", "rpc": "generate", "request_id": request_id, "own_rooms": [], "encode_rooms": []}
    return {**made, "items": [item(picture) for picture in PICTURES], **changes}


def judged(**changes: Any) -> list[Row]:
    checker = Checker(FAMILY, engine="tokenspeed", dtype="bfloat16", device="cpu")
    (link,) = linked([Sent(1, ATTACHED, "r1")], [report(items=[item(PICTURES[0], **changes)])])
    return checker.rows(link)


def test_right_tensors_pass_and_the_encoders_input_comes_first() -> None:
    checker = Checker(FAMILY, engine="tokenspeed", dtype="bfloat16", device="cpu")
    (link,) = linked([Sent(1, ATTACHED, "r1")], [report()])
    rows = checker.rows(link)
    assert [row.tensor for row in rows] == [
        "item0.encoder_input",
        "item0.patches_per_image",
        "item1.encoder_input",
        "item1.patches_per_image",
    ]
    assert {(row.check, row.error) for row in rows} == {("numpy", "")}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"device_sha256": "0" * 64}, "not those of the payload"),
        ({"device_sha256": "0" * 64, "plain_sha256": "0" * 64}, "not those that numpy computes"),
        ({"plain_sha256": None, "plain_error": "x: No such file"}, "could not be read plainly: x: No such file"),
        ({"device": "cuda:0"}, "it is on cuda:0, want cpu"),
        ({"dtype": "float16"}, "want bfloat16 [16, 1536]"),
        ({"shape": [1536, 16]}, "want bfloat16 [16, 1536]"),
    ],
)
def test_each_error_is_named(changes: dict[str, Any], error: str) -> None:
    row, side = judged(**changes)
    assert row.check == "numpy"
    assert side.error == ""
    assert error in row.error


def test_a_tensor_that_cannot_be_recomputed_has_its_checksum() -> None:
    checker = Checker(FAMILY, engine="tokenspeed", dtype="bfloat16", device="cpu")
    attached = Attachments((noise(65, 64),))
    other = tensor("encoder_input", np.zeros((2, 2), np.uint16), "bfloat16")
    for digest, error in (
        (other["plain_sha256"], ""),
        ("1" * 64, "the bytes on the device are not those of the payload"),
    ):
        line = report(items=[{"modality": "image", "tensors": [{**other, "device_sha256": digest}]}])
        (link,) = linked([Sent(1, attached, "r1")], [line])
        (row,) = checker.rows(link)
        assert (row.check, row.error) == ("checksum", error)


def test_encode_is_linked_by_its_room_and_strangers_are_left_out() -> None:
    lines = [
        report("encode-7", role="encode", rpc="encode", own_rooms=[71], items=[item(PICTURES[1])]),
        report(role="prefill", encode_rooms=[[0, 70], [1, 71]], items=[]),
        report("encode-8", role="encode", rpc="encode", own_rooms=[99], items=[item(PICTURES[0])]),
        report("somebody else's", items=[]),
        report(role="decode", items=[]),
    ]
    links = linked([Sent(4, ATTACHED, "r1"), Sent(5, ATTACHED, "", "status 500")], lines)
    assert [(link.report["role"], link.first_item) for link in links] == [("encode", 1), ("prefill", 0), ("decode", 0)]
    rows = Checker(FAMILY, engine="tokenspeed", dtype="bfloat16", device="cpu").rows(links[0])
    assert [(row.tensor, row.error, row.request) for row in rows] == [
        ("item1.encoder_input", "", 4),
        ("item1.patches_per_image", "", 4),
    ]


def test_what_did_not_arrive_is_a_failure() -> None:
    job = Job(family=FAMILY, attachments=[ATTACHED], topology="epd")
    sent = Sent(1, ATTACHED, "r1")
    links = linked([sent], [report(role="prefill", items=[])])
    errors = job_module.missing(job, sent, links)
    assert errors == [
        "request 1: 1 of 4 calls were reported by the workers",
        "request 1: 0 of 2 encoder inputs arrived",
    ]


def test_only_own_new_files_are_leftovers(tmp_path: Path) -> None:
    def put(*names: str) -> None:
        for name in names:
            (tmp_path / name).write_bytes(b"12345")

    put("smg-tokenspeed-7-1-0", "handed-before")
    leftovers = Leftovers(tmp_path)
    put("smg-tokenspeed-7-2-1", "smg-tokenspeed-77-2-1", "mmcopy-0123456789abcdef-1", "handed", "smg-tokenspeed-7")
    found = leftovers.found(gateway_pids=[7], handed=["handed", "handed-before", "consumed"])
    assert found == [Leftover("handed", 5), Leftover("smg-tokenspeed-7-2-1", 5)]
    assert leftovers.found(gateway_pids=[], handed=[]) == []
    leftovers.unlink(found)
    assert leftovers.found(gateway_pids=[7], handed=["handed"]) == []
    assert (tmp_path / "smg-tokenspeed-77-2-1").exists()


def test_settling_waits_for_the_last_one_and_no_longer() -> None:
    seen = iter([[Leftover("a", 1)], [Leftover("a", 1)], []])
    polls: list[None] = []
    Leftovers.settle(lambda: next(seen), limit_s=5.0, poll=lambda: polls.append(None))
    assert len(polls) == 2
    Leftovers.settle(lambda: [Leftover("a", 1)], limit_s=0.0, poll=lambda: polls.append(None))
    assert len(polls) == 2


def test_the_json_line_counts() -> None:
    row = Row(1, "regular", "item0.encoder_input", "bfloat16", (2,), "segment", 4, 0.1, "numpy")
    bad = Row(1, "regular", "item0.image_grid_thw", "int64", (1, 3), "inline", 24, 0.1, "numpy", "wrong")
    outcome = Outcome(sent=[Sent(1, ATTACHED, "r1")], rows=[row, bad], leftovers=[Leftover("a", 1)], device="cpu")
    assert json.loads(json_line(outcome)) == {
        "requests": 1,
        "tensors": 2,
        "mismatches": 1,
        "paths": {"inline": 1, "segment": 1},
        "leftover_segments": 1,
        "device": "cpu",
    }
    assert not outcome.good
    assert Outcome(rows=[row]).good
    assert not Outcome(rows=[row], errors=["x"]).good
    assert not Outcome(leftovers=[Leftover("a", 1)]).good


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"engine": "vllm", "topology": "epd"}, "epd needs engine tokenspeed"),
        ({"encoder_dtype": "uint8"}, "uint8 needs engine vllm"),
        ({"requests": 0}, "requests is 0"),
        ({"concurrency": -1}, "concurrency is -1"),
    ],
)
def test_a_job_that_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Job(family=FAMILY, attachments=[ATTACHED], **options)


def test_the_plain_read_sees_the_bytes_or_says_why(tmp_path: Path) -> None:
    (tmp_path / "seg").write_bytes(bytes(range(16)))
    (tmp_path / "link").symlink_to(tmp_path / "seg")
    want = hashlib.sha256(bytes(range(4, 12))).hexdigest()
    shape = (8,)
    assert plain_digest(TensorData("uint8", shape, Inline(bytes(range(4, 12))))) == (want, None)

    def of(name: str, offset: int = 4) -> tuple[str | None, str | None]:
        return plain_digest(TensorData("uint8", shape, ShmHandle(name, offset, 8)), str(tmp_path))

    assert of("seg") == of("/seg") == (want, None)
    assert of("seg", 10) == (None, "seg ends 2 bytes early")
    assert of("gone") == (None, "gone: No such file or directory")
    assert of("link") == (None, "link: Too many levels of symbolic links")
    assert of("../seg") == (None, "'../seg' is not one path component")
    assert (tmp_path / "seg").exists()


def test_bytes_of_any_tensor() -> None:
    torch = pytest.importorskip("torch")
    values = [np.float32(1.5), np.zeros((0, 3), np.int64), np.arange(6, dtype=np.uint16).reshape(2, 3)]
    for value in values:
        array = np.asarray(value)
        assert bytes(bytes_on_device(array)) == array.tobytes()
        assert bytes(bytes_on_device(torch.from_numpy(array.copy()))) == array.tobytes()
    assert bytes(bytes_on_device(torch.tensor(1.0, dtype=torch.bfloat16))) == b"\x80\x3f"
