"""A prewarm as tests call it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mmcopy import PrewarmReport, prewarm
from mmcopy.prewarm import PrewarmOptions


def warm_with(model: Any, **given: Any) -> PrewarmReport:
    """:func:`mmcopy.prewarm` with its arguments and the fields of its options side by side."""
    names = {each.name for each in fields(PrewarmOptions)}
    options = PrewarmOptions(**{name: given.pop(name) for name in names & given.keys()})
    return prewarm(model, options=options, **given)
