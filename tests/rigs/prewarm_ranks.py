"""Several ranks of one prewarm, each a process: prints what happened on each as JSON lines.

python -m tests.rigs.prewarm_ranks STORE SCENARIO RANK
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

import mmcopy
from mmcopy.metrics import Counter
from mmcopy.prewarm.inputs import Shape
from mmcopy.prewarm.memory import Meter
from mmcopy.prewarm.ranks import Ranks
from mmcopy.prewarm.run import Job

from .encoder_fakes import PLAIN, Model
from .warming import warm_with

WORLD = 2
SCENARIOS = (
    "receives",
    "out-of-memory",
    "raises",
    "disagree",
    "decodes",
    "elsewhere",
    "repeats",
    "alone",
    "comes-late",
    "hangs",
)


def behaviour(scenario: str, rank: int) -> Any:
    def behave(pixels: torch.Tensor) -> None:
        area = pixels.shape[-2] * pixels.shape[-1]
        if scenario == "out-of-memory" and rank == 1 and area > 300:
            raise torch.OutOfMemoryError("rank 1 is full")
        if scenario == "raises" and rank == 1 and area > 100:
            raise RuntimeError("bad kernel")
        if scenario == "hangs" and rank == 1 and area > 100:
            threading.Event().wait(30)

    return behave


def warm(scenario: str, rank: int) -> dict[str, Any]:
    """One prewarm, and what came of it on this rank."""
    if scenario == "comes-late":
        return come_late(rank)
    if scenario == "alone":
        return settle_alone(rank)
    with torch.device("meta" if scenario == "elsewhere" and rank else "cpu"):
        model = Model(behaviour(scenario, rank))
    sizes = {"image": [(8, 8), (8, 16 if rank else 24)]} if scenario == "disagree" else None
    readiness = mmcopy.Readiness()
    found: dict[str, Any] = {"scenario": scenario}
    receiver = mmcopy.Receiver("cpu", group=dist.group.WORLD) if scenario == "receives" else None
    try:
        report = warm_with(
            model,
            role="decode" if scenario == "decodes" and rank else "aggregated",
            repeats=2 if scenario == "repeats" and rank else 1,
            device="cpu",
            family=PLAIN,
            sizes=sizes,
            group=dist.group.WORLD,
            device_group=dist.group.WORLD,
            deadline_s=5 if scenario == "hangs" else 60,
            readiness=readiness,
            receiver=receiver,
        )
        found["warnings"] = list(report.warnings)
        found |= {"status": str(report.status), "shapes": [[str(s.shape), str(s.outcome)] for s in report.shapes]}
        found["notes"] = [s.note for s in report.shapes]
    except (mmcopy.errors.PrewarmError, mmcopy.errors.ConfigError) as error:
        found["error"] = str(error)
    if receiver is not None:
        found["received"] = receiver.metrics.get(Counter.TENSORS_RECEIVED)
        receiver.close()
    return found | {"encoded": [list(size[1:]) for size in model.sizes], "ready": str(readiness.state)}


def settle_alone(rank: int) -> dict[str, Any]:
    """The last encode ends after the deadline of one rank and before that of the other, which goes on to settle."""
    group = dist.new_group(backend="gloo")
    deadline, model = time.monotonic() + 5, Model()
    job = Job(
        family=PLAIN,
        config={},
        plan=[Shape("image", ((8, 8),))],
        dtypes={"image": "float16"},
        device=torch.device("cpu"),
        stream=None,
        encode=lambda modality, tensors: model.get_image_features(**tensors),
        ranks=Ranks(group),
        meter=Meter(torch.device("cpu")),
        deadline=deadline,
        repeats=1,
        step=lambda shape, done, total: None,
        prepare=lambda: 0.0,
        agreed=[],
    )
    job.work()
    if rank:
        job.settle()
    late = time.monotonic() >= deadline
    dist.barrier()  # whoever ended now would end the other's wait
    shapes = [[str(each.outcome), each.on_callers_thread] for each in job.results]
    return {"scenario": "alone", "shapes": shapes, "late": late}


def come_late(rank: int) -> dict[str, Any]:
    """Rank 1 calls when the deadline of rank 0 has passed, which uses its receiver already."""
    group = dist.new_group(backend="gloo")
    options: dict[str, Any] = {"role": "aggregated", "device": "cpu", "family": PLAIN, "group": group}
    with mmcopy.Receiver("cpu") as receiver:
        if rank:
            dist.barrier()
        model = Model()
        report = warm_with(model, receiver=receiver, deadline_s=60 if rank else 1, **options)
        if not rank:
            dist.barrier()
        dist.barrier()
        for thread in threading.enumerate():
            if thread.name == "mmcopy-prewarm":
                thread.join(30)
        received = receiver.metrics.get(Counter.TENSORS_RECEIVED)
    return {
        "scenario": "comes-late",
        "status": str(report.status),
        "reason": report.reason,
        "received": received,
        "encoded": len(model.sizes),
    }


def main(store: str, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for scenario in SCENARIOS:
        print(json.dumps(warm(scenario, rank)), flush=True)
    os._exit(0)  # a thread of the last one still hangs in C++, and must not be there when that is torn down


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
