"""Counters of senders and receivers, the seconds of a receive's stages, and both under SMG's Prometheus names."""

from __future__ import annotations

from .counters import Counter, Histogram, Metrics, Stage

__all__ = ["Counter", "Histogram", "Metrics", "Stage"]
