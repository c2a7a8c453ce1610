"""The explanation for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mmcopy.config import ENDPOINT_LABEL, WorkerSpec
from mmcopy.send.routing import Decision, Delivery, Sharing
from mmcopy.send.workers import Connection

from .report import Explanation, LegLines, WorkerLines

__all__ = ["as_json", "as_text"]

NAME_WIDTH, VALUE_WIDTH = 15, 10


def as_text(explanation: Explanation) -> str:
    """One block per worker, each line a name, a value and where it came from."""
    router = explanation.router
    blocks = [
        [
            "the router, for no worker in particular",
            _line("mode", router.mode, router.mode_source),
            _line("shm_min_bytes", router.shm_min_bytes, router.shm_min_bytes_source),
            *(f"  warning: {text}" for text in explanation.warnings),
        ]
    ]
    blocks += [_worker(lines) for lines in explanation.workers]
    blocks += [_leg(lines) for lines in explanation.legs]
    if len(explanation.workers) > 1 and explanation.no_legs:
        blocks.append([f"no request is served by all of these workers: {explanation.no_legs}"])
    return "\n\n".join("\n".join(block) for block in blocks)


def as_json(explanation: Explanation) -> str:
    """One object: router, workers, legs, warnings."""
    router = explanation.router
    return json.dumps(
        {
            "router": {
                "mode": router.mode,
                "mode_source": router.mode_source,
                "shm_min_bytes": router.shm_min_bytes,
                "shm_min_bytes_source": router.shm_min_bytes_source,
                "probe_max_age_s": explanation.probe_max_age_s,
            },
            "workers": [
                {
                    "url": lines.worker.url,
                    "role": lines.worker.role,
                    "engine": lines.worker.engine,
                    "fault": lines.fault,
                    "labels": dict(lines.worker.labels),
                    **_settings(lines.delivery),
                    "shares_memory": lines.connection.ok,
                    "sharing": _sharing(lines.connection.sharing),
                    "takes_arena": lines.connection.has_arena,
                    "arena": _arena(lines.worker, lines.connection),
                    "dtypes": {name: {"dtype": d.dtype, "source": d.source} for name, d in lines.dtypes.items()},
                    "paths": _paths(lines.decisions),
                }
                for lines in explanation.workers
            ],
            "legs": [
                {
                    "name": lines.name,
                    "receivers": [worker.url for worker in lines.delivery.receivers],
                    **_settings(lines.delivery),
                    "paths": _paths(lines.decisions),
                }
                for lines in explanation.legs
            ],
            "warnings": list(explanation.warnings),
        },
        indent=2,
    )


def _worker(lines: WorkerLines) -> list[str]:
    worker = lines.worker
    text = [f"{worker.url}  {worker.engine or 'unknown engine'}, {worker.role}"]
    if lines.fault:
        text.append(f"  not asked: {lines.fault}")
    text += _delivery(lines.delivery)
    text.append(_line("shares memory", "yes" if lines.connection.ok else "no", _sharing(lines.connection.sharing)))
    takes = "yes" if lines.connection.has_arena else "no"
    text.append(_line("takes arena", takes, _arena(worker, lines.connection)))
    text += [_line(f"dtype {name}", dtype.dtype, dtype.source) for name, dtype in lines.dtypes.items()]
    return text + _ways(lines.decisions)


def _leg(lines: LegLines) -> list[str]:
    receivers = ", ".join(worker.url for worker in lines.delivery.receivers)
    several = "to each of " if lines.delivery.several_readers else "to one of " if "," in receivers else "to "
    return [f"{lines.name}, {several}{receivers}", *_delivery(lines.delivery), *_ways(lines.decisions)]


def _delivery(delivery: Delivery) -> list[str]:
    return [
        _line("mode", delivery.mode, delivery.mode_source),
        _line("shm_min_bytes", delivery.shm_min_bytes, delivery.shm_min_bytes_source),
    ]


def _ways(decisions: Mapping[str, Decision]) -> list[str]:
    return [_line(name, decision.path, decision.detail) for name, decision in decisions.items()]


def _line(name: str, value: object, rest: str) -> str:
    return f"  {name:<{NAME_WIDTH}} {value!s:<{VALUE_WIDTH}} {rest}".rstrip()


def _sharing(sharing: Sharing) -> str:
    return sharing.detail or "as far as can be seen from here"


def _arena(worker: WorkerSpec, connection: Connection) -> str:
    return f"handed over at {worker.labels.get(ENDPOINT_LABEL)}" if connection.has_arena else connection.no_arena


def _settings(delivery: Delivery) -> dict[str, Any]:
    return {
        "mode": delivery.mode,
        "mode_source": delivery.mode_source,
        "shm_min_bytes": delivery.shm_min_bytes,
        "shm_min_bytes_source": delivery.shm_min_bytes_source,
    }


def _paths(decisions: Mapping[str, Decision]) -> dict[str, dict[str, str | None]]:
    return {
        name: {"path": decision.path, "reason": decision.reason, "detail": decision.detail}
        for name, decision in decisions.items()
    }
