"""Have a model's encoders warm before its worker says ready.

    readiness = Readiness()
    worker = SmgWorker(..., encoder=model, readiness=readiness)    # listens, and says that it is not ready
    report = prewarm(model, role="aggregated", device="cuda:0", receiver=receiver, readiness=readiness,
                     before_ready=lambda report: engine.size_kv_cache())

Importing this package needs neither torch nor transformers.
"""

from __future__ import annotations

from .forecast import Forecast, foresee
from .options import PrewarmOptions
from .plan import Role, Sizes, parse_shapes, plan_shapes
from .prewarm import prewarm
from .report import Outcome, PrewarmReport, PrewarmStatus, ShapeReport

__all__ = [
    "Forecast",
    "Outcome",
    "PrewarmOptions",
    "PrewarmReport",
    "PrewarmStatus",
    "Role",
    "ShapeReport",
    "Sizes",
    "foresee",
    "parse_shapes",
    "plan_shapes",
    "prewarm",
]
