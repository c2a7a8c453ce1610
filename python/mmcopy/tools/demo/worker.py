"""The demo's worker process: receives like any worker, and reports what it received with its digests.

``python -m mmcopy.tools.demo.worker --model-dir DIR --report-fd FD`` serves until SIGTERM, SIGINT or the end of its
stdin, when that is a pipe. It writes JSON lines to FD: ``ready`` (or ``error``) once, then ``request`` or ``failed``
for each request. Before mmcopy receives a tensor, its payload is read with plain system calls and hashed (not a lease,
which has no name to open). Afterwards the bytes on the device are copied back and hashed too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmcopy import Inline, MmcopyError, Receiver, ShmHandle, TensorData
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.integrations.smg import ModelInfo, SmgWorker, WorkerRequest
from mmcopy.wire.payload import Key

from .reporting import Report, wait_for_stop

__all__ = ["DemoWorker", "bytes_on_device", "plain_digest"]

REPLY = "received"
CHUNK_BYTES = 4 << 20
NAMESPACES = {"own": None, "foreign": "00000000-0000-4000-8000-000000000000:1", "none": ""}
"""What a worker advertises: its own id, one that no host has, or nothing."""


@dataclass(frozen=True)
class Observed:
    """What :meth:`DemoWorker.receive` saw of one tensor. ``data`` keeps the key of its entry alive."""

    data: TensorData
    seconds: float
    plain_sha256: str | None
    plain_error: str | None


class DemoWorker(SmgWorker):
    """Answers every request with a fixed text and reports each tensor."""

    def __init__(self, *args: Any, report: Report, role: str, kv_connector: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self._report = report
        self._role = role
        self._kv_connector = kv_connector
        self._observed: dict[int, Observed] = {}
        vocabulary = json.loads((Path(self.model.model_path) / "tokenizer.json").read_text())["model"]["vocab"]
        self._reply = [vocabulary[letter] for letter in REPLY]

    def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Key, Any]:
        """Receive one by one, so that each tensor is timed by itself, until its bytes are on the device."""
        received: dict[Key, Any] = {}
        try:
            for key, data in tensors.items():
                plain, error = plain_digest(data)
                start = time.perf_counter()
                received.update(super().receive({key: data}))
                _wait_for_device(received[key])
                self._observed[id(data)] = Observed(data, time.perf_counter() - start, plain, error)
        except BaseException as error:
            for data in tensors.values():
                self._observed.pop(id(data), None)
            self._report.write("failed", role=self._role, error=f"{type(error).__name__}: {error}")
            raise
        return received

    async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        await asyncio.to_thread(self._write_report, request)
        yield self._reply

    async def encode(self, request: WorkerRequest) -> None:
        await asyncio.to_thread(self._write_report, request)

    def server_info(self, message: Any) -> None:
        if self.engine == "vllm":
            message.kv_connector = self._kv_connector
            # The gateway sends raw bytes only to a worker that says it normalises them itself.
            message.mm_device_do_normalize = self.encoder_dtype == "uint8"

    def finish(self, request: WorkerRequest, message: Any) -> None:
        del request
        if self._kv_connector and self._role == "prefill":
            message.complete.kv_transfer_params_json = json.dumps({"do_remote_prefill": True})

    def _write_report(self, request: WorkerRequest) -> None:
        items = []
        for item in request.items:
            tensors = []
            for name, data in item.data.items():
                seen = self._observed.pop(id(data))
                tensors.append(
                    {
                        "name": name,
                        "dtype": data.dtype,
                        "shape": list(data.shape),
                        "path": data.path,
                        "nbytes": data.nbytes,
                        "segment": _segment_of(data),
                        "seconds": seen.seconds,
                        "plain_sha256": seen.plain_sha256,
                        "plain_error": seen.plain_error,
                        "device_sha256": hashlib.sha256(bytes_on_device(item.tensors[name])).hexdigest(),
                        "device": str(getattr(item.tensors[name], "device", "cpu")),
                    }
                )
            items.append({"modality": item.modality, "tensors": tensors})
        encoders = getattr(request.message, "encode_bootstrap_info", None)
        rooms = [] if encoders is None else [[room.item_index, room.bootstrap_room] for room in encoders.items]
        self._report.write(
            "request",
            role=self._role,
            rpc=request.rpc,
            request_id=request.request_id,
            own_rooms=list(request.bootstrap_rooms) if request.rpc == "encode" else [],
            encode_rooms=rooms,
            items=items,
        )


def _segment_of(data: TensorData) -> str | None:
    handle = data.payload
    return handle.name if isinstance(handle, ShmHandle) and not handle.is_lease else None


def plain_digest(data: TensorData, shm_dir: str = "/dev/shm") -> tuple[str | None, str | None]:
    """(SHA-256 of the payload's bytes, None), read with the operating system alone; (None, why) when that fails.

    (None, None) for a lease: the arena is reached through mmcopy alone.
    """
    digest = hashlib.sha256()
    if isinstance(data.payload, Inline):
        digest.update(data.payload.data)
        return digest.hexdigest(), None
    handle = data.payload
    if handle.is_lease:
        return None, None
    try:
        if os.sep in handle.name.lstrip(os.sep):
            return None, f"{handle.name!r} is not one path component"
        descriptor = os.open(Path(shm_dir) / handle.name.lstrip(os.sep), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            at, left = handle.offset, handle.nbytes
            while left:
                chunk = os.pread(descriptor, min(left, CHUNK_BYTES), at)
                if not chunk:
                    return None, f"{handle.name} ends {left} bytes early"
                digest.update(chunk)
                at, left = at + len(chunk), left - len(chunk)
        finally:
            os.close(descriptor)
    except OSError as error:
        return None, f"{handle.name}: {error.strerror}"
    return digest.hexdigest(), None


def bytes_on_device(tensor: Any) -> memoryview:
    """The tensor's bytes, copied back to the host when it is elsewhere; of any dtype and rank."""
    if isinstance(tensor, np.ndarray):
        return tensor.reshape(-1).view(np.uint8).data
    import torch

    return memoryview(tensor.reshape(-1).view(torch.uint8).cpu().numpy())


def _wait_for_device(tensor: Any) -> None:
    if getattr(tensor, "is_cuda", False):
        import torch

        torch.cuda.synchronize(tensor.device)


async def serve(worker: DemoWorker, report: Report) -> None:
    """Serves until a signal comes, or the parent closes its end of our stdin."""
    await worker.start()
    await wait_for_stop(lambda: report.write("ready", address=worker.address, device=worker.receiver.device))
    await worker.stop(grace_s=0.5)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mmcopy.tools.demo.worker", description="The demo's worker process."
    )
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--role", default="regular")
    parser.add_argument("--engine", default="tokenspeed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--framework", default="torch")
    parser.add_argument("--encoder-dtype", default="bfloat16")
    parser.add_argument("--shm-namespace", choices=NAMESPACES, default="own")
    parser.add_argument("--kv-connector", default="")
    parser.add_argument("--endpoint-dir")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    report = Report(args.report_fd)
    try:
        model = ModelInfo.from_dir(args.model_dir, served_model_name=args.served_model_name)
        with contextlib.ExitStack() as stack:
            endpoint = None
            if args.endpoint_dir is not None:
                endpoint = stack.enter_context(WorkerEndpoint(args.endpoint_dir))
            receiver = stack.enter_context(Receiver(args.device, framework=args.framework, endpoint=endpoint))
            worker = DemoWorker(
                model,
                receiver,
                engine=args.engine,
                encoder_dtype=args.encoder_dtype,
                shm_namespace_id=NAMESPACES[args.shm_namespace],
                report=report,
                role=args.role,
                kv_connector=args.kv_connector,
            )
            asyncio.run(serve(worker, report))
    except MmcopyError as error:
        report.write("error", error=str(error), kind=type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
