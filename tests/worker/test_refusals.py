"""Requests that cannot be received: one clear status, and no segment of theirs left."""

from __future__ import annotations

import asyncio
import errno
import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import grpc.aio
import pytest

from mmcopy import TensorData
from mmcopy.errors import ClosedError, DeviceMemoryError, MmcopyTimeoutError, NoSpaceError, SegmentError
from mmcopy.integrations.smg.status import receive_status
from mmcopy.receive.group.digest import Digest, Status, raise_failure, text_of
from mmcopy.wire.payload import Key
from tests.rigs.smg_messages import load
from tests.rigs.smg_rig import (
    Client,
    GatedWorker,
    SegmentMaker,
    Worker,
    cpu_receiver,
    request_with,
    run,
    serving,
    tensor_of,
    until,
)

pytestmark = pytest.mark.usefixtures("nothing_left_open")

RPCS = [("tokenspeed", "generate"), ("tokenspeed", "encode"), ("vllm", "generate")]

FOREIGN = "not-for-the-worker"


def path_of(maker: SegmentMaker, tensor: Any) -> pathlib.Path:
    return maker.directory / tensor.shm.name


def missing(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).unlink()


def short_file(maker: SegmentMaker, tensor: Any) -> None:
    os.truncate(path_of(maker, tensor), 15)


def offset_past_the_end(_: SegmentMaker, tensor: Any) -> None:
    tensor.shm.offset = 1


def offset_that_overflows(_: SegmentMaker, tensor: Any) -> None:
    tensor.shm.offset = 2**64 - 1


def wrong_size(_: SegmentMaker, tensor: Any) -> None:
    tensor.shm.nbytes = 24


def unknown_dtype(_: SegmentMaker, tensor: Any) -> None:
    tensor.dtype = "float128"


def no_payload(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).unlink()
    tensor.ClearField("shm")


def remote(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).unlink()
    tensor.remote.transport = "nixl"
    tensor.remote.nbytes = 16


def symlink(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).rename(maker.directory / FOREIGN)
    path_of(maker, tensor).symlink_to(FOREIGN)


def fifo(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).unlink()
    os.mkfifo(path_of(maker, tensor))


def directory(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).unlink()
    path_of(maker, tensor).mkdir()


def unix_socket(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).unlink()
    os.mknod(path_of(maker, tensor), stat.S_IFSOCK | 0o600)


def dots(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).unlink()
    tensor.shm.name = ".."


def slash(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).rename(maker.directory / FOREIGN)
    tensor.shm.name = f"smg-tokenspeed-1/../{FOREIGN}"


def nul(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).rename(maker.directory / FOREIGN)
    tensor.shm.name = f"{FOREIGN}\0smg-tokenspeed-"


def foreign_prefix(maker: SegmentMaker, tensor: Any) -> None:
    path_of(maker, tensor).rename(maker.directory / FOREIGN)
    tensor.shm.name = FOREIGN


NAME = "{name}"

BAD: dict[Callable[[SegmentMaker, Any], None], tuple[str, str, set[str]]] = {
    # What is done to one tensor: (status, what its message has, what is left because it is nobody's to remove)
    missing: ("NOT_FOUND", "SegmentNotFoundError: .*no such segment.*{name}", set()),
    short_file: ("INVALID_ARGUMENT", 'SegmentSizeError: segment "{name}": wanted 16 .*offset 0.* has 15', set()),
    offset_past_the_end: ("INVALID_ARGUMENT", "SegmentSizeError: .*{name}.*16 bytes at offset 1.* has 16", set()),
    offset_that_overflows: ("INVALID_ARGUMENT", "SegmentSizeError: .*{name}.*offset 18446744073709551615", set()),
    wrong_size: ("INVALID_ARGUMENT", "PayloadError: .*takes 16 bytes, the payload has 24 .*{name}", set()),
    unknown_dtype: ("INVALID_ARGUMENT", "DtypeError: unknown dtype 'float128'", set()),
    no_payload: ("INVALID_ARGUMENT", "PayloadError: .* has no payload", set()),
    remote: ("UNIMPLEMENTED", r"UnsupportedPayloadError: 'uint8' \[16\] comes over 'nixl' \(16 bytes\)", set()),
    symlink: ("INVALID_ARGUMENT", "SegmentError: .*symbolic link.*{name}", {NAME, FOREIGN}),
    fifo: ("INVALID_ARGUMENT", "SegmentError: .*FIFO.*{name}", {NAME}),
    directory: ("INVALID_ARGUMENT", "SegmentError: .*directory.*{name}", {NAME}),
    unix_socket: ("INVALID_ARGUMENT", "SegmentError: .*socket.*{name}", {NAME}),
    dots: ("INVALID_ARGUMENT", r'PayloadError: .*"\.\."', set()),
    slash: ("INVALID_ARGUMENT", 'PayloadError: .*"smg-tokenspeed-1/', {FOREIGN}),
    nul: ("INVALID_ARGUMENT", "PayloadError: .*NUL", {FOREIGN}),
    foreign_prefix: ("INVALID_ARGUMENT", f"PayloadError: .*{FOREIGN}.*accepted names begin with", {FOREIGN}),
}


