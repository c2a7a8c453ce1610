"""Messages that are wrong on purpose: a typed error each, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmcopy import MmcopyError, TensorData
from mmcopy.errors import DtypeError, PayloadError, UnsupportedPayloadError
from mmcopy.tensors import DTYPES
from tests.rigs.smg_messages import (
    DATA,
    ENGINES,
    EXPECTED,
    REQUEST_CLASSES,
    TENSOR_CLASSES,
    common_pb2,
    engine_of,
    load,
)

BAD: dict[str, tuple[dict[str, Any], type[MmcopyError], str]] = {
    "no payload": ({"shape": [2], "dtype": "uint8"}, PayloadError, r"'uint8' \[2\] has no payload"),
    "nothing at all": ({}, PayloadError, r"'' \[\] has no payload"),
    "remote": (
        {"shape": [4], "dtype": "float32", "remote": {"transport": "nixl", "descriptor": b"?", "nbytes": 16}},
        UnsupportedPayloadError,
        r"'float32' \[4\] comes over 'nixl' \(16 bytes\)",
    ),
    "unknown dtype": ({"shape": [1], "dtype": "float128", "inline": b"0" * 16}, DtypeError, "'float128'"),
    "torch's long name": ({"shape": [1], "dtype": "torch.uint8", "inline": b"0"}, DtypeError, "'torch.uint8'"),
    "empty dtype": ({"shape": [1], "inline": b"0"}, DtypeError, "unknown dtype ''"),
    "too few bytes": ({"shape": [2], "dtype": "int64", "inline": b"0" * 15}, PayloadError, "takes 16 bytes.* has 15"),
    "too many bytes": ({"shape": [2], "dtype": "int64", "inline": b"0" * 17}, PayloadError, "takes 16 bytes.* has 17"),
    "handle of another size": (
        {"shape": [2], "dtype": "int64", "shm": {"name": "seg", "nbytes": 24}},
        PayloadError,
        "takes 16 bytes, the payload has 24 .*'seg'",
    ),
    "bytes for no elements": ({"shape": [0, 7], "dtype": "uint8", "inline": b"0"}, PayloadError, "takes 0 bytes"),
    "product over 2^64": (
        {"shape": [2**32 - 1] * 3, "dtype": "uint8", "inline": b"0"},
        PayloadError,
        "at most 9223372036854775807",
    ),
    "empty, but over 2^64 otherwise": (
        {"shape": [0, *[2**32 - 1] * 3], "dtype": "uint8", "inline": b""},
        PayloadError,
        "at most 9223372036854775807",
    ),
    "too many dimensions": ({"shape": [1] * 33, "dtype": "uint8", "inline": b"0"}, PayloadError, "33 dimensions"),
    "a million dimensions": ({"shape": [2**32 - 1] * 10**6, "dtype": "uint8"}, PayloadError, "1000000 dimensions"),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", BAD)
def test_bad_tensor(engine: str, name: str) -> None:
    fields, error, match = BAD[name]
    with pytest.raises(error, match=match):
        ENGINES[engine].from_proto(TENSOR_CLASSES[engine](**fields))


@pytest.mark.parametrize(
    ("engine", "file", "field"),
    [
        ("tokenspeed", "qwen3_vl-tokenspeed-shm.regular0.pb", "encoder_input"),
        ("vllm", "qwen3_vl-vllm-shm.regular0.pb", "pixel_values"),
    ],
)
def test_a_side_tensor_named_like_the_encoder_input_is_refused_and_still_released(
    engine: str, file: str, field: str
) -> None:
    request = load(file)
    owner = request.mm_inputs.items[0] if engine == "tokenspeed" else request.mm_inputs
    shadow = owner.model_specific_tensors[field]
    shadow.shm.name = "smg-tokenspeed-0-0-shadow"
    wire = ENGINES[engine]
    with pytest.raises(PayloadError, match=rf"two tensors 'item0\.{field}'"):
        wire.tensors_of(request)
    names = [handle.name for handle in wire.handles_of(request)]
    assert len(names) == 2
    assert "smg-tokenspeed-0-0-shadow" in names


def test_vllm_numbers_the_inputs_it_has() -> None:
    request = REQUEST_CLASSES["vllm.grpc.engine.GenerateRequest"]()
    request.extra_mm_inputs.add().pixel_values.dtype = "uint8"
    request.extra_mm_inputs.add().model_specific_tensors["grid"].dtype = "int64"
    assert list(ENGINES["vllm"].tensors_of(request)) == [(0, "pixel_values"), (1, "grid")]
    request.mm_inputs.pixel_values.dtype = "float32"
    tensors = ENGINES["vllm"].tensors_of(request)
    assert {key: message.dtype for key, message in tensors.items()} == {
        (0, "pixel_values"): "float32",
        (1, "pixel_values"): "uint8",
        (2, "grid"): "int64",
    }


def test_handles_of_tensors_that_do_not_parse_are_found() -> None:
    request = load("epd-shm-all.encode0.pb")
    request.mm_inputs.items[0].encoder_input.dtype = "float128"
    assert len(ENGINES["tokenspeed"].handles_of(request)) == 3


texts = st.text(max_size=20)
dtypes = st.one_of(st.sampled_from([*DTYPES, "", "float", "FLOAT32"]), texts)
dims = st.integers(0, 2**32 - 1) | st.integers(0, 5)
u64 = st.integers(0, 2**64 - 1) | st.integers(0, 64)
payloads = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"inline": st.binary(max_size=64)}),
    st.fixed_dictionaries({"shm": st.builds(common_pb2.ShmHandle, name=texts, offset=u64, nbytes=u64, owner_id=texts)}),
    st.fixed_dictionaries({"remote": st.builds(common_pb2.RemoteTensorHandle, transport=texts, nbytes=u64)}),
)


@pytest.mark.parametrize("engine", ENGINES)
@given(dtype=dtypes, shape=st.lists(dims, max_size=40), payload=payloads)
def test_random_tensors_give_a_tensor_or_a_typed_error(
    engine: str, dtype: str, shape: list[int], payload: dict[str, Any]
) -> None:
    wire = ENGINES[engine]
    message = TENSOR_CLASSES[engine](dtype=dtype, shape=shape, **payload)
    try:
        data = wire.from_proto(message)
    except MmcopyError:
        return
    assert isinstance(data, TensorData)
    assert wire.to_proto(data) == message


@pytest.mark.parametrize("file", [f for f in EXPECTED if EXPECTED[f]["bytes"] < 2000])
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(edits=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=6), cut=st.booleans())
def test_mutated_requests_give_tensors_or_typed_errors(file: str, edits: list[tuple[int, int]], cut: bool) -> None:
    raw = bytearray((DATA / file).read_bytes())
    for position, value in edits:
        raw[position % len(raw)] = value
    if cut:
        del raw[edits[0][0] % len(raw) :]
    try:
        request = REQUEST_CLASSES[EXPECTED[file]["message"]].FromString(bytes(raw))
    except DecodeError:
        return
    wire = ENGINES[engine_of(file)]
    handles = wire.handles_of(request)
    try:
        messages = wire.tensors_of(request)
    except MmcopyError:
        return
    received = 0
    for message in messages.values():
        try:
            data = wire.from_proto(message)
        except MmcopyError:
            continue
        assert wire.from_proto(wire.to_proto(data)) == data
        received += data.path == "segment"
    assert received <= len(handles)
