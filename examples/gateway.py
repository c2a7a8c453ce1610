"""A gateway in Python: pixels go to a TokenSpeed worker through the arena, in the encoder's dtype.

python examples/gateway.py grpc://HOST:PORT
"""

import sys

import grpc
import numpy as np
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc

from mmcopy import Sender, TransportConfig, WorkerSpec
from mmcopy.config import wire_dtype
from mmcopy.integrations.smg import ask_worker, with_advertised
from mmcopy.wire import tokenspeed

url = sys.argv[1]
worker = with_advertised(WorkerSpec(url), ask_worker(url))  # its dtype, its shared memory, its socket
with Sender(TransportConfig(mode="auto")) as sender, grpc.insecure_channel(url.removeprefix("grpc://")) as channel:
    sender.connect(worker, timeout_s=10)  # connects and hands the arena over now, not while the first tensor goes
    pixels = np.random.default_rng(0).standard_normal((1200, 1536), np.float32)  # your preprocessor's output
    data = sender.send(pixels, dtype=wire_dtype("image", worker=worker).dtype, worker=worker)  # cast on the way

    request = pb.GenerateRequest(request_id="1")
    request.mm_inputs.items.add(modality=common_pb2.IMAGE, encoder_input=tokenspeed.to_proto(data))
    with sender.guard(data):  # takes the tensor back if the call fails
        for response in rpc.TokenSpeedSchedulerStub(channel).Generate(request, timeout=30):
            print(bytes(response.complete.output_ids).decode())
