"""Run in a mount namespace of its own, with a /dev/shm of 8 MiB: one request whose pixels do not fit.

``python -m tests.rigs.gateway_small_shm DIRECTORY MODEL_DIR`` prints what happened as a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from .gateway_pictures import expected, picture
from .gateway_stack import Leg, Stack, by_path, without_path

LARGE, SMALL = picture(61, 1600, 1600), picture(62)


def main() -> None:
    directory, model_dir, engine = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    requests = []
    with Stack(directory, model_dir, [Leg(engine=engine)], transport="shm") as stack:
        for pixels in (LARGE, SMALL):
            reply = stack.ask(pixels)
            tensors = stack["regular"].rows("generate")[len(requests)]["tensors"]
            requests.append(
                {
                    "status": reply.status,
                    "content": reply.content,
                    "equal": without_path(tensors) == expected([pixels], engine=engine),
                    "paths": by_path(tensors),
                    "left": sorted(path.name for path in Path("/dev/shm").iterdir()),
                }
            )
        failures = stack.gateway.metrics("smg_mm_shm_write_failures_total")
    space = os.statvfs("/dev/shm")
    print(json.dumps({"size": space.f_blocks * space.f_frsize, "requests": requests, "failures": failures}))


if __name__ == "__main__":
    main()
