"""Processes whose parent was killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import psutil


def orphans_of(code: str) -> list[psutil.Process]:
    """Run ``code`` until it prints the id of a child, kill it, and return that child with the child's own children."""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            child = psutil.Process(int(parent.stdout.readline()))
            family = [child, *child.children()]
            assert child.is_running()
        finally:
            parent.kill()
    return family


def have_ended(processes: Sequence[psutil.Process]) -> bool:
    """Whether none of ``processes`` runs any more."""
    return not any(each.is_running() and each.status() != "zombie" for each in processes)
