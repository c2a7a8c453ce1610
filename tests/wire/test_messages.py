"""The wire modules against golden bytes and against everything that a real gateway sent."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys

import pytest

from mmcopy import Inline, ShmHandle, TensorData
from mmcopy.errors import InlineTooLargeError, PayloadError
from mmcopy.tensors import DTYPES
from mmcopy.wire import tokenspeed, vllm
from tests.rigs.smg_messages import DATA, ENGINES, EXPECTED, TENSOR_CLASSES, engine_of, load, recorded_label

GOLDEN = {
    "tokenspeed-shm": (
        tokenspeed,
        TensorData("bfloat16", (2, 3), ShmHandle("smg-tokenspeed-1-2-3", 0, 12, "smg:1")),
        "0a020203120862666c6f61743136221f0a14736d672d746f6b656e73706565642d312d322d33180c2205736d673a31",
    ),
    "vllm-shm": (
        vllm,
        TensorData("float32", (2, 3), ShmHandle("a", 0, 24, "smg:1")),
        "120202031a07666c6f61743332220c0a016118182205736d673a31",
    ),
    "tokenspeed-inline": (
        tokenspeed,
        TensorData("uint32", (2, 3), Inline(bytes(range(24)))),
        "0a020203120675696e7433321a18" + bytes(range(24)).hex(),
    ),
    "vllm-inline": (
        vllm,
        TensorData("uint8", (2,), Inline(b"\xaa\xbb")),
        "0a02aabb1201021a0575696e7438",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes_both_ways(name: str) -> None:
    wire, data, golden = GOLDEN[name]
    message = wire.to_proto(data)
    assert message.SerializeToString(deterministic=True).hex() == golden
    assert wire.from_proto(type(message).FromString(bytes.fromhex(golden))) == data


def test_inline_bytes_that_are_not_the_shape_are_refused() -> None:
    message = TENSOR_CLASSES["tokenspeed"].FromString(bytes.fromhex("0a020203120675696e7433321a02aabb"))
    with pytest.raises(PayloadError, match=r"uint32 \[2, 3\] takes 24 bytes, the payload has 2"):
        tokenspeed.from_proto(message)


def test_the_recorded_files_are_the_described_ones() -> None:
    assert {path.name for path in DATA.glob("*.pb")} == EXPECTED.keys()


@pytest.mark.parametrize("file", EXPECTED)
def test_every_recorded_request_parses(file: str) -> None:
    wire = ENGINES[engine_of(file)]
    expected = EXPECTED[file]["tensors"]
    engine = engine_of(file)
    tensors = {
        recorded_label(engine, key): wire.from_proto(message) for key, message in wire.tensors_of(load(file)).items()
    }
    assert tensors.keys() == expected.keys()
    for label, data in tensors.items():
        want = expected[label]
        assert (data.dtype, list(data.shape)) == (want["dtype"], want["shape"])
        assert data.nbytes == math.prod(want["shape"]) * DTYPES[want["dtype"]] == want["nbytes"]
        if want["payload"] == "shm":
            assert data.payload == ShmHandle(want["name"], want["offset"], want["nbytes"], want["owner_id"])
        else:
            assert isinstance(data.payload, Inline)
            assert hashlib.sha256(data.payload.data).hexdigest() == want["sha256"]


@pytest.mark.parametrize("file", EXPECTED)
def test_every_recorded_tensor_survives_reserialising(file: str) -> None:
    wire = ENGINES[engine_of(file)]
    for message in wire.tensors_of(load(file)).values():
        data = wire.from_proto(message)
        again = type(message).FromString(wire.to_proto(data).SerializeToString())
        assert wire.from_proto(again) == data
        assert again == message


@pytest.mark.parametrize("file", EXPECTED)
def test_handles_are_the_shm_tensors(file: str) -> None:
    wanted = [t["name"] for t in EXPECTED[file]["tensors"].values() if t["payload"] == "shm"]
    assert sorted(h.name for h in ENGINES[engine_of(file)].handles_of(load(file))) == sorted(wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3, 4), (2, 0), (1,), (2, 3, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_and_shape_inline_and_shm(engine: str, shape: tuple[int, ...], dtype: str) -> None:
    wire, nbytes = ENGINES[engine], math.prod(shape) * DTYPES[dtype]
    for payload in (Inline(bytes(range(nbytes % 251)) + bytes(nbytes - nbytes % 251)), ShmHandle("x", 7, nbytes, "o")):
        data = TensorData(dtype, shape, payload)
        message = type(wire.to_proto(data)).FromString(wire.to_proto(data).SerializeToString())
        assert wire.from_proto(message) == data


@pytest.mark.parametrize("engine", ENGINES)
def test_any_buffer_is_inline_bytes(engine: str) -> None:
    reversed_view = memoryview(b"abcdef")[::-1]
    for buffer in (bytearray(b"fedcba"), memoryview(b"fedcba"), reversed_view):
        assert ENGINES[engine].to_proto(TensorData("uint8", (6,), Inline(buffer))).inline == b"fedcba"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("offset", [0, 1, 2**63, 2**64 - 1])
def test_u64_offsets_are_kept(engine: str, offset: int) -> None:
    data = TensorData("uint8", (1,), ShmHandle("x", offset, 1))
    assert ENGINES[engine].from_proto(ENGINES[engine].to_proto(data)) == data


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_message_cannot_hold_is_refused(engine: str) -> None:
    to_proto = ENGINES[engine].to_proto
    with pytest.raises(PayloadError, match=r"uint8 \[4294967296\] does not fit"):
        to_proto(TensorData("uint8", (2**32,), ShmHandle("x", 0, 2**32)))
    with pytest.raises(PayloadError, match="does not fit"):
        to_proto(TensorData("uint8", (1,), ShmHandle("\ud800", 0, 1)))


@pytest.mark.parametrize("engine", ENGINES)
def test_inline_of_2_gib_is_refused_before_it_is_copied(engine: str) -> None:
    import mmap

    with mmap.mmap(-1, 2**31) as untouched, memoryview(untouched) as view:
        data = TensorData("uint8", (2**31,), Inline(view))
        with pytest.raises(InlineTooLargeError, match="2147483648 bytes inline, a message ends at 2147483647"):
            ENGINES[engine].to_proto(data)


def test_importing_needs_no_protobuf() -> None:
    code = (
        "import sys, mmcopy, mmcopy.wire, mmcopy.integrations.smg;"
        "bad = {'grpc', 'google.protobuf', 'smg_grpc_proto', 'torch'} & set(sys.modules);"
        "sys.exit(f'imported: {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_without_the_messages_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['smg_grpc_proto'] = None\n"
        "import mmcopy, mmcopy.wire\n"
        "data = mmcopy.TensorData('uint8', (1,), mmcopy.Inline(b'x'))\n"
        "try: mmcopy.wire.vllm.to_proto(data)\n"
        "except mmcopy.errors.MissingDependencyError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "pip install 'mmcopy[smg]'" in result.stdout
