"""Runs ``mmcopy doctor`` as a user does, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAIN = "import sys; from mmcopy.tools.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True)
class Ran:
    """What the command printed and returned."""

    code: int
    stdout: str
    stderr: str

    @property
    def report(self) -> dict[str, Any]:
        report = json.loads(self.stdout)
        assert isinstance(report, dict)
        return report

    def line(self, name: str) -> dict[str, str]:
        """The one line of that name."""
        found = [line for line in self.report["lines"] if line["name"] == name]
        assert len(found) == 1, f"{len(found)} lines are named {name!r}: {self.stdout}"
        result: dict[str, str] = found[0]
        return result


def doctor(
    *arguments: str,
    before: str = "",
    environ: Mapping[str, str] | None = None,
    wrapper: Sequence[str] = (),
) -> Ran:
    """Run the command; ``before`` is Python that runs first in its process, ``wrapper`` a program that starts it."""
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", f"{before}\n{MAIN}", "doctor", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **(environ or {})},
        timeout=150,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def blocking(*names: str) -> str:
    """Python that makes ``import`` of these packages fail as if they were not installed."""
    return f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def with_private_shm(options: str = "size=2g", *, then: str = "true") -> tuple[str, ...]:
    """A wrapper that gives the command a /dev/shm of its own, runs the shell command ``then`` first, and afterwards
    lists on standard error what was left in it that was not there before. Needs root."""
    script = (
        f'mount -t tmpfs -o {options} tmpfs /dev/shm && {then} && before=$(ls -A /dev/shm); "$@"; code=$?; '
        'after=$(ls -A /dev/shm); [ "$before" = "$after" ] || echo "left behind: $after" >&2; exit $code'
    )
    return ("unshare", "-m", "sh", "-c", script, "sh")
