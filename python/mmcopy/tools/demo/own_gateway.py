"""mmcopy's own gateway process: preprocesses pictures with numpy and sends them through its arena.

``python -m mmcopy.tools.demo.own_gateway --worker URL --model-dir DIR --family NAME --report-fd FD`` answers chat
requests like the real gateway (``POST /v1/chat/completions``, pictures as data URLs) until SIGTERM, SIGINT or the end
of its stdin. It writes JSON lines to FD: ``ready`` (or ``error``) once, and ``stopped`` with its sender's counters.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mmcopy import MmcopyError, Sender, TensorData, TransportConfig, WorkerSpec
from mmcopy.config import wire_dtype
from mmcopy.errors import ConfigError
from mmcopy.integrations.smg.ask import ask_worker, with_advertised
from mmcopy.wire import tokenspeed, vllm

from .checks import is_primary
from .expected import prepared
from .families import FAMILIES, Family
from .pictures import decode
from .reporting import Report, wait_for_stop

__all__ = ["OwnGateway"]

CHAT_PATH = "/v1/chat/completions"
GENERATE_LIMIT_S = 60.0
CONNECT_LIMIT_S = 10.0
RETURN_LIMIT_S = 2.0
IDLE_LIMIT_S = 5.0
POLL_S = 0.01


class OwnGateway:
    """Answers chat requests with one worker. Thread-safe; each call blocks until the worker has answered."""

    def __init__(self, family: Family, worker: WorkerSpec, sender: Sender, channel: Any, tokenizer: Any) -> None:
        from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc, vllm_engine_pb2_grpc

        self._family = family
        self._worker = worker
        self._sender = sender
        self._tokenizer = tokenizer
        self._dtype = wire_dtype("image", worker=worker).dtype
        stub: Any = (
            vllm_engine_pb2_grpc.VllmEngineStub
            if worker.engine == "vllm"
            else tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerStub
        )
        self._stub = stub(channel)

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a chat request. Raises :class:`ConfigError` for an unsupported one, and what sending raises."""
        pictures, text = _parts_of(body)
        engine = str(self._worker.engine)
        arrays = prepared(self._family, [decode(file) for file in pictures], engine=engine, dtype=self._dtype)
        dtypes = {key: self._dtype for key in arrays if is_primary(key[1])}
        sent = self._sender.send_many(arrays, dtype=dtypes, worker=self._worker)
        request_id = f"chatcmpl-{uuid.uuid4().hex}"
        ids: list[int] = []
        with self._sender.guard(*sent.values()):
            message = _message(engine, request_id, sent, self._tokenizer.encode(text).ids)
            for response in self._stub.Generate(message, timeout=GENERATE_LIMIT_S):
                if response.HasField("complete"):
                    ids = list(response.complete.output_ids)
        choice = {"index": 0, "message": {"role": "assistant", "content": self._tokenizer.decode(ids)}}
        return {"id": request_id, "object": "chat.completion", "choices": [choice]}


def _parts_of(body: Mapping[str, Any]) -> tuple[list[bytes], str]:
    """The encoded pictures of a chat request, and its text."""
    pictures, text = [], ""
    for part in body["messages"][-1]["content"]:
        if part["type"] == "text":
            text += part["text"]
        elif part["type"] == "image_url" and part["image_url"]["url"].startswith("data:"):
            pictures.append(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
        else:
            raise ConfigError(f"gateway mmcopy takes text, and pictures as data URLs, not {part['type']!r}")
    return pictures, text


def _message(engine: str, request_id: str, sent: Mapping[tuple[int, str], TensorData], input_ids: Sequence[int]) -> Any:
    """The engine's own request."""
    from smg_grpc_proto.generated import common_pb2, tokenspeed_scheduler_pb2, vllm_engine_pb2

    message: Any
    if engine == "vllm":
        message = vllm_engine_pb2.GenerateRequest(request_id=request_id)
        message.mm_inputs.modality = common_pb2.IMAGE
        for (_, name), data in sent.items():
            inputs = message.mm_inputs
            into = inputs.pixel_values if name == vllm.PIXEL_VALUES else inputs.model_specific_tensors[name]
            into.CopyFrom(vllm.to_proto(data))
    else:
        message = tokenspeed_scheduler_pb2.GenerateRequest(request_id=request_id)
        for (index, name), data in sorted(sent.items(), key=lambda pair: pair[0][0]):
            items = message.mm_inputs.items
            item = items[index] if index < len(items) else items.add(modality=common_pb2.IMAGE)
            into = item.encoder_input if name == tokenspeed.ENCODER_INPUT else item.model_specific_tensors[name]
            into.CopyFrom(tokenspeed.to_proto(data))
    message.tokenized.input_ids.extend(input_ids)
    return message


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = IDLE_LIMIT_S  # an idle connection would keep the server from closing

    def do_POST(self) -> None:
        """Answers one chat request. An error fails that request only."""
        import grpc

        status, answer = 200, {}
        try:
            if self.path != CHAT_PATH:
                raise ConfigError(f"gateway mmcopy has no {self.path}, only {CHAT_PATH}")
            answer = self.server.gateway.chat(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        except grpc.RpcError as error:
            status, answer = 502, {"error": f"the worker answered {error.code().name}: {error.details()}"}
        except (ConfigError, ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            status, answer = 400, {"error": str(error)}
        except MmcopyError as error:
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes no access log."""


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # closing it waits for them
    request_queue_size = 128

    def __init__(self, gateway: OwnGateway) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.gateway = gateway


def serve(args: argparse.Namespace, report: Report) -> None:
    """Serves until it has to stop, then waits a little for leases that are still in flight."""
    import grpc
    from tokenizers import Tokenizer

    worker = WorkerSpec(args.worker)
    worker = with_advertised(worker, ask_worker(args.worker))
    config = TransportConfig(mode=args.transport, shm_min_bytes=args.shm_min_bytes)
    tokenizer = Tokenizer.from_file(str(Path(args.model_dir) / "tokenizer.json"))
    channel = grpc.insecure_channel(args.worker.removeprefix("grpc://"), options=[("grpc.enable_http_proxy", 0)])
    with Sender(config) as sender:
        sender.connect(worker, timeout_s=CONNECT_LIMIT_S)  # so that the first request finds the arena handed over
        server = _Server(OwnGateway(FAMILIES[args.family], worker, sender, channel, tokenizer))
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="chat-server")
        thread.start()
        try:
            asyncio.run(wait_for_stop(lambda: report.write("ready", url=f"http://127.0.0.1:{server.server_port}")))
        finally:
            server.shutdown()
            thread.join()
            channel.close()  # ends the calls that run, and so their requests
            server.server_close()
        deadline = time.monotonic() + RETURN_LIMIT_S
        while sender.leases_out and time.monotonic() < deadline:
            time.sleep(POLL_S)
        report.write("stopped", leases_out=sender.leases_out, counters=sender.metrics.snapshot())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Its options."""
    parser = argparse.ArgumentParser(
        prog="python -m mmcopy.tools.demo.own_gateway", description="The demo's own gateway process."
    )
    parser.add_argument("--worker", required=True)
    parser.add_argument("--model-dir", required=True)
    parser.add_argument("--family", choices=sorted(FAMILIES), required=True)
    parser.add_argument("--report-fd", type=int, required=True)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--shm-min-bytes", type=int)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 when it could not serve."""
    args = parse(argv)
    report = Report(args.report_fd)
    try:
        serve(args, report)
    except MmcopyError as error:
        report.write("error", error=str(error), kind=type(error).__name__)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
