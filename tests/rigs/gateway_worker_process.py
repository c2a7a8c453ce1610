"""A worker in a process of its own: writes down what reaches it, as JSON lines, and misbehaves when it is told to.

How it behaves is read from the file ``behaviour`` of its directory at every request, so that a test can change it:

ok              answer
fail-first      the handler raises before the first chunk
fail-later      the handler raises after the first chunk
answer CODE     the handler raises that gRPC status before the first chunk
hold            the handler waits, with the tensors received, until it is told to do something else
hold-receive    the receiving thread waits so before it opens anything
warming         the worker is not ready, until it is told to do something else

Events, in the file ``rows``: ``receiving`` (a receive begins, with the names of its segments), ``refused`` (it
failed), ``generate`` and ``encode`` (the handler was called: what is in the request), ``answered``, ``cancelled``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import pathlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from mmcopy import Readiness, Receiver, ShmHandle, TensorData
from mmcopy.integrations.smg import ModelInfo, SmgWorker, StatusError, WorkerRequest
from mmcopy.wire.payload import Key

SERVED_NAME = "mmcopy-demo"
ANSWER = "seen"
HOLD_LIMIT_S = 20.0


class RecordingWorker(SmgWorker):
    def __init__(self, directory: pathlib.Path, model_dir: pathlib.Path, receiver: Receiver, **options: Any) -> None:
        super().__init__(ModelInfo.from_dir(model_dir, served_model_name=SERVED_NAME), receiver, **options)
        self.directory = directory
        self._lock = threading.Lock()
        self._rows = (directory / "rows").open("a", buffering=1)
        vocabulary = json.loads((model_dir / "tokenizer.json").read_text())["model"]["vocab"]
        self._answer = [vocabulary[letter] for letter in ANSWER]

    def close(self) -> None:
        self._rows.close()

    @property
    def behaviour(self) -> str:
        return (self.directory / "behaviour").read_text()

    def record(self, event: str, **fields: Any) -> None:
        with self._lock:
            self._rows.write(json.dumps({"event": event, **fields}) + "\n")

    def receive(self, tensors: Mapping[Key, TensorData]) -> Mapping[Key, Any]:
        names = [data.payload.name for data in tensors.values() if isinstance(data.payload, ShmHandle)]
        self.record("receiving", segments=names)
        deadline = time.monotonic() + HOLD_LIMIT_S
        while self.behaviour == "hold-receive" and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            return super().receive(tensors)
        except Exception as error:
            self.record("refused", error=type(error).__name__, segments=names)
            raise

    async def generate(self, request: WorkerRequest) -> AsyncIterator[Sequence[int]]:
        self.record("generate", **self.described(request))
        try:
            await self._hold()
            self._refuse()
            yield self._answer[:1]
            if self.behaviour == "fail-later":
                raise RuntimeError("told to fail in the middle")
            for letter in self._answer[1:]:
                yield [letter]
        except (asyncio.CancelledError, GeneratorExit):
            self.record("cancelled", request_id=request.request_id)
            raise
        self.record("answered", request_id=request.request_id)

    async def encode(self, request: WorkerRequest) -> None:
        self.record("encode", **self.described(request))
        await self._hold()
        self._refuse()
        self.record("answered", request_id=request.request_id)

    def described(self, request: WorkerRequest) -> dict[str, Any]:
        tensors, segments = {}, []
        for i, item in enumerate(request.items):
            for name, tensor in item.tensors.items():
                data = item.data[name]
                tensors[f"item{i}.{name}"] = {**described(tensor), "path": data.path}
                if isinstance(data.payload, ShmHandle):
                    segments.append(data.payload.name)
        return {
            "request_id": request.request_id,
            "stream": request.stream,
            "modalities": [item.modality for item in request.items],
            "rooms": list(request.bootstrap_rooms),
            "max_new_tokens": request.max_new_tokens,
            "placeholders": [list(place) for item in request.items for place in item.placeholders],
            "segments": segments,
            "segments_on_disk": [name for name in segments if pathlib.Path("/dev/shm", name).exists()],
            "tensors": tensors,
        }

    def _refuse(self) -> None:
        kind, _, code = self.behaviour.partition(" ")
        if kind == "fail-first":
            raise RuntimeError("told to fail before it answers")
        if kind == "answer":
            raise StatusError(code, f"told to answer {code}")

    async def _hold(self) -> None:
        deadline = time.monotonic() + HOLD_LIMIT_S
        while self.behaviour == "hold" and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


def described(tensor: Any) -> dict[str, Any]:
    """dtype, shape and bytes of a tensor as it is here, numpy's or torch's, whatever the message said."""
    if isinstance(tensor, np.ndarray):
        dtype, raw = str(tensor.dtype), tensor.tobytes()
    else:
        import torch

        dtype, raw = str(tensor.dtype).removeprefix("torch."), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": dtype,
        "shape": list(tensor.shape),
        "nbytes": len(raw),
        "sha256": hashlib.sha256(raw).hexdigest(),
    }


def encoder_of(dtype: str) -> Any:
    """A vision tower in that dtype, norm in float32, in a module that nobody knows."""
    import torch

    model = torch.nn.Module()
    model.visual = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8, dtype=getattr(torch, dtype)))
    return model


async def warm(worker: RecordingWorker, readiness: Readiness) -> None:
    """Stands for a warm-up: it lasts as long as the test wants."""
    if worker.behaviour == "warming":
        readiness.warming("image 1024x1024", modality="image", done=2, total=7)
        while worker.behaviour == "warming":
            await asyncio.sleep(0.01)
        worker.record("warm")
    readiness.ready()


async def serve(args: argparse.Namespace) -> None:
    readiness = Readiness()
    dtype = {"encoder": encoder_of(args.encoder_dtype)} if args.encoder else {"encoder_dtype": args.encoder_dtype}
    options = {
        "engine": args.engine,
        "readiness": readiness,
        **dtype,
        "shm_namespace_id": None if args.namespace == "own" else args.namespace,
        "receive_threads": args.receive_threads,
    }
    with Receiver("cpu", framework=args.framework) as receiver:
        worker = RecordingWorker(args.directory, args.model_dir, receiver, **options)
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        # The test that started us holds the other end: it is gone when this one is readable.
        loop.add_reader(sys.stdin, stop.set)
        await worker.start()
        warming = asyncio.create_task(warm(worker, readiness))
        if worker.behaviour != "warming":
            await warming
        print(f"ready on {worker.address}", flush=True)
        await stop.wait()
        warming.cancel()
        await worker.stop(grace_s=0.2)
        worker.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("model_dir", type=pathlib.Path)
    parser.add_argument("--engine", default="tokenspeed")
    parser.add_argument("--encoder-dtype", default="bfloat16")
    parser.add_argument("--encoder", action="store_true", help="give the worker a tower, and not the dtype's name")
    parser.add_argument("--namespace", default="own")
    parser.add_argument("--framework", default="numpy")
    parser.add_argument("--receive-threads", type=int, default=2)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
