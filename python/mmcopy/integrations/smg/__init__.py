"""A worker for SMG's gateway: TokenSpeed's protocol or vLLM's, with the tensors already on the device.

    class Worker(SmgWorker):
        async def generate(self, request):
            for item in request.items:
                embed(item.tensors["encoder_input"])
            yield [token_id]

    worker = Worker(ModelInfo.from_dir(path, served_model_name="tiny"), Receiver("cuda:0"))
    await worker.start()

Needs ``pip install 'mmcopy[smg]'``; importing this package does not.
"""

from __future__ import annotations

from .ask import Advertised, ask_worker, with_advertised
from .model import ModelInfo
from .request import MultimodalItem, WorkerRequest
from .status import StatusError
from .worker import SmgWorker

__all__ = [
    "Advertised",
    "ModelInfo",
    "MultimodalItem",
    "SmgWorker",
    "StatusError",
    "WorkerRequest",
    "ask_worker",
    "with_advertised",
]