def serve(shm_dir: pathlib.Path, body: Any, kind: type[Worker] = Worker, **options: Any) -> None:
    async def test(worker: Worker) -> None:
        async with serving(worker) as client:
            await body(client, worker)

    with cpu_receiver(shm_dir) as receiver:
        run(test(kind(receiver, **options)))


@pytest.mark.parametrize(("engine", "rpc"), RPCS)
@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_bad_segment(shm_dir: pathlib.Path, engine: str, rpc: str, spoil: Callable[[SegmentMaker, Any], None]) -> None:
    wanted_code, pattern, stays = BAD[spoil]
    maker, request = SegmentMaker(shm_dir), request_with(engine, rpc=rpc)
    for name in ("", "before", "zafter"):
        maker.fill(tensor_of(request, name))
    name = tensor_of(request).shm.name
    spoil(maker, tensor_of(request))

    async def body(client: Client, worker: Worker) -> None:
        code, details = await client.refused(request)
        assert code == wanted_code
        assert re.search(pattern.format(name=name), details), details
        assert worker.requests == []
        left = {n.format(name=name) for n in stays}
        assert set(maker.names()) == left
        for n in left:
            shutil.rmtree(shm_dir / n) if (shm_dir / n).is_dir() else (shm_dir / n).unlink()
        # The next request is served.
        maker.fill(tensor_of(request))
        for n in ("before", "zafter"):
            maker.fill(tensor_of(request, n))
        await client.call(request)

    serve(shm_dir, body, engine=engine)


@pytest.mark.parametrize(("engine", "rpc"), RPCS)
@pytest.mark.parametrize("prefix", ["", "/"])
def test_repeated_handle(shm_dir: pathlib.Path, engine: str, rpc: str, prefix: str) -> None:
    maker, request = SegmentMaker(shm_dir), request_with(engine, rpc=rpc)
    maker.fill(tensor_of(request))
    maker.fill(tensor_of(request, "other"))
    name = tensor_of(request).shm.name
    tensor_of(request, "twin").CopyFrom(tensor_of(request))
    tensor_of(request, "twin").shm.name = prefix + name

    async def body(client: Client, _: Worker) -> None:
        code, details = await client.refused(request)
        assert (code, maker.names()) == ("INVALID_ARGUMENT", [])
        assert re.search(f"PayloadError: .*{name}.* is named twice", details), details

    serve(shm_dir, body, engine=engine)


def test_a_handle_that_was_consumed(shm_dir: pathlib.Path) -> None:
    """What the gateway's retry sends: the same message again."""
    request = request_with("tokenspeed")
    SegmentMaker(shm_dir).fill(tensor_of(request))

    async def body(client: Client, worker: Worker) -> None:
        await client.call(request)
        assert (await client.refused(request))[0] == "NOT_FOUND"
        assert len(worker.requests) == 1

    serve(shm_dir, body)


@pytest.mark.parametrize("rooms", [0, 2])
def test_encode_wants_a_room_an_item(shm_dir: pathlib.Path, rooms: int) -> None:
    maker, request = SegmentMaker(shm_dir), request_with("tokenspeed", rpc="encode")
    maker.fill(tensor_of(request))
    del request.items[:]
    for _ in range(rooms):
        request.items.add()

    async def body(client: Client, _: Worker) -> None:
        code, details = await client.refused(request)
        assert (code, maker.names()) == ("INVALID_ARGUMENT", [])
        assert f"Encode has 1 items and {rooms} rooms" in details

    serve(shm_dir, body)


