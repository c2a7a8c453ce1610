"""A worker for an SMG gateway: pixels arrive on the device, and it answers "hi".

    python examples/worker.py MODEL_DIR [DEVICE]

MODEL_DIR holds the model's config.json. Prints the URL to give to the gateway as --worker-urls.
"""

import asyncio
import sys

from mmcopy import Receiver
from mmcopy.endpoint import WorkerEndpoint
from mmcopy.integrations.smg import ModelInfo, SmgWorker


class Worker(SmgWorker):
    async def generate(self, request):
        for item in request.items:
            pixels = item.tensors["encoder_input"]  # on the device, safe on the current stream
            way = item.data["encoder_input"].path  # lease, segment or inline
            print(item.modality, tuple(pixels.shape), pixels.dtype, pixels.device, way, flush=True)
        yield [ord("h"), ord("i")]  # token ids; run your model here


async def main(model_dir, device="cpu"):
    # mmcopy's own gateways connect to the endpoint, SMG's do not need it
    with WorkerEndpoint() as endpoint, Receiver(device, endpoint=endpoint) as receiver:
        worker = Worker(ModelInfo.from_dir(model_dir, served_model_name="tiny"), receiver, encoder_dtype="bfloat16")
        await worker.start()
        print(worker.address, flush=True)
        await worker.wait()


asyncio.run(main(*sys.argv[1:]))
