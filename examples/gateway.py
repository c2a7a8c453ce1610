"""A gateway in Python: pixels go to a TokenSpeed worker through shared memory, in the encoder's dtype.

python examples/gateway.py HOST:PORT
"""

import sys

import grpc
import numpy as np
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc as rpc

from mmcopy import Sender, TransportConfig
from mmcopy.wire import tokenspeed

with Sender(TransportConfig(mode="shm")) as sender, grpc.insecure_channel(sys.argv[1]) as channel:
    pixels = np.random.default_rng(0).standard_normal((1200, 1536), np.float32)  # your preprocessor's output
    data = sender.send(pixels, dtype="bfloat16")  # the cast happens on the way

    request = pb.GenerateRequest(request_id="1")
    request.mm_inputs.items.add(modality=common_pb2.IMAGE, encoder_input=tokenspeed.to_proto(data))
    with sender.guard(data):  # takes the segment back if the call fails
        for response in rpc.TokenSpeedSchedulerStub(channel).Generate(request, timeout=30):
            print(bytes(response.complete.output_ids).decode())