@pytest.mark.parametrize("engine", ["tokenspeed", "vllm"])
def test_several_answers(shm_dir: pathlib.Path, engine: str) -> None:
    maker, request = SegmentMaker(shm_dir), request_with(engine)
    maker.fill(tensor_of(request))
    request.sampling_params.n = 2

    async def body(client: Client, _: Worker) -> None:
        wanted = ("UNIMPLEMENTED", "the request wants n=2 answers, this worker gives one")
        assert await client.refused(request) == wanted
        assert maker.names() == []

    serve(shm_dir, body, engine=engine)


def test_media_by_url(shm_dir: pathlib.Path) -> None:
    maker, request = SegmentMaker(shm_dir), request_with("vllm")
    maker.fill(tensor_of(request))
    request.media_refs.items.add(url="https://example.com/cat.png")

    async def body(client: Client, _: Worker) -> None:
        code, details = await client.refused(request)
        assert (code, maker.names()) == ("UNIMPLEMENTED", [])
        assert "1 media by URL" in details

    serve(shm_dir, body, engine="vllm")


def test_two_tensors_of_one_name(shm_dir: pathlib.Path) -> None:
    maker, request = SegmentMaker(shm_dir), load("qwen3_vl-tokenspeed-shm.regular0.pb")
    maker.fill(request.mm_inputs.items[0].encoder_input)
    maker.fill(request.mm_inputs.items[0].model_specific_tensors["encoder_input"])

    async def body(client: Client, _: Worker) -> None:
        code, details = await client.refused(request)
        assert (code, maker.names()) == ("INVALID_ARGUMENT", [])
        assert "two tensors 'item0.encoder_input'" in details

    serve(shm_dir, body)


def test_two_tensors_of_one_name_are_refused_without_waiting_for_a_thread(shm_dir: pathlib.Path) -> None:
    maker = SegmentMaker(shm_dir)
    holding, double = (request_with("tokenspeed", request_id=name) for name in ("holding", "double"))
    maker.fill(tensor_of(holding))
    names = maker.names()
    maker.fill(tensor_of(double))
    maker.fill(tensor_of(double, "encoder_input"))

    async def test(worker: GatedWorker) -> None:
        async with serving(worker) as client:
            held = asyncio.create_task(client.generate(holding))
            await until(worker.gate.arrived.is_set)
            try:
                code, _ = await client.refused(double)
                assert (code, maker.names()) == ("INVALID_ARGUMENT", names)
            finally:
                worker.gate.open()
            assert await held

    with cpu_receiver(shm_dir) as receiver:
        run(test(GatedWorker(receiver, receive_threads=1)))


@pytest.mark.parametrize("request_id", ["a\nERROR:root:all is lost", "x" * 100_000])
def test_a_request_id_cannot_write_lines_of_its_own_into_the_log(
    shm_dir: pathlib.Path, caplog: pytest.LogCaptureFixture, request_id: str
) -> None:
    request = request_with("tokenspeed", request_id=request_id)
    SegmentMaker(shm_dir).fill(tensor_of(request))
    tensor_of(request).dtype = "float128"

    async def body(client: Client, _: Worker) -> None:
        await client.refused(request)

    serve(shm_dir, body)
    (line,) = [record.getMessage() for record in caplog.records if "is refused" in record.getMessage()]
    assert line.startswith("generate 'a\\nERROR" if "\n" in request_id else "generate 'xxx")
    assert "\n" not in line
    assert len(line) < 500


@pytest.mark.parametrize(("number", "code"), [(errno.ELOOP, "INVALID_ARGUMENT"), (errno.EIO, "INTERNAL")])
def test_a_group_answers_a_bad_segment_like_a_single_rank(number: int, code: str) -> None:
    own = SegmentError(number, "refused", "/dev/shm/a")
    failed = Digest(1, 0, Status.FAILED, 1, 16, bytes(16), bytes(16), False, text_of(own))
    assert receive_status(own, has_segments=True).code == code
    for on_this_rank in (own, None):  # the rank that met it, and one that could open the segment
        with pytest.raises(SegmentError, match=r"rank 1 of the group: .*refused: '/dev/shm/a'") as raised:
            raise_failure([failed.having(Status.OK), failed], on_this_rank)
        assert raised.value.errno == number
        assert receive_status(raised.value, has_segments=True).code == code


