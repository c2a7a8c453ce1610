"""The recorded messages of SMG's gateway in data/smg, and what is known to be in each."""

from __future__ import annotations

import json
import pathlib
from types import ModuleType
from typing import Any

from smg_grpc_proto.generated import common_pb2, tokenspeed_encoder_pb2, tokenspeed_scheduler_pb2, vllm_engine_pb2

from mmcopy.wire import tokenspeed, vllm

DATA = pathlib.Path(__file__).parents[1] / "data" / "smg"

EXPECTED: dict[str, dict[str, Any]] = json.loads((DATA / "expected.json").read_text())
"""By file name: message, request_id, items, tensors by label, and so on."""

ENGINES: dict[str, ModuleType] = {"tokenspeed": tokenspeed, "vllm": vllm}

TENSOR_CLASSES = {"tokenspeed": tokenspeed_scheduler_pb2.TensorData, "vllm": vllm_engine_pb2.TensorData}

REQUEST_CLASSES = {
    "tokenspeed.grpc.scheduler.GenerateRequest": tokenspeed_scheduler_pb2.GenerateRequest,
    "tokenspeed.grpc.encoder.EncodeRequest": tokenspeed_encoder_pb2.EncodeRequest,
    "vllm.grpc.engine.GenerateRequest": vllm_engine_pb2.GenerateRequest,
}

__all__ = ["DATA", "ENGINES", "EXPECTED", "REQUEST_CLASSES", "TENSOR_CLASSES", "common_pb2", "engine_of", "load"]


def load(file: str) -> Any:
    """The message in ``file``, parsed by its own class."""
    return REQUEST_CLASSES[EXPECTED[file]["message"]].FromString((DATA / file).read_bytes())


def engine_of(file: str) -> str:
    return EXPECTED[file]["message"].split(".")[0]


def recorded_label(engine: str, key: tuple[int, str]) -> str:
    """How expected.json names the tensor ``key`` of a request."""
    index, name = key
    return f"{'input' if engine == 'vllm' else 'item'}{index}.{name}"
