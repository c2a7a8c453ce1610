"""``mmcopy explain``: which way tensors would go to each worker, and where each value came from.

The decisions are a real sender's, on this host, by its settings; workers are asked for their labels as the gateway asks
them, and probed as a sender probes them. Nothing is written to shared memory but the probe's own small segment.
"""

from __future__ import annotations

from .report import SIZES, Explanation, WorkerLines, explain
from .text import as_json, as_text

__all__ = ["SIZES", "Explanation", "WorkerLines", "as_json", "as_text", "explain"]