@pytest.mark.parametrize(
    ("kind", "code_when_inline"),
    [
        (NoSpaceError, "RESOURCE_EXHAUSTED"),
        (DeviceMemoryError, "RESOURCE_EXHAUSTED"),
        (MemoryError, "RESOURCE_EXHAUSTED"),
        (MmcopyTimeoutError, "DEADLINE_EXCEEDED"),
        (ClosedError, "UNAVAILABLE"),
        (SegmentError, "INTERNAL"),
        (ZeroDivisionError, "INTERNAL"),
    ],
)
def test_a_retry_is_invited_only_when_nothing_is_consumed(
    shm_dir: pathlib.Path, kind: type[Exception], code_when_inline: str
) -> None:
    def make() -> Exception:
        return MmcopyTimeoutError("receive", "wanted 5") if kind is MmcopyTimeoutError else kind("wanted 5, found 3")

    class Failing(Worker):
        def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Key, Any]:
            raise make()

    maker = SegmentMaker(shm_dir)
    with_segment, inline = request_with("tokenspeed"), request_with("tokenspeed")
    maker.fill(tensor_of(with_segment))
    tensor_of(inline).MergeFrom(type(tensor_of(inline))(dtype="uint8", shape=[1], inline=b"x"))

    async def body(client: Client, _: Worker) -> None:
        message = f"{kind.__name__}: {make()}"
        assert await client.refused(inline) == (code_when_inline, message)
        assert await client.refused(with_segment) == ("INTERNAL", message)
        assert maker.names() == []

    serve(shm_dir, body, Failing)


def test_a_receive_that_loses_a_tensor(shm_dir: pathlib.Path) -> None:
    class Losing(Worker):
        def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Key, Any]:
            return dict(list(super().receive(tensors).items())[1:])

    maker, request = SegmentMaker(shm_dir), request_with("tokenspeed")
    maker.fill(tensor_of(request))
    maker.fill(tensor_of(request, "grid"))

    async def body(client: Client, _: Worker) -> None:
        code, details = await client.refused(request)
        assert code == "INTERNAL"
        assert "receive returned ['item0.grid'], want ['item0.encoder_input', 'item0.grid']" in details

    serve(shm_dir, body, Losing)


def test_a_receive_that_returns_other_keys(shm_dir: pathlib.Path) -> None:
    class Relabelling(Worker):
        def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Any, Any]:
            return {f"item{index}.{name}": tensor for (index, name), tensor in super().receive(tensors).items()}

    maker, request = SegmentMaker(shm_dir), request_with("tokenspeed")
    maker.fill(tensor_of(request))

    async def body(client: Client, _: Worker) -> None:
        code, details = await client.refused(request)
        assert (code, maker.names()) == ("INTERNAL", [])
        assert "receive returned [\"'item0.encoder_input'\"], want ['item0.encoder_input']" in details

    serve(shm_dir, body, Relabelling)


@pytest.mark.root
def test_another_users_segment() -> None:
    """EACCES: the worker runs as nobody, the segment is root's and 0600."""
    with tempfile.TemporaryDirectory(prefix="mmcopy-test-") as directory:
        pathlib.Path(directory).chmod(0o1777)  # like /dev/shm
        maker, request = SegmentMaker(pathlib.Path(directory)), request_with("tokenspeed")
        maker.fill(tensor_of(request))
        name = tensor_of(request).shm.name
        worker = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.worker_process", directory, "65534"],
            cwd=pathlib.Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            port = int(worker.stdout.readline())

            async def test() -> None:
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    code, details = await Client("tokenspeed", channel).refused(request)
                assert code == "PERMISSION_DENIED"
                assert re.search(f"SegmentPermissionError: .*{name}", details), details

            run(test())
        finally:
            worker.communicate(timeout=30)
        assert worker.returncode == 0
        assert maker.names() == [name]
